"""Scores of responses from all sources, and the rewards that follow from scores."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_rl.algorithms.advantage import overlong_penalty
from hybrid_rl.batch import Rollout, TrainBatch, balance, make_train_batch
from hybrid_rl.config import ConfigError, RewardConfig, check
from hybrid_rl.distributed import World
from hybrid_rl.errors import RewardLostError
from hybrid_rl.exchange import describe_error, make_error
from hybrid_rl.rewards import RemoteScorer, RunningNormalizer, ScorerPool
from hybrid_rl.rewards.answers import name_of
from hybrid_rl.rewards.combine import TokenEnds, Weighing, extra_values, filter_parts, token_rewards
from hybrid_rl.rewards.normalize import moments
from hybrid_rl.rewards.returned import Returned
from hybrid_rl.rewards.scored import Scored


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


def score_responses(rollouts: Sequence[Rollout], sources: RewardSources, config: RewardConfig) -> Scored:
    """Return the responses with their scores: model_weight * model + remote_weight * remote + weighted functions.

    The rewards that an environment has given for turns are added, and are paid at the ends of these turns. The scores
    of the functions in reward.gates multiply all others. A function that does not apply to a response is left out.

    Raises:
        ConfigError: a source fails, a score is not finite as float32, or no source applies to a response and
            reward.on_error is raise; names its prompt.
        RewardLostError: a service or a scorer process is lost.
    """
    parts, returned = dict[str, Tensor](), dict[str, list[Returned]]()
    if sources.model is not None:
        parts["model"] = sources.model(rollouts).double()
    if any(rollout.turns for rollout in rollouts):
        totals = [math.fsum(turn.reward for turn in rollout.turns) for rollout in rollouts]
        parts["environment"] = torch.tensor(totals, dtype=torch.float64)
    if sources.remote is not None:
        returned["remote"] = sources.remote.score(rollouts)
    result = sources.functions.score(rollouts) if sources.functions else None
    function_weights = sources.functions.weights if sources.functions else {}
    returned |= result.returned if result else {}
    parts |= {name: _column([one.score for one in column]) for name, column in returned.items()}
    if not parts:  # a rank without responses
        return Scored(rollouts=list(rollouts), scores=torch.zeros(len(rollouts), dtype=torch.float64), parts={})
    weights = {"model": config.model_weight, "remote": config.remote_weight, "environment": 1.0}
    weighing = Weighing(weights=weights | function_weights, gates=config.gates, optional=function_weights)
    scored = _scored(rollouts, parts, weighing)
    (extras, texts), filtered = extra_values(returned, len(rollouts)), filter_parts(returned)
    failed = frozenset(rollouts[row].sequence_id for row in (result.failures if result else ()))
    return replace(
        scored,
        failed=failed | _unscored(rollouts, parts, weighing, config),
        token_rewards=_paid_at_tokens(scored, returned, weighing, sources.token_ends),
        filter_scores=weighing.score(parts | filtered) if filtered else None,
        extras=extras,
        texts={rollout.sequence_id: found for rollout, found in zip(rollouts, texts, strict=True) if found},
    )


def _column(scores: Sequence[float | None]) -> Tensor:
    """Return scores as [B] float64, with NaN for None."""
    return torch.tensor([math.nan if score is None else score for score in scores], dtype=torch.float64)


def _scored(rollouts: Sequence[Rollout], parts: dict[str, Tensor], weighing: Weighing) -> Scored:
    """Return responses with their scores, of which the environment pays its own at the ends of turns."""
    scores = weighing.score(parts)
    for row in (~scores.float().isfinite()).nonzero().flatten().tolist():
        unweighted = ", ".join(f"{name} {float(part[row]):g}" for name, part in parts.items())
        raise ConfigError(
            f"the score of {name_of(rollouts[row])} is {float(scores[row]):g} (before weights: {unweighted}): it must "
            "be finite as float32"
        )
    token_rewards = {rollout.sequence_id: paid for rollout in rollouts if (paid := rollout.turn_rewards)}
    return Scored(rollouts=list(rollouts), scores=scores, parts=parts, token_rewards=token_rewards)


def _paid_at_tokens(
    scored: Scored, given: Mapping[str, Sequence[Returned]], weighing: Weighing, ends: TokenEnds | None
) -> dict[int, list[tuple[int, float]]]:
    """Return Scored.token_rewards: what the environment and the functions pay at tokens, after weights and gates."""
    factors = weighing.gate_factor(scored.parts).tolist()
    found = dict[int, list[tuple[int, float]]]()
    for row, rollout in enumerate(scored.rollouts):
        paid = [(place, amount * factors[row]) for place, amount in scored.token_rewards.get(rollout.sequence_id, [])]
        returned = [
            (weighing.weights[name] * (1.0 if name in weighing.gates else factors[row]), column[row])
            for name, column in given.items()
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


def judge(responses: Sequence[Rollout], scorer: ScorerPool | None) -> tuple[Sequence[float], Collection[int]]:
    """Return the scores of responses, and the rows for which the rule function or the environment has failed.

    Args:
        scorer: rule function; None takes the sum of the rewards that the environment has given.
    """
    if scorer is not None:
        result = scorer.score(responses)
        return result.scores, result.failures
    scores = [math.fsum(turn.reward for turn in response.turns) for response in responses]
    return scores, {row for row, response in enumerate(responses) if response.counts.get("environment/failed")}


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
