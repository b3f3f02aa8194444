"""How the rollout engine gets the trainer's weights: views or copies, and adapters alone or merged weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_rl.config import Config, check
from hybrid_rl.weights.layout import why_not_alias
from hybrid_rl.weights.protocols import NamedShape

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM allocates the memory of an adapter; a smaller rank is padded with zeros."""


_ADAPTER_PREFIX = "base_model.model."


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a weight sync is a matrix of an adapter, by its name in peft's files."""
    return name.startswith(_ADAPTER_PREFIX)


@dataclass(frozen=True, kw_only=True)
class SyncChoice:
    """How the rollout engine gets the trainer's weights."""

    why_copies: str
    """Why the engine gets copies of the weights; empty if its parameters are views of the trainer's. With
    `sends_adapters` the weights are the frozen base."""
    sends_adapters: bool
    """Whether the engine gets the adapters alone, beside the base."""
    why_merged: str
    """Why the adapters are merged into the weights that the engine gets; empty if they are not, or there are none."""


def adapter_rank(rank: int) -> int:
    """Return the rank for which vLLM allocates the memory of an adapter of the given rank, at most the largest."""
    return next(size for size in ADAPTER_RANKS if rank <= size)


def choose_sync(config: Config, *, architecture: str, tensors: Sequence[NamedShape]) -> SyncChoice:
    """Return how the engine gets the weights; the same settings give the same choice on every rank.

    Args:
        config: settings of the run.
        architecture: class name of the actor's Hugging Face model.
        tensors: name, shape and dtype of the actor's parameters, without adapters.

    Raises:
        ConfigError: sync.mode = alias or models.lora.sync = adapters, and a rule forbids it.
    """
    lora, mode = config.models.lora, config.sync.mode
    obstacle = why_not_alias(config, architecture=architecture, tensors=tensors)
    if lora.rank and lora.sync == "merged":
        obstacle = "models.lora.sync = merged: the trainer has no merged weights to alias; use adapters"
    check(obstacle is None or mode != "alias", f"sync.mode = alias: {obstacle}")
    why_copies = "sync.mode = copy" if mode == "copy" else obstacle or ""
    if not lora.rank:
        return SyncChoice(why_copies=why_copies, sends_adapters=False, why_merged="")
    why_merged = _why_merged(config, why_copies)
    return SyncChoice(
        why_copies=(why_copies or why_merged) if why_merged else why_copies,
        sends_adapters=not why_merged,
        why_merged=why_merged,
    )


def _why_merged(config: Config, why_copies: str) -> str:
    """Return why adapters are merged into the weights that the engine gets; empty if they are sent alone.

    Raises:
        ConfigError: models.lora.sync = adapters, and vLLM has no adapters of this rank.
    """
    lora = config.models.lora
    if lora.sync == "merged":
        return "models.lora.sync = merged"
    largest = ADAPTER_RANKS[-1]
    limit = f"models.lora.rank = {lora.rank}: vLLM serves adapters up to rank {largest}; use merged"
    is_too_large = config.rollout.engine == "vllm" and lora.rank > largest
    check(lora.sync == "auto" or not is_too_large, f"models.lora.sync = adapters: {limit}")
    if lora.sync == "adapters":
        return ""
    return limit if is_too_large else why_copies
