"""Tokens per second and model FLOPs utilisation (MFU) of the phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hybrid_rl.distributed import World


@dataclass(kw_only=True)
class Work:
    """What a phase computes in its steps; a body adds to it."""

    num_tokens: float = 0.0
    flops: float | None = 0.0
    """Floating-point operations of the models; None once the operations of one of them are not known."""
    seconds: float = 0.0

    def add(self, num_tokens: float, flops: float | None, *, copies: int = 1) -> None:
        """Add work of this rank.

        Args:
            num_tokens: tokens that are generated, scored or trained on.
            flops: operations of a model that passes over them; None if they are not known.
            copies: number of ranks that hold the same sequences and add the same work.
        """
        self.num_tokens += num_tokens / copies
        self.flops = None if flops is None or self.flops is None else self.flops + flops / copies


class Throughput:
    """Measures the work of this rank, and divides the work of all ranks by its time."""

    def __init__(self, world: World, *, peak_flops: float | None) -> None:
        """Start without work.

        Args:
            world: all ranks.
            peak_flops: operations per second that the card's maker states for the dtype of the models; None if it is
                not known, and no utilisation can be told.
        """
        self._world = world
        self._peak_flops = peak_flops
        self._works: dict[str, Work] = {}

    @contextmanager
    def work(self, phase: str) -> Iterator[Work]:
        """Measure the body as work of a phase; it adds its tokens and operations to the value."""
        work, start = self._works.setdefault(phase, Work()), time.monotonic()
        try:
            yield work
        finally:
            work.seconds += time.monotonic() - start

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the work since the last call, which all ranks have; a collective.

        The slowest rank's seconds count, because the others wait for it. A phase without tokens, such as one whose
        result a phase log replays, has no metrics.

        Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), appendix B, for MFU: recomputed activations do not
        count as operations.
        """
        own, self._works = {name: (w.num_tokens, w.flops, w.seconds) for name, w in self._works.items()}, {}
        everyone = self._world.all_gather(own)
        found: dict[str, float] = {}
        for phase in dict.fromkeys(name for works in everyone for name in works):
            works = [works[phase] for works in everyone if phase in works]
            seconds, tokens = max(s for _, _, s in works), sum(n for n, _, _ in works)
            if not tokens or not seconds:
                continue
            found[f"tokens_per_s/{phase}"] = tokens / seconds
            flops = [f for _, f, _ in works if f is not None]
            if self._peak_flops and len(flops) == len(works):
                found[f"mfu/{phase}"] = sum(flops) / (seconds * self._world.size * self._peak_flops)
        return found
