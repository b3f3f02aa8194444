"""What the loop asks of an engine that generates; engines/vllm.py and engines/hf.py answer.

A protocol here, below the steps, because rollout.py and sync.py both speak to it and never to each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybrid_rl.memory.phases import Phase
from hybrid_rl.weights.bucket import Slot

Region = tuple[tuple[int, ...], tuple[int, ...], int]
"""Part of a tensor: size, stride and storage offset, in elements of the contiguous tensor."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample; every field is sent to the engine explicitly."""

    temperature: float
    """0 is greedy."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Sampling one ends the response and keeps the token."""
    stop_strings: tuple[str, ...] = ()
    """The token that completes one in the response's text, special tokens included, ends the response and is kept."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sampled response."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each token under the sampling distribution (temperature applied); empty for greedy sampling."""
    is_truncated: bool


class RolloutEngine(Protocol):
    """An engine that generates with weights handed over by the trainer."""

    weights_version: int
    """Counts completed hand-overs; 0 means the weights are not the trainer's yet."""

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt, in order. seeds: one per prompt, or None for the engine's own generator."""
        ...

    def seed(self, seed: int) -> None:
        """Seed the engine's own generator, which requests without a seed use."""
        ...

    def open_bucket(self, handle: bytes, plan: list[list[Slot]]) -> None:
        """Map the trainer's bucket and remember what each fill of it will hold."""
        ...

    def receive(self, index: int) -> None:
        """Begin to copy the plan's bucket `index`, now filled, into the weights; all that came before it is copied.

        So every other bucket may be overwritten when this returns, and this one when the next receive or finish_push
        does. What fails in copying is raised here, by a later receive, or by the next call of another method.
        """
        ...

    def finish_push(self) -> None:
        """Forget everything computed with older weights and count a hand-over.

        Raises:
            RuntimeError: an engine parameter that no tensor of the plan fills, by name.
        """
        ...

    def checksums(self, names: Sequence[str]) -> list[dict[str, list[tuple[Region, int]]]]:
        """Return, per engine worker and tensor, the checksum of each region of the tensor that the worker holds."""
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


class EngineTenant:
    """The `weights` or the `kv_cache` of a rollout engine; dropped on release, and empty after a restore."""

    def __init__(self, engine: RolloutEngine, tag: str, *, filled_in: Phase | None) -> None:
        self.is_resident = True
        self.filled_in = filled_in
        self._engine = engine
        self._tag = tag

    def release(self) -> int:
        """Let the engine unmap it."""
        self._engine.unmap(self._tag)
        self.is_resident = False
        return 0

    def restore(self) -> int:
        """Let the engine map it again."""
        self._engine.map(self._tag)
        self.is_resident = True
        return 0
