"""The gradient of an optimizer step, accumulated over micro-batches that fit into memory."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hybrid_rl.batch import split
from hybrid_rl.distributed import World
from hybrid_rl.engines import FirstWait, TrainEngine
from hybrid_rl.errors import OutOfMemoryError
from hybrid_rl.memory.micro_batches import SAVERS, Attempt, TokenLimit, free_memory

Sums = dict[str, Tensor]
"""Weighted sums over the tokens of a micro-batch; over all micro-batches of a step and all ranks they are means."""


class LossPart(Protocol):
    """Sequences of this rank whose losses are added to the loss of an optimizer step."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        ...

    @property
    def rows(self) -> list[int]:
        """Indices in `lengths` of the sequences that this optimizer step has."""
        ...

    def micro_batch(self, engine: TrainEngine, rows: list[int]) -> tuple[Tensor, Sums]:
        """Return the loss of some of the rows, perhaps none, a scalar with gradient, and the sums for the metrics."""
        ...

    def describe(self, rows: list[int]) -> str:
        """Return a name of some of the rows, for an error message."""
        ...


class Totals:
    """Sums of metrics over optimizer steps. They stay on the device, because reading one waits for the device."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: Sums = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=world.device))

    def add(self, sums: Sums) -> None:
        """Add this rank's sums."""
        for name, value in sums.items():
            self._sums[name] += value.double()

    def add_common(self, name: str, value: float) -> None:
        """Add a value that all ranks have, which counts once."""
        self._sums[name] += value / self._world.size

    def means(self, num_steps: int) -> dict[str, float]:
        """Return the sums over all ranks, divided by the number of optimizer steps."""
        names = sorted(self._sums)
        summed = self._world.sum(torch.stack([self._sums[name] for name in names]).cpu())
        return {name: float(value) / num_steps for name, value in zip(names, summed, strict=True)}


def accumulate(engine: TrainEngine, parts: Sequence[LossPart], limit: TokenLimit, world: World) -> list[Sums]:
    """Add the gradients of all parts, and return the sums of each micro-batch of this rank.

    Where a micro-batch of any rank runs out of memory, all ranks drop their gradients and start again with smaller
    ones. Gradients and sums equal a start with the smaller ones.

    Raises:
        OutOfMemoryError: a micro-batch runs out of memory, and the step cannot start again.
        FloatingPointError: the loss of a micro-batch is not finite; names its sequences.
    """
    while True:
        attempt, tried = Attempt(limit, world), list[_Done]()
        _try(engine, parts, limit.tokens, world, attempt, tried)
        if engine.first_wait is FirstWait.FORWARD or attempt.succeeded():
            break
        tried.clear()
        engine.drop_gradients()
        free_memory(world.device)
    is_bad = ~torch.stack([loss for _, loss, _ in tried]).isfinite()
    if is_bad.any():
        name, loss, _ = tried[int(is_bad.nonzero()[0])]
        raise FloatingPointError(f"loss is {float(loss)} in a micro-batch of {name}")
    return [sums for _, _, sums in tried]


def take_step(engine: TrainEngine, limit: TokenLimit) -> float:
    """Take the optimizer step, and return the gradient norm before clipping.

    Raises:
        OutOfMemoryError: the step runs out of memory, whose need does not depend on micro-batches.
        FloatingPointError: the gradient norm is not finite.
    """
    try:
        return engine.step()
    except torch.OutOfMemoryError:
        message = f"out of memory in the optimizer step of {limit.work} on rank {limit.rank}; set {SAVERS}"
        raise OutOfMemoryError(message) from None


_Done = tuple[str, Tensor, Sums]
"""Name, loss and sums of a micro-batch whose gradient is added."""


def _try(
    engine: TrainEngine, parts: Sequence[LossPart], max_tokens: int, world: World, attempt: Attempt, done: list[_Done]
) -> None:
    """Add the gradient of one micro-batch after the other, until one does not fit.

    Every rank has equally many micro-batches, some perhaps without rows. Where backward is a collective, no rank starts
    it before the forwards of all ranks have fit.
    """
    pieces = [
        (part, rows) for part in parts for rows in world.pad_to_longest(split(part.lengths, max_tokens, part.rows))
    ]
    for place, (part, rows) in enumerate(pieces):
        lengths = [part.lengths[row] for row in rows]
        with attempt.micro_batch(lengths, do_others_wait=engine.first_wait is FirstWait.FORWARD):
            loss, sums = part.micro_batch(engine, rows)
        if not (attempt.do_all_have_room() if engine.first_wait is FirstWait.BACKWARD else attempt.has_room):
            return
        with attempt.micro_batch(lengths, do_others_wait=engine.first_wait is not FirstWait.STEP):
            engine.backward(loss, is_last=place == len(pieces) - 1)
        if not attempt.has_room:
            return
        done.append((part.describe(rows), loss.detach(), {name: value.detach() for name, value in sums.items()}))
