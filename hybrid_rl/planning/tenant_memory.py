"""Memory of the tenants on one GPU, which settings let them move, and which of them memory.swap = auto moves."""

from collections.abc import Iterable, Sequence

from hybrid_rl.memory.residency import ALL_PHASES, RESIDENCY, Phase, TenantSpec
from hybrid_rl.planning.engine_memory import engine_weight_bytes
from hybrid_rl.planning.plan import Allocation, peak_bytes
from hybrid_rl.planning.training_memory import TRAINED, frozen_bytes, trained_footprint
from hybrid_rl.planning.workload import Workload


def tenant_allocations(work: Workload) -> list[Allocation]:
    """Return the tenants and the buffers of the training engines, as if every tenant moved that can.

    The KV cache is missing, because its size depends on all other allocations.
    """
    shapes, found = work.shapes, [tenant_allocation(work, "engine_weights", engine_weight_bytes(work))]
    for name, shape in {"reference": shapes.reference, "reward_model": shapes.reward}.items():
        if shape:
            found.append(tenant_allocation(work, name, frozen_bytes(work, shape)))
    for name in TRAINED:
        if part := trained_footprint(work, name):
            optimizer = tenant_allocation(
                work, f"{name}_optimizer", part.optimizer_bytes, copied_bytes=part.moved_bytes
            )
            found += [
                optimizer,
                Allocation(name=f"{name} optimizer on the host", num_bytes=0, host_bytes=part.host_bytes),
                Allocation(name=f"{name} buckets", num_bytes=part.buffer_bytes),
                tenant_allocation(work, f"{name}_parameters", part.parameter_bytes),
            ]
    return found


def tenant_allocation(work: Workload, name: str, num_bytes: int, *, copied_bytes: int | None = None) -> Allocation:
    """Return the allocation of a tenant in its phases, or in every phase if the settings do not let it move.

    Args:
        work: settings and size of a step.
        name: name of the tenant in RESIDENCY.
        num_bytes: its size on the GPU.
        copied_bytes: bytes that a copy to the host or back moves; None for all of it.
    """
    spec = RESIDENCY[name]
    phases = spec.phases if can_move(spec, work) else ALL_PHASES
    trips = num_restores(phases)
    copied = num_bytes if copied_bytes is None else copied_bytes
    out, back = copied * (spec.on_release == "copy"), copied * (spec.on_release != "drop")
    return Allocation(
        name=name,
        num_bytes=num_bytes,
        phases=phases,
        host_bytes=max(out, back) if trips else 0,
        out_bytes=trips * out,
        in_bytes=trips * back,
    )


def can_move(spec: TenantSpec, work: Workload) -> bool:
    """Return whether the settings let a tenant be released."""
    swap = work.config.memory.swap
    if swap == "off":
        return False
    if spec.model == "engine":
        return work.config.rollout.engine != "hf"  # the Hugging Face engine cannot release memory
    if spec.is_trained and spec.content == "parameters":
        is_shared = work.aliases_weights if spec.model == "actor" else work.shares_critic
        return swap != "deepspeed" and not is_shared  # DeepSpeed's offload moves the optimizer only
    return True


def num_restores(phases: frozenset[Phase]) -> int:
    """Return how often a step restores a tenant of these phases: how often the loop enters them from outside."""
    order = list(Phase)
    return sum(phase in phases and order[place - 1] not in phases for place, phase in enumerate(order))


def with_residents(allocations: Iterable[Allocation], resident: frozenset[str]) -> list[Allocation]:
    """Return the allocations with the named tenants resident in every phase."""
    return [a.in_every_phase() if a.name in resident else a for a in allocations]


def choose_residents(work: Workload, tenants: Sequence[Allocation], others: Sequence[Allocation]) -> frozenset[str]:
    """Return the names of the tenants that memory.swap = auto keeps resident because every phase has room for them.

    The tenants that copy most bytes have precedence. The engine's tenants copy nothing, come last, and stay resident or
    move together.

    Args:
        work: settings and size of a step.
        tenants: allocations as if every tenant moved.
        others: all other allocations.
    """
    moving = [a for a in tenants if a.phases != ALL_PHASES and RESIDENCY[a.name].model != "engine"]
    moving.sort(key=lambda a: -(a.out_bytes + a.in_bytes))
    engine = frozenset(name for name, spec in RESIDENCY.items() if spec.model == "engine")
    resident = frozenset[str]()
    for group in (*(frozenset({a.name}) for a in moving), engine):
        candidates = resident | group
        allocations = [*with_residents(tenants, candidates), *others]
        if all(peak_bytes(allocations, phase) <= work.machine.budget_bytes for phase in Phase):
            resident = candidates
    return resident
