"""Starts the rollout engine that rollout.engine names."""

from collections.abc import Sequence

import torch

from hybrid_rl.config import Config
from hybrid_rl.engines import RolloutEngine
from hybrid_rl.weights.bucket import AliasedWeights


def start_engine(
    config: Config,
    *,
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    aliased: AliasedWeights | None = None,
    gpus: Sequence[str] = (),
) -> RolloutEngine:
    """Return a running engine with the actor's architecture, without the trainer's weights or with aliases of them.

    Nothing else may allocate on the GPU during the start, because vLLM measures the free memory of the whole device.

    Args:
        dtype: dtype of the weights.
        device: device of this rank.
        rank: this rank, by which the engine's seed differs.
        aliased: the trainer's weights; None for an engine that gets copies.
        gpus: names of the GPUs that the engine spans, see group.visible_name; none for this rank's GPU.
    """
    if config.rollout.engine == "hf":
        from hybrid_rl.engines.huggingface import HuggingFaceEngine

        return HuggingFaceEngine(config.models.actor, dtype=dtype, device=device, aliased=aliased)
    from hybrid_rl.engines.vllm.engine import VllmEngine  # imports vLLM's dependencies, which takes seconds

    return VllmEngine(
        config.models.actor,
        config.rollout,
        dtype=dtype,
        max_model_len=config.prompts.max_prompt_tokens + config.rollout.max_response_tokens,
        can_sleep=device.type == "cuda" and config.memory.swap != "off",
        seed=(config.run.seed * 1000 + rank) % 2**32,  # NumPy, which vLLM seeds, takes 32 bits
        aliased=aliased,
        gpus=gpus,
        stall_timeout_s=config.run.stall_timeout_s,
    )
