"""The order of a mixture: which data set each draw comes from, and which of its rows, for data sets with weights."""

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any


class Mixture:
    """An endless sequence of rows of several data sets, drawn in the ratio of their weights; it can resume anywhere.

    After any number of draws, each data set has its share of them, give or take less than one draw; a window anywhere
    in the sequence deviates by less than two. Each pass over a data set has every row once, in an order of its own.

    Source: Tijdeman 1980, The chairman assignment problem, Discrete Mathematics 32(3), which gives the bound.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool = True) -> None:
        """Start before the first draw.

        Args:
            sizes: number of rows of each data set, at least two data sets.
            weights: of each data set; only their ratios count.
            seed: of the orders of the passes.
            shuffle: whether the rows of a pass are shuffled.
        """
        exact = [Fraction(str(weight)) for weight in weights]  # 0.1 is a tenth
        self._shares = [weight / sum(exact) for weight in exact]
        self._firsts = [sum(sizes[:place]) for place in range(len(sizes))]
        self.settings: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "weights": list(weights)}
        """What the order depends on, besides the rows."""
        self._counts = [0] * len(sizes)  # draws from each data set
        self._passes = [_Passes(size, f"{seed} {place}", shuffle=shuffle) for place, size in enumerate(sizes)]

    def most_in(self, num_draws: int) -> list[int]:
        """Return the largest number of draws from each data set in any window of this many draws."""
        spread = 2 - Fraction(1, len(self._shares) - 1)
        return [min(num_draws, math.floor(share * num_draws + spread)) for share in self._shares]

    def draw(self, num_draws: int) -> list[int]:
        """Return the next rows, numbered over all data sets in their order.

        No row occurs twice if each data set has at least as many rows as `most_in`.
        """
        places = [self._next_place() for _ in range(num_draws)]
        rows = [iter(passes.take(places.count(place))) for place, passes in enumerate(self._passes)]
        return [self._firsts[place] + next(rows[place]) for place in places]

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        passes = [each.state_dict() for each in self._passes]
        return {"counts": list(self._counts), "passes": passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state, which must have the same settings and sizes."""
        self._counts = list(state["counts"])
        for passes, saved in zip(self._passes, state["passes"], strict=True):
            passes.load_state_dict(saved)

    def _next_place(self) -> int:
        """Return the data set of the next draw.

        Of the data sets that are behind their share far enough, it is the one that must be drawn earliest.
        """
        number, least = sum(self._counts) + 1, Fraction(1, 2 * len(self._shares) - 2)
        behind = [share * number - count for share, count in zip(self._shares, self._counts, strict=True)]
        ready = [place for place, value in enumerate(behind) if value >= least]
        place = min(ready, key=lambda place: (1 - least - behind[place]) / self._shares[place])
        self._counts[place] += 1
        return place


class _Passes:
    """Endless passes over the rows of one data set."""

    def __init__(self, size: int, seed: str, *, shuffle: bool) -> None:
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._start(0, last=[])

    def take(self, num_rows: int) -> list[int]:
        """Return the next rows. They differ from each other if there are so many.

        A pass that begins within them has the rows before its beginning at its end.
        """
        taken: list[int] = []
        while len(taken) < num_rows:
            if self._position == self._size:
                self._start(self._number + 1, last=taken[-self._size :])
            part = self._order[self._position : self._position + num_rows - len(taken)]
            self._position += len(part)
            taken += part
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the pass, the position in it, and the rows that were moved to its end."""
        return {"pass": self._number, "position": self._position, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state."""
        self._start(state["pass"], last=state["last"])
        self._position = state["position"]

    def _start(self, number: int, *, last: list[int]) -> None:
        self._number, self._position = number, 0
        order = list(range(self._size))
        if self._shuffle:
            random.Random(f"{self._seed} {number}").shuffle(order)
        self._last = last if len(last) < self._size else []
        postponed = set(self._last)
        self._order = sorted(order, key=postponed.__contains__)  # stable: False comes before True
