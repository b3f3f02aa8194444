"""Responses with their scores, as ranks exchange them and the phase log keeps them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybrid_rl.batch import Rollout


@dataclass(frozen=True, kw_only=True)
class Scored:
    """This rank's responses and their scores."""

    rollouts: list[Rollout]
    scores: Tensor
    """[B] float64; weighted sum of all sources and rewards of an environment, before penalties, normalisation and clip:
    all that a response is paid."""
    parts: dict[str, Tensor]
    """Source -> its scores [B] float64, unweighted; NaN where a function does not apply."""
    baselines: dict[int, float] = field(default_factory=dict)
    """Prompt id -> score of the greedy response, for ReMax."""
    failed: frozenset[int] = frozenset()
    """Sequence ids of the responses for which a function failed, and counts as 0."""
    token_rewards: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Sequence id -> position in response_ids and amount of each part of the score that is paid at a sampled token. The
    rest of the score is paid at the last sampled token."""
    filter_scores: Tensor | None = None
    """[B] float64; scores for dynamic filtering where a function gives its own; None takes the scores."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """`function/name` -> [B] float64, further values of functions; NaN where a function gives none."""
    texts: dict[int, dict[str, str]] = field(default_factory=dict)
    """Sequence id -> `function/name` -> further texts of functions."""

    def select(self, rows: Sequence[int]) -> "Scored":
        """Return some of the responses."""
        index = torch.tensor(rows, dtype=torch.int64)
        rollouts = [self.rollouts[row] for row in rows]
        ids = {rollout.sequence_id for rollout in rollouts}
        return replace(
            self,
            rollouts=rollouts,
            failed=self.failed & ids,
            token_rewards={i: rewards for i, rewards in self.token_rewards.items() if i in ids},
            scores=self.scores[index],
            parts={name: part[index] for name, part in self.parts.items()},
            filter_scores=None if self.filter_scores is None else self.filter_scores[index],
            extras={name: values[index] for name, values in self.extras.items()},
            texts={i: texts for i, texts in self.texts.items() if i in ids},
        )

    def __add__(self, other: "Scored") -> "Scored":
        return Scored(
            rollouts=self.rollouts + other.rollouts,
            scores=torch.cat([self.scores, other.scores]),
            parts=self._joined(other, "parts"),
            baselines=self.baselines | other.baselines,
            failed=self.failed | other.failed,
            token_rewards=self.token_rewards | other.token_rewards,
            filter_scores=self._joined_filter_scores(other),
            extras=self._joined(other, "extras"),
            texts=self.texts | other.texts,
        )

    def _joined(self, other: "Scored", name: str) -> dict[str, Tensor]:
        """Return the columns of both, with NaN where only one has a column."""
        columns, further = getattr(self, name), getattr(other, name)
        empty, further_empty = (torch.full_like(scored.scores, torch.nan) for scored in (self, other))
        names = dict.fromkeys([*columns, *further])
        return {n: torch.cat([columns.get(n, empty), further.get(n, further_empty)]) for n in names}

    def _joined_filter_scores(self, other: "Scored") -> Tensor | None:
        if self.filter_scores is None and other.filter_scores is None:
            return None
        return torch.cat([self.filtered_scores, other.filtered_scores])

    @property
    def filtered_scores(self) -> Tensor:
        """[B] float64; the scores that dynamic filtering looks at."""
        return self.scores if self.filter_scores is None else self.filter_scores

    @property
    def sums(self) -> dict[str, float]:
        """Sums over the responses of scores, of parts and of further values where there are any, and of the values of
        conversations; number of failures."""
        sums = {f"reward/{name}": float(values.nansum()) for name, values in (self.parts | self.extras).items()}
        sums |= {"reward/score": float(self.scores.sum()), "reward/num_failed": float(len(self.failed))}
        for rollout in self.rollouts:
            for name, value in rollout.counts.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    @property
    def counts(self) -> dict[str, int]:
        """Number of responses that each part and further value exists for, by the names of `sums`."""
        counts = {f"reward/{name}": int((~v.isnan()).sum()) for name, v in (self.parts | self.extras).items()}
        return counts | Counter(name for rollout in self.rollouts for name in rollout.counts)

    @property
    def details(self) -> list[dict[str, dict[str, float | str]]]:
        """For each response the scores of the sources and the further values, where they exist."""
        found: list[dict[str, dict[str, float | str]]] = []
        for row, rollout in enumerate(self.rollouts):
            scores, extras = (
                {name: value for name, column in columns.items() if not math.isnan(value := float(column[row]))}
                for columns in (self.parts, self.extras)
            )
            found.append({"scores": {**scores}, "extras": {**extras, **self.texts.get(rollout.sequence_id, {})}})
        return found
