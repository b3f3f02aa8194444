"""From rollouts to a batch: rewards, the actor's and the reference's log-probs, the critic's values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.advantage import gae_advantages, group_advantages, masked_sums, token_rewards, whiten
from hybrid_rl.batch import Packed, Rollout, TrainBatch, make_train_batch, pack, split
from hybrid_rl.config import AdvantageConfig, RewardConfig
from hybrid_rl.distributed import World
from hybrid_rl.loss import kl_estimate
from hybrid_rl.models import packed_inputs
from hybrid_rl.rewards import ScorerPool

Forward = Callable[..., Any]
"""An Actor or a ValueModel, plain or behind a training engine."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How a batch is cut for forwards without gradient."""

    max_tokens: int
    """Tokens packed into one forward of this rank."""
    world: World


class LogprobGapError(RuntimeError):
    """Engine and trainer disagree on the probability of the sampled tokens."""


@torch.no_grad()
def each_packed(batch: TrainBatch, packing: Packing, run: Callable[[Packed], None]) -> None:
    """Call run on the whole batch in packed pieces; every rank makes the same number of calls."""
    for rows in packing.world.in_step(split(batch.sequence_lengths, packing.max_tokens)):
        run(pack(batch, rows, packing.world.device))


def token_logprobs(actor: Forward, batch: TrainBatch, packing: Packing, *, temperature: float) -> Tensor:
    """Return the log-probs of all response tokens, [B, T] float32, without gradient."""
    result = torch.zeros(batch.response_mask.shape)

    def run(packed: Packed) -> None:
        logprobs, _ = actor(
            **packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=temperature
        )
        packed.scatter(logprobs, result)

    each_packed(batch, packing, run)
    return result


def token_values(critic: Forward, batch: TrainBatch, packing: Packing) -> Tensor:
    """Return the critic's value before each response token, [B, T] float32, without gradient."""
    result = torch.zeros(batch.response_mask.shape)

    def run(packed: Packed) -> None:
        packed.scatter(critic(**packed_inputs(packed), index=packed.response_index), result)

    each_packed(batch, packing, run)
    return result


def sequence_values(model: Forward, batch: TrainBatch, packing: Packing) -> Tensor:
    """Return the model's output at each sequence's last real token, [B] float32: the reward model's score."""
    result = torch.zeros(len(batch))

    def run(packed: Packed) -> None:
        values = model(**packed_inputs(packed), index=packed.last_index)
        result[packed.rows] = values.to(result)

    each_packed(batch, packing, run)
    return result


def score_rollouts(
    rollouts: Sequence[Rollout],
    packing: Packing,
    config: RewardConfig,
    *,
    scorer: ScorerPool | None,
    reward_model: Forward | None,
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with its rewards, and each reward's sum over this rank's responses.

    reward = model_weight * reward model + sum of weighted functions - truncation_penalty of a truncated response.

    Raises:
        ValueError: a reward is not finite; names the prompt.
    """
    batch = make_train_batch(rollouts)
    rewards = -config.truncation_penalty * batch.is_truncated.float()
    sums: dict[str, float] = {}
    if reward_model is not None:
        scores = sequence_values(reward_model, batch, packing)
        rewards += config.model_weight * scores
        sums["reward/model"] = float(scores.sum())
    if scorer is not None:
        result = scorer.score(rollouts)
        rewards += torch.tensor(result.scores)
        sums |= {f"reward/{name}": sum(scores) for name, scores in result.per_function.items()}
        sums["reward/num_failed"] = result.num_failed
    for row, rollout in enumerate(rollouts):
        if not torch.isfinite(rewards[row]):
            raise ValueError(f"reward of prompt {rollout.prompt.prompt_id} is {rewards[row]}: must be finite")
    return batch.with_fields(rewards=rewards), sums


def check_logprob_gap(batch: TrainBatch, *, limit: float, world: World) -> float:
    """Return the mean |engine - trainer| log-prob over all sampled tokens, all ranks.

    The engine's weights are the trainer's, so every step is a probe of the hand-over on the very tokens trained on.

    Raises:
        LogprobGapError: the mean is above the limit.
    """
    assert batch.old_logprobs is not None
    difference = (batch.rollout_logprobs - batch.old_logprobs).abs()
    total = torch.where(batch.response_mask, difference, 0).sum()
    sums = world.sum(torch.stack([total.double(), batch.response_mask.sum().double()]))
    gap = float(sums[0] / sums[1].clamp(min=1))
    if not gap <= limit:
        raise LogprobGapError(
            f"mean |engine - trainer| log-prob is {gap:.3g}, above {limit:.3g} (rollout.max_logprob_gap): "
            "the engine does not run the trainer's weights, or computes them differently"
        )
    return gap


def add_advantages(
    batch: TrainBatch, config: AdvantageConfig, world: World, *, bootstrap_values: Tensor | None = None
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the scored batch with advantages (and value targets), and this rank's sums of what they were made of.

    bootstrap_values: [B] float32, the critic's value after the last token; used for truncated responses only.
    """
    assert batch.rewards is not None and batch.old_logprobs is not None
    mask, kl, sums = batch.response_mask, None, {}
    if batch.ref_logprobs is not None:
        kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, config.kl_estimator)
        sums["kl"] = float(torch.where(mask, kl, 0).sum())
    if batch.values is not None:
        rewards = token_rewards(batch.rewards, mask, kl=kl, kl_coef=config.kl_coef)
        advantages, returns = gae_advantages(
            rewards,
            batch.values,
            mask,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            bootstrap_values=None if bootstrap_values is None else bootstrap_values * batch.is_truncated,
        )
        if config.whiten:
            advantages = whiten(advantages, mask, world.sum(masked_sums(advantages, mask)))
        return batch.with_fields(advantages=advantages, returns=returns), sums
    scores = group_advantages(batch.rewards, batch.group_ids, estimator=config.estimator)
    advantages = torch.where(mask, scores[:, None], 0)
    if kl is not None:
        advantages = advantages - config.kl_coef * torch.where(mask, kl, 0)
    return batch.with_fields(advantages=advantages), sums
