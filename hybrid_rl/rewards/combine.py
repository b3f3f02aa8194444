"""The score of a response from the scores of all sources: weighted sum, gates, and the rewards of single tokens."""

import bisect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.batch import Rollout
from hybrid_rl.config import check
from hybrid_rl.rewards.returned import Returned

TokenEnds = Callable[[Rollout], Sequence[int]]
"""Returns for each token of a response the number of characters of `Rollout.text` up to the end of the token."""


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """How the scores of the sources become one score."""

    weights: Mapping[str, float]
    """Source -> factor of its score."""
    gates: Collection[str] = ()
    """Sources whose scores multiply the scores of all others."""
    optional: Collection[str] = ()
    """Sources that may not apply to a response; their score is NaN there."""

    def score(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return [B] float64: weighted gates + product of the gates * sum of the other weighted scores.

        A source that does not apply to a response is left out of sum and product.

        Args:
            parts: source -> [B] float64, unweighted scores; there is at least one.
        """
        factor = self.gate_factor(parts)
        total, gated = torch.zeros_like(factor), torch.zeros_like(factor)
        for name, part in parts.items():
            weighted = self.weights[name] * self._where_applicable(name, part, 0.0)
            if name in self.gates:
                total = total + weighted
            else:
                gated = gated + weighted
        return total + factor * gated

    def gate_factor(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return [B] float64: the product of the gates' scores, by which all other scores are multiplied."""
        factor = torch.ones_like(next(iter(parts.values())))
        for name in self.gates:
            factor = factor * self._where_applicable(name, parts[name], 1.0)
        return factor

    def is_unscored(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return [B] bool: whether no source applies to a response."""
        missing = [part.isnan() & (name in self.optional) for name, part in parts.items()]
        return torch.stack(missing).all(0)

    def _where_applicable(self, name: str, part: Tensor, otherwise: float) -> Tensor:
        return part.nan_to_num(nan=otherwise, posinf=math.inf, neginf=-math.inf) if name in self.optional else part


def filter_parts(returned: Mapping[str, Sequence[Returned]]) -> dict[str, Tensor]:
    """Return source -> [B] float64, its scores for dynamic filtering; of the sources that give such scores."""
    found = {}
    for name, column in returned.items():
        if any(one.filter_score is not None for one in column):
            scores = [one.score if one.filter_score is None else one.filter_score for one in column]
            found[name] = torch.tensor([math.nan if score is None else score for score in scores], dtype=torch.float64)
    return found


def extra_values(
    returned: Mapping[str, Sequence[Returned]], num_responses: int
) -> tuple[dict[str, Tensor], list[dict[str, str]]]:
    """Return `source/name` -> [B] float64 of the numbers that sources give besides scores, and each response's texts.

    NaN stands where a source does not give the value.
    """
    texts: list[dict[str, str]] = [{} for _ in range(num_responses)]
    columns: dict[str, list[float]] = {}
    for source, column in returned.items():
        for row, one in enumerate(column):
            for name, value in one.extras.items():
                if isinstance(value, str):
                    texts[row][f"{source}/{name}"] = value
                else:
                    columns.setdefault(f"{source}/{name}", [math.nan] * len(column))[row] = value
    return {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}, texts


def token_rewards(
    rollout: Rollout, returned: Sequence[tuple[float, Returned]], token_ends: TokenEnds | None
) -> list[tuple[int, float]]:
    """Return position and amount of what functions pay at tokens of a response.

    A reward at an observation of a conversation is paid at the last sampled token before it.

    Args:
        returned: for each function the factor of its rewards, and what it has returned.
        token_ends: None if no step can be placed.
    Raises:
        ConfigError: a function gives rewards of steps, and token_ends is None.
    """
    sampled = sampled_positions(rollout)
    if not sampled:
        return []
    paid = []
    for factor, one in returned:
        places = list(one.token_rewards)
        if one.step_rewards:
            check(token_ends is not None, "step_rewards: the tokens of steps are not known here; return token_rewards")
            assert token_ends is not None
            ends = token_ends(rollout)
            places += [(_position(ends, end), reward) for end, reward in one.step_rewards]
        paid += [(_at_or_before(sampled, position), factor * reward) for position, reward in places]
    return [(position, amount) for position, amount in paid if amount]


def sampled_positions(rollout: Rollout) -> list[int]:
    """Return the positions of the sampled tokens in response_ids."""
    if not rollout.turns:
        return list(range(len(rollout.response_ids)))
    found, start = list[int](), 0
    for turn in rollout.turns:
        if turn.is_sampled:
            found += range(start, start + turn.num_tokens)
        start += turn.num_tokens
    return found


def _position(ends: Sequence[int], end: int) -> int:
    """Return the position of the token that holds the last of `end` characters; the last token if none does."""
    return min(bisect.bisect_left(ends, end), len(ends) - 1)


def _at_or_before(sampled: Sequence[int], position: int) -> int:
    return sampled[max(bisect.bisect_right(sampled, position) - 1, 0)]
