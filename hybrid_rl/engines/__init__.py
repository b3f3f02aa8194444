"""The two engines of a run as protocols: one generates responses, one trains a model. Implementations lie beside."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybrid_rl.checkpoints.snapshot import Snapshot
from hybrid_rl.weights.protocols import NamedShape, WeightReceiver


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample; every field is sent to the engine explicitly."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Sampling one of them ends the response; the response keeps the token."""
    stop_strings: tuple[str, ...] = ()
    """The token that completes one in the response's text, special tokens included, ends the response and is kept."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sampled response."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each token, temperature applied; empty for greedy sampling."""
    is_truncated: bool


class RolloutEngine(WeightReceiver, Protocol):
    """An engine that generates responses with the trainer's weights, which weight sync brings."""

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt, in order. seeds: one per prompt, or None for the engine's own generator."""
        ...

    def seed(self, seed: int) -> None:
        """Seed the engine's own generator, which requests without a seed use."""
        ...

    def unmap(self, tag: str) -> None:
        """Give up the memory behind `weights` or `kv_cache`."""
        ...

    def map(self, tag: str) -> None:
        """Take that memory again, without its contents."""
        ...

    def close(self) -> None:
        """End the engine and its processes."""
        ...


class TrainEngine(Protocol):
    """A model with its gradients and its optimizer, sharded over the ranks."""

    @property
    def module(self) -> Any:
        """The Actor or ValueModel, without the engine's wrapping."""
        ...

    @property
    def model(self) -> Any:
        """The Hugging Face model inside the module."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        ...

    @property
    def has_adapters(self) -> bool:
        """Whether only low-rank adapters are trained, and the model itself is frozen."""
        ...

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the engine's part of a checkpoint, over all ranks."""
        ...

    def forward(self, **inputs: Any) -> Any:
        """Run the model; under ZeRO-3 every rank must call it equally often."""
        ...

    def reference_forward(self, **inputs: Any) -> Any:
        """Run the model without its adapters and without gradient."""
        ...

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a loss that is normalised over all ranks and micro-batches of an optimizer step."""
        ...

    def step(self) -> float:
        """Clip, take an optimizer step and a schedule step; return the gradient norm before clipping."""
        ...

    def named_shapes(self) -> list[NamedShape]:
        """Return name, full shape and dtype of every weight; adapters are merged into the weights that they change."""
        ...

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Yield the named weights unsharded; a collective where ranks hold shards of them."""
        ...

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapters under the names of peft's files, on the host; under ZeRO-3 a collective."""
        ...

    def offload(self) -> None:
        """Move gradients, float32 master weights and optimizer moments to the host."""
        ...

    def reload(self) -> None:
        """Move them back to the device."""
        ...

    def optimizer_tensors(self) -> list[Tensor]:
        """Return this rank's float32 master weights and moments; the moments are allocated if they do not exist."""
        ...

    def optimizer_bytes(self) -> int:
        """Return the bytes that offload moves on this rank."""
        ...

    def gradient_buffers(self) -> list[Tensor]:
        """Return the buffers in which gradients are reduced; they may be zeroed between two steps."""
        ...

    def weight_tensors(self) -> list[Tensor]:
        """Return the weights and buffers that forward reads, this rank's shard of them under ZeRO-3."""
        ...

    def drop_gathered(self) -> None:
        """Free the unsharded weights that ZeRO-3 keeps for the next forward."""
        ...

    def snapshot(self) -> Snapshot:
        """Return this rank's part of the training state, copied to the host; every rank calls it."""
        ...

    def load(self, folder: Path) -> None:
        """Read what the ranks' snapshots wrote, for any number of ranks and any ZeRO stage."""
        ...
