"""Memory of the training engines and of forwards without gradient on one GPU, besides parameters and optimizer."""

from hybrid_rl.memory.residency import SCORE, UPDATE_ACTOR, UPDATE_CRITIC
from hybrid_rl.models.attention import repeats_keys
from hybrid_rl.models.fused_layers import uses_liger
from hybrid_rl.planning.footprint import Footprint, Sharding, engine_footprint, head_bytes
from hybrid_rl.planning.plan import Allocation
from hybrid_rl.planning.workload import Workload

TRAINED = ("actor", "critic")


def trained_footprint(work: Workload, name: str) -> Footprint | None:
    """Return the footprint of the training engine of `actor` or `critic`; None if the run has no critic."""
    shape = work.shapes.trained(name)
    if shape is None:
        return None
    update, lora = work.config.update, work.config.models.lora
    shard = shape.shard(update.tensor_parallel_size)
    sharding = Sharding(
        zero_stage=update.zero_stage,
        num_ranks=work.machine.num_ranks // update.tensor_parallel_size,
        dtype_bytes=work.dtype_bytes,
        optimizer=update.actor if name == "actor" else update.critic,
    )
    num_trained = shard.num_adapted(lora) if lora.rank else shard.num_params
    return engine_footprint(shard, sharding, num_trained=num_trained)


def score_allocations(work: Workload) -> list[Allocation]:
    """Return the peak of the forwards of SCORE."""
    shapes, (tokens, head_tokens) = work.shapes, work.forward_pack
    models = [shape for shape in (shapes.actor, shapes.critic, shapes.reference, shapes.reward) if shape]
    footprints = [part for name in TRAINED if (part := trained_footprint(work, name))]
    sizes = {
        "activations": max(shape.transient_bytes(tokens, work.dtype_bytes) for shape in models),
        "log-prob head": head_bytes(shapes.actor, head_tokens, backend=work.machine.backend, backward=False),
        "gathered weights": max(part.gathered_bytes for part in footprints),
    }
    return [Allocation(name=name, num_bytes=size, phases=frozenset({SCORE})) for name, size in sizes.items()]


def update_allocations(work: Workload, name: str) -> list[Allocation]:
    """Return what the update of `actor` or `critic` takes; activations count in full with tensor parallelism, too."""
    part, shape = trained_footprint(work, name), work.shapes.trained(name)
    if part is None or shape is None:
        return []
    (tokens, head_tokens), models = work.update_pack, work.config.models
    activations = shape.activation_bytes(
        tokens,
        work.dtype_bytes,
        checkpointing=models.gradient_checkpointing,
        repeats_keys=repeats_keys(models.attention),
        is_fused=uses_liger(models.fused_layers, shape.model_type, is_half_on_gpu=work.is_half_on_gpu),
    )
    has_entropy = work.config.update.entropy_coef != 0
    head = head_bytes(shape, head_tokens, backend=work.machine.backend, backward=True, has_entropy=has_entropy)
    backward = max(head, shape.transient_bytes(tokens, work.dtype_bytes))
    sizes = {
        "gradients": part.gradient_bytes,
        "activations": activations,
        "backward of head or layer": backward,
        "reduction": part.reduction_bytes,
        "gathered weights": part.gathered_bytes,
        "optimizer step": max(0, part.step_bytes - activations - backward - part.reduction_bytes),
    }
    phases = frozenset({UPDATE_ACTOR if name == "actor" else UPDATE_CRITIC})
    return [Allocation(name=f"{name} {use}", num_bytes=size, phases=phases) for use, size in sizes.items()]
