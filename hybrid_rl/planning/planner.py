"""Makes the plan of a run from its settings, its GPUs and the sizes of its models."""

from dataclasses import replace

from hybrid_rl.config import Config
from hybrid_rl.memory.residency import RESIDENCY
from hybrid_rl.planning.engine_memory import engine_allocations, kv_cache_bytes, kv_sequence_tokens, kv_token_bytes
from hybrid_rl.planning.loading import loading_moments
from hybrid_rl.planning.plan import GIB, Allocation, Machine, Plan
from hybrid_rl.planning.saving import saving_moments
from hybrid_rl.planning.shapes import Shapes
from hybrid_rl.planning.sync_memory import sync_allocations
from hybrid_rl.planning.tenant_memory import (
    choose_residents,
    tenant_allocation,
    tenant_allocations,
    with_residents,
)
from hybrid_rl.planning.training_memory import TRAINED, score_allocations, update_allocations
from hybrid_rl.planning.workload import Workload

TRAINER_CONTEXT_BYTES = int(1.3 * GIB)
"""CUDA context and libraries of the trainer's process, measured on an H200."""
CONNECTION_BYTES = int(0.9 * GIB)
"""NCCL's buffers for one model-parallel group, measured on two H200."""


def make_plan(config: Config, machine: Machine, shapes: Shapes) -> Plan:
    """Return the plan of a run.

    memory.swap decides which tenants move: none with `off`, all that RESIDENCY releases with `vmm` and `deepspeed`, and
    with `auto` only those that do not fit into every phase; see choose_residents. models.shard_frozen decides whether
    ranks divide reference and reward model: with `auto` only where the plan does not fit with whole ones.
    """
    setting, has_frozen = config.models.shard_frozen, bool(shapes.reference or shapes.reward)
    whole = Workload(config=config, machine=machine, shapes=shapes)
    sharded = replace(whole, shards_frozen=True)
    if setting != "auto" or machine.num_ranks == 1 or not has_frozen:
        return _plan(sharded if setting == "true" and has_frozen else whole)
    plan = _plan(whole)
    return plan if plan.fits else _plan(sharded)


def _plan(work: Workload) -> Plan:
    """Return the plan of a run, in which frozen models are sharded as the workload says."""
    config, machine = work.config, work.machine
    others = [
        *_process_allocations(work),
        *sync_allocations(work),
        *engine_allocations(work),
        *score_allocations(work),
        *(allocation for name in TRAINED for allocation in update_allocations(work, name)),
    ]
    tenants = tenant_allocations(work)
    kv_phases = tenant_allocation(work, "engine_kv_cache", 0).phases
    kv_bytes = kv_cache_bytes(work, [*tenants, *others], kv_phases)
    tenants.append(tenant_allocation(work, "engine_kv_cache", kv_bytes))
    resident = choose_residents(work, tenants, others) if config.memory.swap == "auto" else frozenset[str]()
    allocations = [*with_residents(tenants, resident), *others]
    kv_tokens = kv_bytes // kv_token_bytes(work)
    return Plan(
        allocations=tuple(a for a in allocations if a.num_bytes or a.host_bytes),
        loading=loading_moments(work, allocations),
        saving=saving_moments(work, allocations),
        shards_frozen=work.shards_frozen,
        machine=machine,
        residency=RESIDENCY | {name: RESIDENCY[name].in_every_phase() for name in resident},
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        kv_sequences=kv_tokens // kv_sequence_tokens(work),
        max_concurrent_sequences=work.max_concurrent_sequences,
    )


def _process_allocations(work: Workload) -> list[Allocation]:
    """Return what the trainer's process holds in every phase besides its tensors."""
    config = work.config
    num_groups = (config.update.sequence_parallel_size > 1) + (config.rollout.tensor_parallel_size > 1)
    return [
        Allocation(name="trainer context", num_bytes=TRAINER_CONTEXT_BYTES),
        Allocation(name="connections", num_bytes=CONNECTION_BYTES * num_groups),
    ]
