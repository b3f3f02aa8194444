"""What responses are worth: the sources of their scores, dynamic filtering, and the rewards made of scores."""

import functools
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybrid_rl.algorithms.advantage import masked_sums, overlong_penalty
from hybrid_rl.batch import Rollout, TrainBatch, balance, make_train_batch
from hybrid_rl.config import RewardConfig
from hybrid_rl.distributed import World
from hybrid_rl.rewards import RemoteScorer, RunningNormalizer, ScorerPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RewardSources:
    """All that judges responses; what a run does not use is None."""

    functions: ScorerPool | None = None
    remote: RemoteScorer | None = None
    model: Callable[[Sequence[Rollout]], Tensor] | None = None
    """Responses to [B] float32."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """This rank's responses and what each is worth."""

    rollouts: list[Rollout]
    scores: Tensor
    """[B] float32; weighted sum of all sources, before penalties, clip and normalisation."""
    parts: dict[str, Tensor]
    """[B] float32 for each source, unweighted."""
    baselines: dict[int, float] = field(default_factory=dict)
    """Score of the greedy response by prompt id, for ReMax."""
    num_failed: int = 0
    """Responses for which a function failed."""

    def select(self, rows: Sequence[int]) -> "Scored":
        """Return some of the responses."""
        index = torch.tensor(rows, dtype=torch.int64)
        return replace(
            self,
            rollouts=[self.rollouts[row] for row in rows],
            scores=self.scores[index],
            parts={name: part[index] for name, part in self.parts.items()},
        )

    def __add__(self, other: "Scored") -> "Scored":
        return Scored(
            rollouts=self.rollouts + other.rollouts,
            scores=torch.cat([self.scores, other.scores]),
            parts={name: torch.cat([part, other.parts[name]]) for name, part in self.parts.items()},
            baselines=self.baselines | other.baselines,
            num_failed=self.num_failed + other.num_failed,
        )

    @property
    def sums(self) -> dict[str, float]:
        """Each part's sum over the responses, and the number of failures."""
        sums = {f"reward/{name}": float(part.sum()) for name, part in self.parts.items()}
        return sums | {"reward/score": float(self.scores.sum()), "reward/num_failed": float(self.num_failed)}


def score_responses(rollouts: Sequence[Rollout], sources: RewardSources, config: RewardConfig) -> Scored:
    """Return the responses with their scores: model_weight * model + remote_weight * remote + weighted functions.

    Raises:
        ValueError: a score is not finite; names the prompt.
    """
    scores, parts, num_failed = torch.zeros(len(rollouts)), {}, 0
    if sources.model is not None:
        parts["model"] = sources.model(rollouts)
        scores += config.model_weight * parts["model"]
    if sources.remote is not None:
        parts["remote"] = torch.tensor(sources.remote.score(rollouts), dtype=torch.float32)
        scores += config.remote_weight * parts["remote"]
    if sources.functions is not None:
        result = sources.functions.score(rollouts)
        scores += torch.tensor(result.scores, dtype=torch.float32)
        parts |= {name: torch.tensor(values, dtype=torch.float32) for name, values in result.per_function.items()}
        num_failed = result.num_failed
    for row, rollout in enumerate(rollouts):
        if not torch.isfinite(scores[row]):
            raise ValueError(f"reward of prompt {rollout.prompt.prompt_id} is {scores[row]}: must be finite")
    return Scored(rollouts=list(rollouts), scores=scores, parts=parts, num_failed=num_failed)


def informative_rows(scored: Scored, bounds: tuple[float, float]) -> list[int]:
    """Return the rows of the groups whose mean score lies strictly between the bounds.

    Source: Yu et al. 2025 (DAPO), section 3.2: a group of equal scores has no gradient.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for row, rollout in enumerate(scored.rollouts):
        groups[rollout.prompt.prompt_id].append(row)
    low, high = bounds
    kept = [rows for rows in groups.values() if low < float(scored.scores[rows].double().mean()) < high]
    return sorted(row for rows in kept for row in rows)


class DynamicFilter:
    """Collects the groups of a step that dynamic filtering keeps, over several batches of prompts and all ranks."""

    def __init__(self, bounds: tuple[float, float], world: World) -> None:
        self._bounds, self._world = bounds, world
        self._kept: Scored | None = None
        self.num_groups = 0
        """Groups that are kept so far, over all ranks."""
        self.seen: set[int] = set()
        """Prompt ids that were sampled so far, over all ranks."""
        self._sampled = torch.zeros(3, dtype=torch.float64)  # responses, their scores, batches of prompts

    def add(self, scored: Scored) -> None:
        """Keep this rank's groups that have a gradient; a collective of all ranks."""
        part = scored.select(informative_rows(scored, self._bounds))
        self._kept = part if self._kept is None else self._kept + part
        local = torch.tensor([len(scored.scores), float(scored.scores.sum()), 0], dtype=torch.float64)
        self._sampled += self._world.sum(local) + torch.tensor([0, 0, 1])
        prompt_ids = {rollout.prompt.prompt_id for rollout in scored.rollouts}
        self.seen |= set().union(*self._world.all_gather(prompt_ids))
        self.num_groups = len(self._groups())

    def _groups(self) -> list[int]:
        assert self._kept is not None
        mine = {rollout.prompt.prompt_id for rollout in self._kept.rollouts}
        return sorted({prompt_id for ids in self._world.all_gather(mine) for prompt_id in ids})

    def take(self, num_groups: int, *, seed: int) -> tuple[Scored, dict[str, float]]:
        """Return this rank's part of at most num_groups groups, drawn by the seed, and what was sampled for them.

        Raises:
            RuntimeError: no group was kept at all.
        """
        assert self._kept is not None
        groups = self._groups()
        count, total, batches = self._sampled.tolist()
        said = f"{len(groups)} of {num_groups} groups after {batches:.0f} batches of prompts"
        seen = f"mean score {total / max(count, 1):.3f}, rollout.dynamic_filtering_reward_range = {list(self._bounds)}"
        if not groups:
            raise RuntimeError(f"dynamic filtering kept {said} ({seen}): too easy, too hard, or other bounds")
        if len(groups) < num_groups:
            logger.warning("dynamic filtering gave up with %s (%s); the step goes on with these", said, seen)
        random.Random(seed).shuffle(groups)
        taken = set(groups[:num_groups])
        rows = [row for row, rollout in enumerate(self._kept.rollouts) if rollout.prompt.prompt_id in taken]
        metrics = {
            "filter/score": total / max(count, 1),
            "filter/batches": batches,
            "filter/groups": float(len(taken)),
        }
        return self._kept.select(rows), metrics


def balance_by_tokens(scored: Scored, world: World, data_parallel: World) -> Scored:
    """Return this rank's share of all ranks' responses, so that the ranks score about as many tokens each.

    A rank that drew the long responses would keep the others waiting. Groups stay together: their baselines need that.
    For the updates, update.balance_mini_batches spreads them anew.

    Args:
        world: all ranks.
        data_parallel: see Run; ranks that have the same place in it get the same share.
    """
    if world.size == 1:
        return scored
    sizes: dict[int, int] = defaultdict(int)
    for rollout in scored.rollouts:
        sizes[rollout.prompt.prompt_id] += len(rollout.prompt.token_ids) + len(rollout.response_ids)
    everyone = {group: size for part in world.all_gather(dict(sizes)) for group, size in part.items()}
    groups = sorted(everyone)
    share_of = dict(zip(groups, balance([everyone[g] for g in groups], data_parallel.size), strict=True))
    rows_of: list[list[int]] = [[] for _ in range(data_parallel.size)]
    for row, rollout in enumerate(scored.rollouts):
        rows_of[share_of[rollout.prompt.prompt_id]].append(row)
    parts = [replace(scored.select(rows), num_failed=0) for rows in rows_of]
    parts[data_parallel.rank] = replace(parts[data_parallel.rank], num_failed=scored.num_failed)  # counted where it was
    num_alike = world.size // data_parallel.size  # neighbours
    received = world.all_to_all([parts[rank // num_alike] for rank in range(world.size)])
    share = functools.reduce(Scored.__add__, received)
    return share.select(sorted(range(len(share.rollouts)), key=lambda row: share.rollouts[row].sequence_id))


def penalize(
    scores: Tensor, lengths: Tensor, is_truncated: Tensor, config: RewardConfig, *, max_response_tokens: int
) -> Tensor:
    """Return scores [B] float32 minus the penalties for length; lengths and is_truncated are [B] int64 and bool."""
    rewards = scores - config.truncation_penalty * is_truncated.float()
    if not config.overlong_buffer:
        return rewards
    return rewards + overlong_penalty(
        lengths,
        max_response_tokens=max_response_tokens,
        buffer=config.overlong_buffer,
        penalty=config.overlong_penalty,
    )


def normalize_and_clip(rewards: Tensor, config: RewardConfig, normalizer: RunningNormalizer | None) -> Tensor:
    """Return rewards [B] as the settings want them; the normaliser is applied as it stands."""
    if normalizer is not None:
        rewards = normalizer.apply(rewards)
    return rewards if config.clip is None else rewards.clamp(-config.clip, config.clip)


def add_rewards(
    scored: Scored,
    config: RewardConfig,
    *,
    max_response_tokens: int,
    world: World,
    normalizer: RunningNormalizer | None = None,
) -> TrainBatch:
    """Return the batch of some responses with its rewards; the normaliser sees all ranks' rewards first."""
    batch = make_train_batch(scored.rollouts)
    rewards = penalize(
        scored.scores, batch.response_lengths, batch.is_truncated, config, max_response_tokens=max_response_tokens
    )
    if normalizer is not None:
        normalizer.update(*world.sum(masked_sums(rewards, torch.ones_like(rewards, dtype=torch.bool))).tolist())
    baselines = None
    if scored.baselines:  # without penalties: those are of the sampled response, not of the greedy one
        greedy = torch.tensor([scored.baselines[r.prompt.prompt_id] for r in scored.rollouts])
        baselines = normalize_and_clip(greedy, config, normalizer)
    return batch.with_fields(rewards=normalize_and_clip(rewards, config, normalizer), baselines=baselines)
