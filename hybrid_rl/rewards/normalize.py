"""Running mean and standard deviation of all rewards of a run."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RunningNormalizer:
    """Mean and population variance of all rewards of a run, updated batch by batch and equal on every rank.

    Source: Chan, Golub and LeVeque 1979, the pairwise form of Welford's update.
    """

    def __init__(self) -> None:
        self._count = self._mean = 0.0
        self._squares = 0.0  # sum of squared deviations from the mean

    @property
    def mean(self) -> float:
        """Mean of all rewards so far; 0 without any."""
        return self._mean

    @property
    def std(self) -> float:
        """Population standard deviation of all rewards so far; 0 if they are all equal."""
        return math.sqrt(self._squares / self._count) if self._count else 0.0

    def update(self, count: float, total: float, squares: float) -> None:
        """Add a batch of rewards.

        Args:
            count, total, squares: number of rewards, their sum and the sum of their squares, each over all ranks, as
                `algorithms.advantage.masked_sums` returns them.
        """
        if not count:
            return
        mean, new_count = total / count, self._count + count
        difference = mean - self._mean
        # Rounding can give a batch of equal rewards a variance below 0.
        self._squares += max(squares - total * mean, 0.0) + difference**2 * self._count * count / new_count
        self._mean += difference * count / new_count
        self._count = new_count

    def apply(self, rewards: "Tensor") -> "Tensor":
        """Return (rewards - mean) / std, of any shape; if std is 0, rewards - mean."""
        return (rewards - self.mean) / (self.std or 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return the moments of all rewards so far."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the moments of a `state_dict`."""
        self._count, self._mean, self._squares = state["count"], state["mean"], state["squares"]
