"""Scores of responses from all sources, and the rewards that follow from scores."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybrid_rl.algorithms.advantage import overlong_penalty
from hybrid_rl.batch import Rollout, TrainBatch, balance, make_train_batch
from hybrid_rl.config import ConfigError, RewardConfig, check
from hybrid_rl.distributed import World
from hybrid_rl.errors import RewardLostError
from hybrid_rl.exchange import describe_error, make_error
from hybrid_rl.rewards import RemoteScorer, RunningNormalizer, ScoreResult, ScorerPool
from hybrid_rl.rewards.answers import name_of
from hybrid_rl.rewards.combine import TokenEnds, Weighing, extra_values, filter_parts, token_rewards
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
    token_ends: TokenEnds | None = None
    """Ends of tokens in the text of a response, for functions that reward its steps."""


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
        """Sums over the responses of scores, of parts and of further values where there are any; number of failures."""
        sums = {f"reward/{name}": float(values.nansum()) for name, values in (self.parts | self.extras).items()}
        return sums | {"reward/score": float(self.scores.sum()), "reward/num_failed": float(len(self.failed))}

    @property
    def counts(self) -> dict[str, int]:
        """Number of responses that each part and further value exists for, by the names of `sums`."""
        return {f"reward/{name}": int((~v.isnan()).sum()) for name, v in (self.parts | self.extras).items()}

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


def score_responses(rollouts: Sequence[Rollout], sources: RewardSources, config: RewardConfig) -> Scored:
    """Return the responses with their scores: model_weight * model + remote_weight * remote + weighted functions.

    The rewards that an environment has given for turns are added, and are paid at the ends of these turns. The scores
    of the functions in reward.gates multiply all others. A function that does not apply to a response is left out.

    Raises:
        ConfigError: a source fails, a score is not finite as float32, or no source applies to a response and
            reward.on_error is raise; names its prompt.
        RewardLostError: a service or a scorer process is lost.
    """
    parts = dict[str, Tensor]()
    if sources.model is not None:
        parts["model"] = sources.model(rollouts).double()
    if sources.remote is not None:
        parts["remote"] = torch.tensor(sources.remote.score(rollouts), dtype=torch.float64)
    if any(rollout.turns for rollout in rollouts):
        totals = [math.fsum(turn.reward for turn in rollout.turns) for rollout in rollouts]
        parts["environment"] = torch.tensor(totals, dtype=torch.float64)
    weights = {"model": config.model_weight, "remote": config.remote_weight, "environment": 1.0}
    if sources.functions is None:
        return _scored(rollouts, parts, Weighing(weights=weights))
    result, function_weights = sources.functions.score(rollouts), sources.functions.weights
    parts |= {name: torch.tensor(values, dtype=torch.float64) for name, values in result.per_function.items()}
    weighing = Weighing(weights=weights | function_weights, gates=config.gates, optional=function_weights)
    scored = _scored(rollouts, parts, weighing)
    extras, texts = extra_values(result)
    filtered = filter_parts(result)
    unscored = _unscored(rollouts, parts, weighing, config)
    return replace(
        scored,
        failed=frozenset(rollouts[row].sequence_id for row in result.failures) | unscored,
        token_rewards=_paid_at_tokens(scored, result, weighing, sources.token_ends),
        filter_scores=weighing.score(parts | filtered) if filtered else None,
        extras=extras,
        texts={rollout.sequence_id: found for rollout, found in zip(rollouts, texts, strict=True) if found},
    )


def _scored(rollouts: Sequence[Rollout], parts: dict[str, Tensor], weighing: Weighing) -> Scored:
    """Return responses with their scores, of which the environment pays its own at the ends of turns."""
    scores = weighing.score(parts) if parts else torch.zeros(len(rollouts), dtype=torch.float64)
    for row in (~scores.float().isfinite()).nonzero().flatten().tolist():
        unweighted = ", ".join(f"{name} {float(part[row]):g}" for name, part in parts.items())
        raise ConfigError(
            f"the score of {name_of(rollouts[row])} is {float(scores[row]):g} (before weights: {unweighted}): it must "
            "be finite as float32"
        )
    token_rewards = {rollout.sequence_id: paid for rollout in rollouts if (paid := rollout.turn_rewards)}
    return Scored(rollouts=list(rollouts), scores=scores, parts=parts, token_rewards=token_rewards)


def _paid_at_tokens(
    scored: Scored, result: ScoreResult, weighing: Weighing, ends: TokenEnds | None
) -> dict[int, list[tuple[int, float]]]:
    """Return Scored.token_rewards: what the environment and the functions pay at tokens, after weights and gates."""
    factors, found = weighing.gate_factor(scored.parts).tolist(), {}
    for row, rollout in enumerate(scored.rollouts):
        paid = [(place, amount * factors[row]) for place, amount in scored.token_rewards.get(rollout.sequence_id, [])]
        returned = [
            (weighing.weights[name] * (1.0 if name in weighing.gates else factors[row]), column[row])
            for name, column in result.returned.items()
        ]
        paid += token_rewards(rollout, returned, ends)
        found |= {rollout.sequence_id: paid} if paid else {}
    return found


def _unscored(
    rollouts: Sequence[Rollout], parts: dict[str, Tensor], weighing: Weighing, config: RewardConfig
) -> frozenset[int]:
    """Return the sequence ids of the responses to which no source applies, and which score 0.

    Raises:
        ConfigError: there is one, and reward.on_error is raise.
    """
    found = [rollouts[row] for row in weighing.is_unscored(parts).nonzero().flatten().tolist()]
    check(
        not found or config.on_error == "zero",
        f"reward.functions: none applies to {name_of(found[0]) if found else ''}: every function returns None; let one "
        "apply to every response, or count its score as 0 with reward.on_error = zero",
    )
    return frozenset(rollout.sequence_id for rollout in found)


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
    return batch.with_fields(
        rewards=normalize_and_clip(rewards, config, normalizer),
        token_rewards=_token_rewards(scored, batch, normalizer),
        baselines=baselines,
    )


def _token_rewards(scored: Scored, batch: TrainBatch, normalizer: RunningNormalizer | None) -> Tensor | None:
    """Return TrainBatch.token_rewards, divided by the normaliser's standard deviation; None if there are none.

    Raises:
        ValueError: a position is no sampled token.
    """
    if not scored.token_rewards:
        return None
    std = normalizer.std if normalizer is not None and normalizer.std else 1.0
    rewards = torch.zeros(batch.response_mask.shape, dtype=torch.float64)
    for row, rollout in enumerate(scored.rollouts):
        for position, amount in scored.token_rewards.get(rollout.sequence_id, []):
            if not (0 <= position < rewards.shape[1] and batch.response_mask[row, position]):
                raise ValueError(f"a reward of sequence_id {rollout.sequence_id} is at token {position}: not sampled")
            rewards[row, position] += amount / std
    return rewards.float()
