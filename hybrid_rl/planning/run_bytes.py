"""Bytes that a run writes to its folder, and that it takes of the node's memory."""

from hybrid_rl.config import Config
from hybrid_rl.planning.model_shape import ModelShape
from hybrid_rl.planning.plan import Plan
from hybrid_rl.planning.shapes import Shapes


def checkpoint_bytes(config: Config, shapes: Shapes, *, dtype_bytes: int) -> int:
    """Return the size of a checkpoint: three float32 per trained element, the EMA, and a reference that moves."""
    trained = [12 * _num_trained(shape, config) for shape in (shapes.actor, shapes.critic) if shape]
    average = 4 * shapes.actor.num_params if config.models.ema_decay is not None else 0
    moves = bool(config.models.reference_sync_steps and shapes.reference)
    reference = dtype_bytes * shapes.reference.num_params if moves and shapes.reference else 0
    return sum(trained) + average + reference


def _num_trained(shape: ModelShape, config: Config) -> int:
    lora = config.models.lora
    return shape.num_adapted(lora) if lora.rank else shape.num_params


def disk_uses(config: Config, shapes: Shapes, *, dtype_bytes: int) -> dict[str, int]:
    """Return use -> bytes of a run's largest files, when the checkpoints that it keeps and one more exist."""
    number, (num_actors, num_critics) = config.checkpoint.keep_last + 1, config.num_exports
    critic = shapes.critic.num_params if shapes.critic else 0
    exports = dtype_bytes * (num_actors * shapes.actor.num_params + num_critics * critic)
    checkpoints = (
        number * checkpoint_bytes(config, shapes, dtype_bytes=dtype_bytes) * bool(config.checkpoint.every_steps)
    )
    return {f"{number} checkpoints": checkpoints, "exports": exports}


def host_uses(
    config: Config, shapes: Shapes, plan: Plan, *, num_ranks: int, dtype_bytes: int, is_cpu: bool
) -> dict[str, int]:
    """Return use -> bytes of a node's memory that are needed at the same time; a lower bound.

    On a GPU they are those of the fullest moment of the plan. On a CPU, the tenants of every rank lie in the node's
    memory.

    Args:
        plan: the run's plan.
        num_ranks: ranks of the node.
        dtype_bytes: bytes of an element of parameters.
        is_cpu: whether the run has no GPU.
    """
    num_nodes = max(1, plan.machine.num_ranks // num_ranks)
    average = 4 * shapes.actor.num_params // num_nodes if config.models.ema_decay is not None else 0
    if is_cpu:
        is_saving = bool(config.checkpoint.every_steps)
        copies = checkpoint_bytes(config, shapes, dtype_bytes=dtype_bytes) // num_nodes * is_saving
        tenants = max(
            sum(a.num_bytes for a in plan.allocations if a.name in plan.residency and phase in a.phases)
            for phase in {phase for a in plan.allocations for phase in a.phases}
        )
        return {
            "models, optimizers and KV cache": num_ranks * tenants,
            "copies for a checkpoint": copies,
            "EMA": average,
        }
    fullest = max(plan.moments, key=lambda moment: moment.host_bytes)
    working = max(0, fullest.host_bytes - plan.host_bytes - average)
    return {"what phases move off the GPU": plan.host_bytes, f"the moment of {fullest.name}": working, "EMA": average}
