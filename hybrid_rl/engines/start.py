"""Chooses and starts the rollout engine of a rank."""

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
    """Return a running engine with the actor's architecture; its weights wait for the first hand-over or are shared.

    Nothing else may allocate on the GPU meanwhile: vLLM's profiler looks at the whole device.

    Args:
        gpus: names of those that the engine spans, see group.visible_name; none for this rank's own.
    """
    if config.rollout.engine == "hf":
        from hybrid_rl.engines.huggingface import HuggingFaceEngine

        return HuggingFaceEngine(config.models.actor, dtype=dtype, device=device, aliased=aliased)
    from hybrid_rl.engines.vllm.engine import VllmEngine  # takes seconds to import

    return VllmEngine(
        config.models.actor,
        config.rollout,
        dtype=dtype,
        max_model_len=config.prompts.max_prompt_tokens + config.rollout.max_response_tokens,
        can_sleep=device.type == "cuda" and config.memory.swap != "off",
        seed=config.run.seed * 1000 + rank,
        aliased=aliased,
        gpus=gpus,
    )
