"""What the models say of a batch: log-probs of actor and reference, values of the critic; and its advantages."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.algorithms.advantage import (
    discounted_returns,
    gae_advantages,
    group_advantages,
    length_adaptive_lambda,
    moments,
    whiten,
)
from hybrid_rl.algorithms.correction import importance_weights
from hybrid_rl.algorithms.loss import kl_estimate
from hybrid_rl.batch import Packed, TrainBatch, pack, split
from hybrid_rl.config import AdvantageConfig, UpdateConfig
from hybrid_rl.distributed import World
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl_kernels import Advantages, merge_moments

Forward = Callable[..., Any]
"""An Actor or a ValueModel, plain or behind a training engine."""

WHITENED = ("gae", "reinforce_pp", "reinforce_pp_baseline")
"""Estimators whose advantages `advantage.whiten` standardises; a group's are centred already."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How a batch is cut for forwards without gradient."""

    max_tokens: int
    """Tokens packed into one forward of this rank."""
    world: World


class LogprobGapError(RuntimeError):
    """Engine and trainer disagree on the probability of the sampled tokens."""


@torch.no_grad()
def each_packed(batch: TrainBatch, packing: Packing, run: Callable[[Packed], Tensor]) -> list[tuple[Packed, Tensor]]:
    """Return the packed pieces of the whole batch, each with what run makes of it, all still on the device.

    Every rank makes the same number of calls. Nothing is read in between, for that would wait for the device.
    """
    pieces = packing.world.pad_to_longest(split(batch.sequence_lengths, packing.max_tokens))
    packs = (pack(batch, rows, packing.world.device) for rows in pieces)
    return [(packed, run(packed)) for packed in packs]


def token_logprobs(actor: Forward, batch: TrainBatch, packing: Packing, *, temperature: float) -> Tensor:
    """Return the log-probs of all response tokens, [B, T] float32, without gradient."""

    def run(packed: Packed) -> Tensor:
        logprobs, _ = actor(
            **packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=temperature
        )
        return logprobs

    return _scattered(batch, each_packed(batch, packing, run))


def token_values(critic: Forward, batch: TrainBatch, packing: Packing) -> Tensor:
    """Return the critic's value before each response token, [B, T] float32, without gradient."""

    def run(packed: Packed) -> Tensor:
        return critic(**packed_inputs(packed), index=packed.response_index)

    return _scattered(batch, each_packed(batch, packing, run))


def _scattered(batch: TrainBatch, values: Iterable[tuple[Packed, Tensor]]) -> Tensor:
    result = torch.zeros(batch.response_mask.shape)
    for packed, of_tokens in values:
        packed.scatter(of_tokens, result)
    return result


def sequence_values(model: Forward, batch: TrainBatch, packing: Packing) -> Tensor:
    """Return the model's output at each sequence's last real token, [B] float32: the reward model's score."""
    result = torch.zeros(len(batch))

    def run(packed: Packed) -> Tensor:
        return model(**packed_inputs(packed), index=packed.last_index)

    for packed, values in each_packed(batch, packing, run):
        result[packed.rows] = values.to(result)
    return result


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


def correct(batch: TrainBatch, config: UpdateConfig) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with the tokens that count in the losses and their weights, and this rank's sums of them."""
    mask = batch.response_mask
    loss_mask = mask & ~batch.is_truncated[:, None] if config.mask_truncated else mask
    if config.correction == "none":
        return batch.with_fields(loss_mask=loss_mask), {}
    assert batch.old_logprobs is not None
    weights, is_out = importance_weights(
        batch.old_logprobs,
        batch.rollout_logprobs,
        mask,
        kind=config.correction,
        low=config.correction_low,
        high=config.correction_high,
    )
    sums = {"correction/weight": float(weights[mask].sum()), "correction/out": float(is_out[mask].sum())}
    return batch.with_fields(loss_mask=loss_mask, loss_weights=weights), sums


def add_advantages(
    batch: TrainBatch,
    config: AdvantageConfig,
    world: World,
    *,
    kl_coef: float | None = None,
    bootstrap_values: Tensor | None = None,
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the scored batch with advantages (and value targets), and this rank's sums of what they were made of.

    Args:
        kl_coef: factor on the KL in the reward; None takes the setting.
        bootstrap_values: [B] float32, the critic's value after the last token; used for truncated responses only.
    """
    assert batch.rewards is not None and batch.old_logprobs is not None
    mask, kl, sums = batch.response_mask, None, {}
    if batch.ref_logprobs is not None:
        kl = kl_estimate(batch.old_logprobs, batch.ref_logprobs, config.kl_estimator)
        sums["kl"] = float(torch.where(mask, kl, 0).sum())
    coef = config.kl_coef if kl_coef is None else kl_coef
    if config.kl_in == "loss":
        coef = 0.0
    returns, of_tokens = None, None
    if config.estimator in ("gae", "reinforce_pp", "remax"):
        kl_on_device = None if kl is None else kl.to(world.device)
        paid: dict[str, Any] = {"rewards": batch.rewards.to(world.device), "kl": kl_on_device, "kl_coef": coef}
        if config.estimator == "gae":
            estimates, returns = _gae(batch, paid, config, bootstrap_values, world.device)
        else:
            estimates = discounted_returns(response_mask=mask.to(world.device), gamma=config.gamma, **paid)
        advantages, of_tokens = estimates.advantages, estimates.moments
    else:
        scores = group_advantages(
            batch.rewards, batch.group_ids, estimator=config.estimator, lengths=batch.response_lengths
        )
        advantages = torch.where(mask, scores[:, None], 0)
        if kl is not None and coef:
            advantages = advantages - coef * torch.where(mask, kl, 0)
    if config.estimator == "remax":
        assert batch.baselines is not None
        advantages = torch.where(mask, advantages.cpu() - batch.baselines[:, None], 0)
    if config.whiten and config.estimator in WHITENED:
        x, places = advantages.to(world.device), mask.to(world.device)
        of_ranks = world.all_gather((moments(x, places) if of_tokens is None else of_tokens).cpu())
        advantages = whiten(x, places, merge_moments(torch.stack(of_ranks)).to(world.device))
    return batch.with_fields(advantages=advantages.cpu(), returns=returns), sums


def _gae(
    batch: TrainBatch,
    paid: dict[str, Any],
    config: AdvantageConfig,
    bootstrap_values: Tensor | None,
    device: torch.device,
) -> tuple[Advantages, Tensor]:
    """Return the actor's estimates, and value targets with a lambda of their own where the settings decouple them."""
    assert batch.values is not None
    mask = batch.response_mask.to(device)
    if bootstrap_values is not None:
        bootstrap_values = (bootstrap_values * batch.is_truncated).to(device)
    estimate = functools.partial(
        gae_advantages,
        values=batch.values.to(device),
        response_mask=mask,
        gamma=config.gamma,
        bootstrap_values=bootstrap_values,
        **paid,
    )
    actor_lambda: float | Tensor = config.gae_lambda
    if config.length_adaptive_alpha is not None:
        actor_lambda = length_adaptive_lambda(mask, config.length_adaptive_alpha)
    estimates = estimate(gae_lambda=actor_lambda)
    targets = estimates if config.critic_lambda is None else estimate(gae_lambda=config.critic_lambda)
    return estimates, targets.returns.cpu()
