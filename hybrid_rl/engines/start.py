"""Starts the rollout engine that rollout.engine names."""

import functools
from collections.abc import Sequence

from hybrid_rl.config import Config
from hybrid_rl.distributed import World
from hybrid_rl.engines import RolloutEngine
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
    is_restart: bool = False,
) -> RolloutEngine:
    """Return a running engine with the actor's architecture, without the trainer's weights or with aliases of them.

    Nothing else may allocate on the GPU during the start, because vLLM measures the free memory of the whole device.
    An engine that starts again finds what the plan gives ROLLOUT: the tenants that are not resident then are released.

    Args:
        config: settings of the run.
        world: all ranks.
        ranks: the ranks that share this rank's engine; None for an engine of its own.
        alias_buffer: the trainer's weights; None for an engine that gets copies.
        is_restart: whether the trainer's models are loaded.
    """
    aliased = alias_buffer.export() if alias_buffer else None
    start = functools.partial(_start, config, world=world, aliased=aliased, is_restart=is_restart)
    return GroupEngine(ranks, lambda gpus: start(gpus=gpus)) if ranks else start()


def _start(
    config: Config, *, world: World, aliased: AliasedWeights | None, is_restart: bool, gpus: Sequence[str] = ()
) -> RolloutEngine:
    """Return a running engine of this process; see start_engine.

    Args:
        gpus: names of the GPUs that the engine spans, see group.visible_name; none for this rank's GPU.
    """
    dtype = choose_dtype(config.models.dtype, world.device)
    if config.rollout.engine == "hf":
        from hybrid_rl.engines.huggingface import HuggingFaceEngine

        return HuggingFaceEngine(config.models.actor, dtype=dtype, device=world.device, aliased=aliased)
    from hybrid_rl.engines.vllm.engine import VllmEngine  # imports vLLM's dependencies, which takes seconds

    return VllmEngine(
        config.models.actor,
        config.rollout,
        dtype=dtype,
        max_model_len=config.prompts.max_prompt_tokens + config.rollout.max_response_tokens,
        can_sleep=world.device.type == "cuda" and config.memory.swap != "off",
        seed=(config.run.seed * 1000 + world.rank) % 2**32,  # NumPy, which vLLM seeds, takes 32 bits
        aliased=aliased,
        gpus=gpus,
        is_restart=is_restart,
        stall_timeout_s=config.run.stall_timeout_s,
    )
