"""Memory of the training engines and of forwards without gradient on one GPU, besides parameters and optimizer."""

from dataclasses import replace

from hybrid_rl.memory.residency import SCORE, UPDATE_ACTOR, UPDATE_CRITIC
from hybrid_rl.models.attention import repeats_keys
from hybrid_rl.models.fused_layers import uses_liger
from hybrid_rl.planning.footprint import GATHERED_BYTES, Footprint, Sharding, engine_footprint, head_bytes
from hybrid_rl.planning.model_shape import ModelShape
from hybrid_rl.planning.plan import Allocation
from hybrid_rl.planning.workload import Workload

TRAINED = ("actor", "critic")


def trained_footprint(work: Workload, name: str) -> Footprint | None:
    """Return the footprint of the training engine of `actor` or `critic`; None if the run has no critic."""
    shape = work.shapes.trained(name)
    if shape is None:
        return None
    update = work.config.update
    shard = shape.shard(update.tensor_parallel_size)
    sharding = Sharding(
        zero_stage=update.zero_stage,
        num_ranks=work.machine.num_ranks // update.tensor_parallel_size,
        dtype_bytes=work.dtype_bytes,
        optimizer=update.actor if name == "actor" else update.critic,
    )
    part = engine_footprint(shard, sharding, num_trained=num_trained(work, shard))
    if name == "critic" and work.shares_critic:  # its own are the adapters and the head, a vector
        shared = work.dtype_bytes * (shape.num_params - shape.hidden_size)
        return replace(part, parameter_bytes=part.parameter_bytes - shared)
    return part


def num_trained(work: Workload, shape: ModelShape) -> int:
    """Return the number of trained parameters of actor or critic: all of them, or those of the adapters."""
    lora = work.config.models.lora
    return shape.num_adapted(lora) if lora.rank else shape.num_params


def frozen_bytes(work: Workload, shape: ModelShape) -> int:
    """Return the bytes of a model that is not trained on each GPU: whole, or this rank's shard."""
    return work.dtype_bytes * shape.num_params // (work.machine.num_ranks if work.shards_frozen else 1)


def gathered_bytes(work: Workload, shape: ModelShape) -> int:
    """Return the bytes that a rank gathers at once in a forward over shards; 0 for a single rank."""
    return work.dtype_bytes * shape.gathered_elements if work.machine.num_ranks > 1 else 0


def score_allocations(work: Workload) -> list[Allocation]:
    """Return the peak of the forwards of SCORE."""
    shapes, (tokens, head_tokens) = work.shapes, work.forward_pack
    models = [shape for shape in (shapes.actor, shapes.critic, shapes.reference, shapes.reward) if shape]
    gathered = [part.gathered_bytes for name in TRAINED if (part := trained_footprint(work, name))]
    if work.shards_frozen:
        gathered += [gathered_bytes(work, shape) for shape in (shapes.reference, shapes.reward) if shape]
    activations = max(shape.transient_bytes(tokens, work.dtype_bytes) for shape in models)
    head = head_bytes(shapes.actor, head_tokens, backend=work.head_backend, backward=False)
    sizes = {
        "activations": activations,
        "log-prob head": head,
        "gathered weights": max(gathered),
        "routed experts": replayed_bytes(work, tokens),
        "blend of the reference": max(0, _blend_bytes(work) - activations - head - max(gathered)),
    }
    return [Allocation(name=name, num_bytes=size, phases=frozenset({SCORE})) for name, size in sizes.items()]


def replayed_bytes(work: Workload, tokens: int) -> int:
    """Return the bytes of the engine's choices of experts for the tokens of a pack: 16 bits, and 64 in each router."""
    mixture = work.shapes.actor.mixture
    if mixture is None or not work.config.rollout.routing_replay:
        return 0
    return tokens * mixture.experts_per_token * (2 * work.shapes.actor.num_layers + 8 * mixture.num_layers)


def _blend_bytes(work: Workload) -> int:
    """Return what it takes to move the reference towards the actor: a bucket of gathered weights, and two float32."""
    if not (work.config.models.reference_sync_steps and work.shapes.reference):
        return 0
    is_gathering = work.config.update.zero_stage == 3 and work.machine.num_ranks > 1
    return GATHERED_BYTES * is_gathering + 2 * 4 * work.shapes.reference.largest_tensor


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
    head = head_bytes(
        shape,
        head_tokens,
        backend=work.head_backend,
        backward=True,
        has_entropy=has_entropy,
        is_frozen=bool(models.lora.rank),
    )
    backward = max(head, shape.transient_bytes(tokens, work.dtype_bytes))
    sizes = {
        "gradients": part.gradient_bytes,
        "activations": activations,
        "backward of head or layer": backward,
        "reduction": part.reduction_bytes,
        "gathered weights": part.gathered_bytes,
        "routed experts": replayed_bytes(work, tokens) if name == "actor" else 0,
        "optimizer step": max(0, part.step_bytes - activations - backward - part.reduction_bytes),
    }
    phases = frozenset({UPDATE_ACTOR if name == "actor" else UPDATE_CRITIC})
    return [Allocation(name=f"{name} {use}", num_bytes=size, phases=phases) for use, size in sizes.items()]
