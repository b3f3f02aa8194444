"""Starts the rollout engine that rollout.engine names."""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from hybrid_rl.config import Config, LoraConfig
from hybrid_rl.distributed import World
from hybrid_rl.engines import ReportStage, RolloutEngine
from hybrid_rl.engines.group import GroupEngine
from hybrid_rl.models.loading import choose_dtype
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.bucket import AliasedWeights


def start_engine(
    config: Config,
    *,
    world: World,
    ranks: World | None = None,
    alias_buffer: AliasBuffer | None = None,
    adapters: LoraConfig | None = None,
    is_restart: bool = False,
    report: ReportStage = lambda *_: None,
) -> RolloutEngine:
    """Return a running engine with the actor's architecture, without the trainer's weights or with aliases of them.

    Nothing else may allocate on the GPU during the start, because vLLM measures the free memory of the whole device.
    An engine that starts again finds what the plan gives ROLLOUT: the tenants that are not resident then are released.

    Args:
        config: settings of the run.
        world: all ranks.
        ranks: the ranks that share this rank's engine; None for an engine of its own.
        alias_buffer: the trainer's weights; None for an engine that gets copies.
        adapters: settings, with target_modules, of adapters that the engine gets beside the weights; None for none.
        is_restart: whether the trainer's models are loaded.
        report: receives the stages of the start.
    """
    aliased = alias_buffer.export() if alias_buffer else None
    start = functools.partial(
        _start, config, world=world, aliased=aliased, adapters=adapters, is_restart=is_restart, report=report
    )
    return GroupEngine(ranks, lambda gpus: start(gpus=gpus)) if ranks else start()


def _start(
    config: Config,
    *,
    world: World,
    aliased: AliasedWeights | None,
    adapters: LoraConfig | None,
    is_restart: bool,
    report: ReportStage,
    gpus: Sequence[str] = (),
) -> RolloutEngine:
    """Return a running engine of this process; see start_engine.

    Args:
        gpus: names of the GPUs that the engine spans, see group.visible_name; none for this rank's GPU.
    """
    if config.rollout.engine == "hf":
        from hybrid_rl.engines.huggingface import HuggingFaceEngine

        return HuggingFaceEngine(
            config.models.actor,
            dtype=choose_dtype(config.models.dtype, world.device),
            device=world.device,
            aliased=aliased,
            adapters=adapters,
            returns_experts=config.rollout.routing_replay,
            trust_remote_code=config.models.trust_remote_code,
        )
    from hybrid_rl.engines.vllm.engine import VllmEngine  # imports vLLM's dependencies, which takes seconds

    return VllmEngine(
        config.models.actor,
        config.rollout,
        **_vllm_settings(config, world.device),
        seed=(config.run.seed * 1000 + world.rank) % 2**32,  # NumPy, which vLLM seeds, takes 32 bits
        aliased=aliased,
        adapters=adapters,
        gpus=gpus,
        is_restart=is_restart,
        stall_timeout_s=config.run.stall_timeout_s,
        report=report,
    )


def _vllm_settings(config: Config, device: torch.device) -> dict[str, Any]:
    """Return the arguments of VllmEngine that the settings decide."""
    return {
        "dtype": choose_dtype(config.models.dtype, device),
        "max_model_len": config.max_engine_tokens,
        "can_sleep": device.type == "cuda" and config.memory.swap != "off",
        "trust_remote_code": config.models.trust_remote_code,
    }


def check_engine(config: Config, device: torch.device, *, is_here: bool) -> None:
    """Check that the rollout engine takes its settings, before a model loads.

    Args:
        config: settings of the run.
        device: device of the engine.
        is_here: whether the device is on this machine; otherwise only the names in rollout.vllm are checked, where vLLM
            is installed.
    Raises:
        ConfigError: see check_arguments.
    """
    is_checkable = is_here or (config.rollout.vllm and importlib.util.find_spec("vllm"))
    if config.rollout.engine == "vllm" and is_checkable:
        from hybrid_rl.engines.vllm.arguments import check_arguments

        check_arguments(config.models.actor, config.rollout, **_vllm_settings(config, device), makes_config=is_here)
