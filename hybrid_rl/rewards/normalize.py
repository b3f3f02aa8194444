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

    def update(self, count: float, mean: float, squares: float) -> None:
        """Add a batch of rewards, given its `moments`; the ranks' batches in the same order on every rank."""
        if not count:
            return
        new_count = self._count + count
        difference = mean - self._mean
        self._squares += squares + difference**2 * self._count * count / new_count
        self._mean += difference * count / new_count
        self._count = new_count

    def apply(self, rewards: "Tensor") -> "Tensor":
        """Return (rewards - mean) / std, of any shape, in the dtype of the rewards; if std is 0, rewards - mean."""
        return ((rewards.double() - self.mean) / (self.std or 1.0)).to(rewards.dtype)

    def state_dict(self) -> dict[str, float]:
        """Return the moments of all rewards so far."""
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the moments of a `state_dict`."""
        self._count, self._mean, self._squares = state["count"], state["mean"], state["squares"]


def moments(rewards: "Tensor") -> tuple[float, float, float]:
    """Return number, mean and sum of squared deviations of rewards [B], in float64; for equal rewards exactly 0."""
    if not len(rewards):
        return 0.0, 0.0, 0.0
    deviations = rewards.double() - rewards[0].double()
    offset = deviations.mean()
    squares = (deviations - offset).square().sum()
    return float(len(rewards)), float(rewards[0].double() + offset), float(squares)
