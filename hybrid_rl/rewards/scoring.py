"""Scores of responses from all sources, and the rewards that follow from scores."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybrid_rl.algorithms.advantage import overlong_penalty
from hybrid_rl.batch import Rollout, TrainBatch, balance, make_train_batch
from hybrid_rl.config import ConfigError, RewardConfig
from hybrid_rl.distributed import World
from hybrid_rl.errors import RewardLostError
from hybrid_rl.exchange import describe_error, make_error
from hybrid_rl.rewards import RemoteScorer, RunningNormalizer, ScorerPool
from hybrid_rl.rewards.normalize import moments


@dataclass(frozen=True, kw_only=True)
class RewardSources:
    """The sources of scores; a source that the run does not use is None."""

    functions: ScorerPool | None = None
    """Rule functions."""
    remote: RemoteScorer | None = None
    """HTTP services."""
    model: Callable[[Sequence[Rollout]], Tensor] | None = None
    """Reward model, from responses to scores [B] float32."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """This rank's responses and their scores."""

    rollouts: list[Rollout]
    scores: Tensor
    """[B] float64; weighted sum of all sources, before penalties, normalisation and clip."""
    parts: dict[str, Tensor]
    """Source -> its scores [B] float64, unweighted."""
    baselines: dict[int, float] = field(default_factory=dict)
    """Prompt id -> score of the greedy response, for ReMax."""
    failed: frozenset[int] = frozenset()
    """Sequence ids of the responses for which a function failed, and counts as 0."""

    def select(self, rows: Sequence[int]) -> "Scored":
        """Return some of the responses."""
        index = torch.tensor(rows, dtype=torch.int64)
        rollouts = [self.rollouts[row] for row in rows]
        return replace(
            self,
            rollouts=rollouts,
            failed=self.failed & {rollout.sequence_id for rollout in rollouts},
            scores=self.scores[index],
            parts={name: part[index] for name, part in self.parts.items()},
        )

    def __add__(self, other: "Scored") -> "Scored":
        return Scored(
            rollouts=self.rollouts + other.rollouts,
            scores=torch.cat([self.scores, other.scores]),
            parts={name: torch.cat([part, other.parts[name]]) for name, part in self.parts.items()},
            baselines=self.baselines | other.baselines,
            failed=self.failed | other.failed,
        )

    @property
    def sums(self) -> dict[str, float]:
        """Sums over the responses of the scores and of each source's part, and the number of failures."""
        sums = {f"reward/{name}": float(part.sum()) for name, part in self.parts.items()}
        return sums | {"reward/score": float(self.scores.sum()), "reward/num_failed": float(len(self.failed))}


def score_responses(rollouts: Sequence[Rollout], sources: RewardSources, config: RewardConfig) -> Scored:
    """Return the responses with their scores: model_weight * model + remote_weight * remote + weighted functions.

    Raises:
        ConfigError: a source fails, or a score is not finite as float32; names its prompt.
        RewardLostError: a service or a scorer process is lost.
    """
    scores, parts, failed = torch.zeros(len(rollouts), dtype=torch.float64), {}, frozenset[int]()
    if sources.model is not None:
        parts["model"] = sources.model(rollouts).double()
        scores += config.model_weight * parts["model"]
    if sources.remote is not None:
        parts["remote"] = torch.tensor(sources.remote.score(rollouts), dtype=torch.float64)
        scores += config.remote_weight * parts["remote"]
    if sources.functions is not None:
        result = sources.functions.score(rollouts)
        scores += torch.tensor(result.scores, dtype=torch.float64)
        parts |= {name: torch.tensor(values, dtype=torch.float64) for name, values in result.per_function.items()}
        failed = frozenset(rollouts[row].sequence_id for row in result.failures)
    for row in (~scores.float().isfinite()).nonzero().flatten().tolist():
        prompt_id, sequence_id = rollouts[row].prompt.prompt_id, rollouts[row].sequence_id
        unweighted = ", ".join(f"{name} {float(part[row]):g}" for name, part in parts.items())
        raise ConfigError(
            f"the score of prompt_id {prompt_id}, sequence_id {sequence_id} is {float(scores[row]):g} (before weights: "
            f"{unweighted}): it must be finite as float32"
        )
    return Scored(rollouts=list(rollouts), scores=scores, parts=parts, failed=failed)


@contextmanager
def fail_together(world: World) -> Iterator[None]:
    """Raise on every rank what a mistake of the user or a lost source has raised on some: else the others would wait.

    Args:
        world: all ranks; a collective, also for a rank whose block raises one of the errors.
    Raises:
        ConfigError: the block has raised one on this rank or on another; with the messages of all ranks.
        RewardLostError: the same, where no rank has a ConfigError; with the message of the first rank with one.
    """
    cause: ConfigError | RewardLostError | None = None
    try:
        yield
    except (ConfigError, RewardLostError) as error:
        cause = error
    found = [described for described in world.all_gather(describe_error(cause) if cause else None) if described]
    mistakes = [message for name, messages in found if name == "ConfigError" for message in messages]
    if mistakes:
        raise ConfigError(*dict.fromkeys(mistakes)) from cause
    if found:
        raise make_error(*found[0]) from cause


def balance_by_tokens(scored: Scored, world: World, data_parallel: World) -> Scored:
    """Exchange responses between ranks, so that each computes log-probs and values of about as many tokens.

    Groups stay together, because their responses are compared. The updates balance again, by mini-batch.

    Args:
        scored:        this rank's responses.
        world:         all ranks; a collective.
        data_parallel: ranks that hold different sequences; ranks with the same rank in it get the same responses.
    Returns:
        scored: this rank's responses after the exchange, in the order of their sequence ids.
    """
    if world.size == 1:
        return scored
    sizes: dict[int, int] = defaultdict(int)
    for rollout in scored.rollouts:
        sizes[rollout.prompt.prompt_id] += len(rollout.prompt.token_ids) + len(rollout.response_ids)
    all_sizes = {group: size for part in world.all_gather(dict(sizes)) for group, size in part.items()}
    groups = sorted(all_sizes)
    rank_of = dict(zip(groups, balance([all_sizes[group] for group in groups], data_parallel.size), strict=True))
    rows_for: list[list[int]] = [[] for _ in range(data_parallel.size)]
    for row, rollout in enumerate(scored.rollouts):
        rows_for[rank_of[rollout.prompt.prompt_id]].append(row)
    parts = [scored.select(rows) for rows in rows_for]
    num_duplicates = world.size // data_parallel.size  # consecutive ranks that get the same responses
    received = world.all_to_all([parts[rank // num_duplicates] for rank in range(world.size)], Scored)
    local = functools.reduce(Scored.__add__, received)
    return local.select(sorted(range(len(local.rollouts)), key=lambda row: local.rollouts[row].sequence_id))


def penalize(
    scores: Tensor, lengths: Tensor, is_truncated: Tensor, config: RewardConfig, *, max_response_tokens: int
) -> Tensor:
    """Return scores minus the penalties for length, rounded to float32 once: equal rewards stay equal.

    Args:
        scores:       [B] float64.
        lengths:      [B] int64; tokens of each response.
        is_truncated: [B] bool.
    Returns:
        rewards: [B] float32.
    """
    rewards = scores.double() - config.truncation_penalty * is_truncated.double()
    if config.overlong_buffer:
        rewards += overlong_penalty(
            lengths,
            max_response_tokens=max_response_tokens,
            buffer=config.overlong_buffer,
            penalty=config.overlong_penalty,
        )
    return rewards.float()


def normalize_and_clip(rewards: Tensor, config: RewardConfig, normalizer: RunningNormalizer | None) -> Tensor:
    """Return rewards [B] float32, standardised by the normaliser, if there is one, and clipped to reward.clip."""
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
    """Return the batch of the responses with their rewards: scores after penalties, normalisation and clip.

    Args:
        scored:              this rank's responses.
        max_response_tokens: limit of a response, at which the overlong penalty is full.
        world:               ranks whose rewards the normaliser sees before it is applied; a collective.
        normalizer:          None does not normalise.
    """
    batch = make_train_batch(scored.rollouts)
    rewards = penalize(
        scored.scores, batch.response_lengths, batch.is_truncated, config, max_response_tokens=max_response_tokens
    )
    if normalizer is not None:
        for count, mean, squares in world.all_gather(moments(rewards)):
            normalizer.update(count, mean, squares)
    baselines = None
    if scored.baselines:  # without penalties, which belong to the sampled response
        greedy = torch.tensor([scored.baselines[r.prompt.prompt_id] for r in scored.rollouts])
        baselines = normalize_and_clip(greedy, config, normalizer)
    return batch.with_fields(rewards=normalize_and_clip(rewards, config, normalizer), baselines=baselines)
