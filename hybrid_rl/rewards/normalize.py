"""Running mean and spread of all rewards of a run."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RunningNormalizer:
    """Mean and population variance of all rewards seen, merged batch by batch; the same on every rank.

    Source: Chan, Golub and LeVeque 1979, the pairwise form of Welford's update.
    """

    def __init__(self) -> None:
        self._count = self._mean = 0.0
        self._squares = 0.0  # of the distances from the mean

    @property
    def mean(self) -> float:
        """Of all rewards seen; 0 before the first."""
        return self._mean

    @property
    def std(self) -> float:
        """Root of the population variance of all rewards seen; 0 when they are all equal."""
        return math.sqrt(self._squares / self._count) if self._count else 0.0

    def update(self, count: float, total: float, squares: float) -> None:
        """Add a batch, given as `hybrid_rl.algorithms.advantage.masked_sums` summed over all ranks.

        Args:
            count, total, squares: number of rewards, their sum, and the sum of their squares.
        """
        if not count:
            return
        mean, together = total / count, self._count + count
        distance = mean - self._mean
        # Rounding can leave a batch of equal rewards a spread below 0.
        self._squares += max(squares - total * mean, 0.0) + distance**2 * self._count * count / together
        self._mean += distance * count / together
        self._count = together

    def apply(self, rewards: "Tensor") -> "Tensor":
        """Return (rewards - mean) / std, of any shape; without a spread, rewards - mean."""
        return (rewards - self.mean) / (self.std or 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return all that was seen."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a `state_dict`."""
        self._count, self._mean, self._squares = state["count"], state["mean"], state["squares"]
