"""The plan of a run that is about to start: measures the available GPU memory, and refuses a run that does not fit."""

from dataclasses import replace

from hybrid_rl.config import Config, check
from hybrid_rl.distributed import World
from hybrid_rl.memory.device import available_bytes
from hybrid_rl.planning.advice import describe_alternative, find_fitting_alternative
from hybrid_rl.planning.plan import GIB, Machine, Plan
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.shapes import Shapes, read_shapes


def plan_run(config: Config, world: World) -> Plan:
    """Return the plan of the run that these ranks are about to start; a collective, with the same result on every rank.

    On a CPU memory is not limited and no tenant moves; the KV cache has at least 1 GiB, because its blocks are larger.

    Raises:
        ConfigError: the run does not fit, see check_plan; a folder holds no model; the engine cannot be sharded.
    """
    is_cpu = world.device.type == "cpu"
    if is_cpu:
        memory = replace(config.memory, swap="off")
        dtype = "float32" if config.models.dtype == "auto" else config.models.dtype
        config = replace(config, memory=memory, models=replace(config.models, dtype=dtype))
    available = min(world.all_gather(available_bytes(world.device)))
    machine, shapes = Machine(gpu_memory_bytes=available, num_gpus=world.size), read_shapes(config)
    size, heads = config.rollout.tensor_parallel_size, shapes.actor.num_heads
    check(heads % size == 0, f"rollout.tensor_parallel_size = {size}: must divide the actor's {heads} attention heads")
    plan = make_plan(config, machine, shapes)
    check_plan(plan, config, shapes)
    return replace(plan, kv_bytes=max(plan.kv_bytes, GIB)) if is_cpu else plan


def check_plan(plan: Plan, config: Config, shapes: Shapes) -> None:
    """Raise unless the plan fits.

    Raises:
        ConfigError: the fullest phase needs more than there is; the message suggests an alternative that fits.
    """
    if plan.missing_bytes:
        found = find_fitting_alternative(config, plan.machine, shapes)
        check(False, f"{plan.shortage()}; {describe_alternative(found)}")
