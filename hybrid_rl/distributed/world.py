"""This rank's place among the ranks of a run, process groups, and the collectives that the loop needs."""

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_rl import exchange

T = TypeVar("T")

GENERATION_TIMEOUT = datetime.timedelta(days=1)
"""How long ranks wait while one generates for all; see watch.py for the end of the wait for a rank that is lost."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank's place in a group. Every method is a collective: all ranks of the group call it, in one order."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Process group of the collectives; None is the default group of all ranks."""

    @property
    def is_main(self) -> bool:
        """Whether this rank is the group's first, which writes the files that exist once."""
        return self.rank == 0

    def ranks_on_nodes(self) -> list[int]:
        """Return for each rank the number of ranks on its node."""
        return self.all_gather(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    def duplicate_group(self) -> "World":
        """Return the same ranks with a process group of their own, for a thread whose collectives overlap the run's."""
        return self if self.size == 1 else dataclasses.replace(self, group=dist.new_group(backend="gloo"))

    def model_parallel_group(self, size: int, *, on_device: bool = False) -> "World":
        """Return the group of `size` consecutive ranks that this rank belongs to.

        Args:
            size: divides the number of ranks.
            on_device: the group's collectives take tensors of the run's device, with the default timeout; otherwise
                they take CPU tensors and wait up to GENERATION_TIMEOUT.
        """
        options: dict[str, Any] = {} if on_device else {"backend": "gloo", "timeout": GENERATION_TIMEOUT}
        groups = [dist.new_group(list(range(first, first + size)), **options) for first in range(0, self.size, size)]
        return dataclasses.replace(self, rank=self.rank % size, size=size, group=groups[self.rank // size])

    def data_parallel_group(self, size: int) -> "World":
        """Return the group of the ranks that have this rank's place in their model-parallel groups of `size` ranks."""
        if size == 1:
            return self
        groups = [dist.new_group(list(range(place, self.size, size)), backend="gloo") for place in range(size)]
        return dataclasses.replace(self, rank=self.rank // size, size=self.size // size, group=groups[self.rank % size])

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensor over ranks, same shape and dtype."""
        total = tensor.clone()
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def broadcast(self, tensor: Tensor, *, sender: int) -> None:
        """Overwrite the tensor, on the device of the run, with that of a rank of the group."""
        if self.size > 1:
            dist.broadcast(tensor, group_src=sender, group=self.group)

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        if self.size == 1:
            return number
        value = torch.tensor([number])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return int(value)

    def pad_to_longest(self, pieces: list[list[int]]) -> list[list[int]]:
        """Return the pieces, padded with empty ones to the largest number on any rank, so that all call as often."""
        return pieces + [[]] * (self.max(len(pieces)) - len(pieces))

    def all_gather(self, item: Any, *classes: type) -> list[Any]:
        """Return the items of all ranks in rank order, on every rank.

        Args:
            item: see serialization.encode.
            classes: dataclasses that may occur in the items, see serialization.decode.
        """
        return [item] if self.size == 1 else exchange.all_gather(item, *classes, size=self.size, group=self.group)

    def all_to_all(self, items: Sequence[Any], *classes: type) -> list[Any]:
        """Send item i of `size` items to rank i; return the items sent here, in rank order; see all_gather."""
        return list(items) if self.size == 1 else exchange.all_to_all(items, *classes, group=self.group)

    def means(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Return for each key the sum over ranks divided by the count over ranks; keys with count 0 are left out."""
        everyone = self.all_gather((sums, counts))
        keys = {key: None for local, _ in everyone for key in local}
        totals = {
            key: (sum(s.get(key, 0.0) for s, _ in everyone), sum(c.get(key, 0.0) for _, c in everyone)) for key in keys
        }
        return {key: total / count for key, (total, count) in totals.items() if count}

    def run_on_main(self, work: Callable[[], T], *classes: type) -> T:
        """Call a function on the group's first rank, once all ranks are here, and return its result on every rank.

        Args:
            work: see all_gather for what it may return.
            classes: dataclasses that may occur in its result.

        Raises:
            Exception: the error of `work`, on every rank. On the others it is a RuntimeError with its name and message,
                unless it is a ConfigError or of hybrid_rl.errors.
        """
        self.barrier()
        result: T | None = None
        error: Exception | None = None
        if self.is_main:
            try:
                result = work()
            except Exception as caught:
                error = caught
        if self.size > 1:
            outcome = (result, error and exchange.describe_error(error))
            result, description = exchange.broadcast(outcome, *classes, is_sender=self.is_main, group=self.group)
            error = error or (description and exchange.make_error(*description))
        if error:
            raise error
        return cast(T, result)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self.group)
