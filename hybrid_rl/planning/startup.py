"""The plan of a run that is about to start: measures the available GPU memory, and refuses a run that does not fit."""

from dataclasses import replace

import torch

from hybrid_rl.config import Config, check
from hybrid_rl.distributed import World
from hybrid_rl.memory.device import available_bytes
from hybrid_rl.models.loading import choose_dtype
from hybrid_rl.planning.advice import describe_alternative, find_fitting_alternative
from hybrid_rl.planning.cards import find_card
from hybrid_rl.planning.engine_memory import check_engine_heads, check_kv_cache
from hybrid_rl.planning.plan import GIB, Machine, Plan
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.shapes import Shapes


def measure_machine(world: World) -> Machine:
    """Return the devices of these ranks with the least memory that is available on any; a collective."""
    available = min(world.all_gather(available_bytes(world.device)))
    card = find_card(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    return replace(machine_of(world.ranks_on_nodes(), available), card=card)


def machine_of(ranks_on_nodes: list[int], memory_bytes: int) -> Machine:
    """Return the devices of ranks: by node, or as one node if the nodes have different numbers of ranks.

    Args:
        ranks_on_nodes: for each rank, the number of ranks on its node.
        memory_bytes: memory of each device.
    """
    size = len(ranks_on_nodes)
    num_gpus = ranks_on_nodes[0] if len(set(ranks_on_nodes)) == 1 and size % ranks_on_nodes[0] == 0 else size
    return Machine(gpu_memory_bytes=memory_bytes, num_gpus=num_gpus, num_nodes=size // num_gpus)


def peak_flops(config: Config, device: torch.device) -> float | None:
    """Return the operations per second that the maker of this rank's card states for the dtype of the models.

    None on a CPU, in float32, and for a card that is not known.
    """
    if device.type == "cpu" or choose_dtype(config.models.dtype, device) == torch.float32:
        return None
    card = find_card(torch.cuda.get_device_name(device))
    return card.bf16_flops if card else None


def settings_on_cpu(config: Config) -> Config:
    """Return the settings with which a run on a CPU is planned: no tenant moves, and the dtype is known."""
    dtype = "float32" if config.models.dtype == "auto" else config.models.dtype
    return replace(config, memory=replace(config.memory, swap="off"), models=replace(config.models, dtype=dtype))


def plan_run(config: Config, shapes: Shapes, machine: Machine, *, is_cpu: bool) -> Plan:
    """Return the plan of a run on a machine.

    On a CPU memory is not limited and no tenant moves; the KV cache has at least 1 GiB, because its blocks are larger.

    Raises:
        ConfigError: the run does not fit, see check_plan; the engine cannot be sharded, or its KV cache is too small.
    """
    config = settings_on_cpu(config) if is_cpu else config
    check_engine_heads(config, shapes)
    plan = make_plan(config, machine, shapes)
    check_kv_cache(config, plan)
    check_plan(plan, config, shapes)
    return replace(plan, kv_bytes=max(plan.kv_bytes, GIB)) if is_cpu else plan


def check_plan(plan: Plan, config: Config, shapes: Shapes) -> None:
    """Raise unless the plan fits.

    Raises:
        ConfigError: the fullest phase, the start or a checkpoint needs more memory of a GPU or of a node than there is;
            the message suggests an alternative that fits.
    """
    if not plan.fits:
        found = find_fitting_alternative(config, plan.machine, shapes)
        check(False, f"{plan.shortage()}; {describe_alternative(found)}")
