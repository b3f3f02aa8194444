"""The first lines of a run: versions, devices, and the attention, kernels, layers, engines and weights that it uses."""

from collections.abc import Mapping

import torch

from hybrid_rl import __version__
from hybrid_rl.checkpoints.model_content import model_paths
from hybrid_rl.config import Config
from hybrid_rl.distributed import World
from hybrid_rl.memory.tenants import uses_pool
from hybrid_rl.models.choices import choose_model
from hybrid_rl.models.folders import load_config
from hybrid_rl.monitoring.recorder import environment
from hybrid_rl.planning.plan import Plan
from hybrid_rl.preflight import Prepared
from hybrid_rl.weights.choice import SyncChoice
from hybrid_rl_kernels import dispatch


def first_lines(prepared: Prepared, world: World) -> list[str]:
    """Return the lines that a run shows when it starts, before its models load."""
    return [*_place_lines(environment(world)), *run_lines(prepared, world.device), _memory_line(prepared, world.device)]


def run_lines(prepared: Prepared, device: torch.device) -> list[str]:
    """Return the lines about models and engines, which also hold for a device that is not on this machine."""
    config = prepared.config
    return [
        *_model_lines(config, device),
        _kernel_line(device),
        *_engine_lines(prepared),
        *_environment_lines(config),
        *_trust_lines(config),
    ]


def _place_lines(found: Mapping[str, str | int]) -> list[str]:
    packages = [f"{name} {value}" for name, value in found.items() if name not in ("device", "num_ranks", "python")]
    return [
        ", ".join([f"hybrid_rl {__version__}", f"Python {found['python']}", *packages]),
        f"devices: {found['num_ranks']} x {found['device']}",
    ]


def _model_lines(config: Config, device: torch.device) -> list[str]:
    """Return one line per kind of model, with the roles that it has."""
    trust = config.models.trust_remote_code
    roles: dict[str, list[str]] = {}
    for role, path in sorted(model_paths(config).items(), key=lambda item: item[0] != "actor"):
        field = f"models.{role}"
        model_config = load_config(path, field=field, trust_remote_code=trust)
        is_policy = role in ("actor", "reference")
        choice = choose_model(config.models, model_config, device, field=field, is_policy=is_policy)
        roles.setdefault(str(choice), []).append(role)
    rank = config.models.lora.rank
    adapters = [f"adapters of rank {rank} in actor{' and critic' if config.has_critic else ''}"] if rank else []
    return [*(f"{', '.join(names)}: {text}" for text, names in roles.items()), *adapters]


def _kernel_line(device: torch.device) -> str:
    is_elsewhere = device.type == "cuda" and not torch.cuda.is_available()
    is_triton = is_elsewhere or (device.type == "cuda" and dispatch.SETTING == "triton")
    return f"log-probs, losses and advantages: {'Triton kernels' if is_triton else 'PyTorch'}"


def _engine_lines(prepared: Prepared) -> list[str]:
    config, rollout, update = prepared.config, prepared.config.rollout, prepared.config.update
    ranks = rollout.tensor_parallel_size
    name = "vLLM" if rollout.engine == "vllm" else "transformers, in the trainer's process"
    place = f"one per {ranks} ranks" if ranks > 1 else "one per rank"
    weights = _weights_words(prepared.sync)
    further = f"; arguments passed on: {', '.join(rollout.vllm)}" if rollout.vllm else ""
    sizes = {"sequence parallel": update.sequence_parallel_size, "tensor parallel": update.tensor_parallel_size}
    parallel = "".join(f", {kind} over {size} ranks" for kind, size in sizes.items() if size > 1)
    kinds = {"actor": update.actor.kind, **({"critic": update.critic.kind} if config.has_critic else {})}
    optimizers = ", ".join(dict.fromkeys(kinds.values()))
    configured = f"; configuration passed on: {', '.join(update.deepspeed)}" if update.deepspeed else ""
    return [
        f"rollout engine: {name}, {place}, {weights}{further}",
        f"training engine: DeepSpeed ZeRO {update.zero_stage}, {optimizers}{parallel}{configured}",
    ]


def _weights_words(sync: SyncChoice) -> str:
    """Return what the rollout engine gets from the trainer, with the reason of each copy."""
    if sync.why_merged:
        return f"copies of the trainer's weights with the adapters merged ({sync.why_merged})"
    what, adapters = ("base", "adapters, ") if sync.sends_adapters else ("weights", "")
    if sync.why_copies:
        return f"{adapters}copies of the trainer's {what} ({sync.why_copies})"
    return f"{adapters}shared {what}"


def _environment_lines(config: Config) -> list[str]:
    environment = config.environment
    if not environment.is_used:
        return []
    names = ", ".join([*([environment.name] if environment.name else []), *environment.tools])
    return [
        f"conversations: with {names}, at most {environment.max_turns} turns; environments run in up to "
        f"{environment.num_workers} processes per rank"
    ]


def _memory_line(prepared: Prepared, device: torch.device) -> str:
    config, moved = prepared.config, _moved(prepared.plan)
    if device.type == "cpu" or config.memory.swap == "off" or not moved:
        return "memory: nothing moves between the phases"
    by = "the native pool" if uses_pool(config.memory.swap, device) else "DeepSpeed's offload"
    return f"memory: {', '.join(moved)} leave the GPU between the phases, by {by} and vLLM's sleep"


def _moved(plan: Plan) -> list[str]:
    """Return the tenants that some phase releases."""
    names = {allocation.name for allocation in plan.allocations}
    return [name for name, spec in plan.residency.items() if name in names and not spec.is_always_resident]


def _trust_lines(config: Config) -> list[str]:
    if not config.models.trust_remote_code:
        return []
    return [f"Python code of these folders runs (models.trust_remote_code): {', '.join(_paths(config))}"]


def _paths(config: Config) -> list[str]:
    return list(dict.fromkeys(model_paths(config).values()))
