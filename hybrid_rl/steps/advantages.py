"""Advantages of a batch, from its rewards, KL and values."""

import torch
from torch import Tensor

from hybrid_rl.algorithms.advantage import moments, whiten
from hybrid_rl.algorithms.estimators import TokenRewards, group_advantages, token_advantages, turn_advantages
from hybrid_rl.algorithms.kl import kl_estimate
from hybrid_rl.algorithms.specs import ESTIMATORS
from hybrid_rl.batch import TrainBatch
from hybrid_rl.config import AdvantageConfig
from hybrid_rl.distributed import World
from hybrid_rl_kernels import Advantages, merge_moments


def add_advantages(
    batch: TrainBatch,
    config: AdvantageConfig,
    world: World,
    *,
    kl_coef: float | None = None,
    bootstrap_values: Tensor | None = None,
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with advantages (with a critic: value targets too), and this rank's sums for the metrics.

    Args:
        batch:            has rewards and old_logprobs; values, baselines or ref_logprobs where the estimator or the KL
                          reads them.
        world:            ranks whose advantages are whitened together.
        kl_coef:          factor on the KL in the reward; None takes the setting.
        bootstrap_values: [B] float32, the critic's value after the last token; used for truncated responses only.
    Returns:
        batch and sums: `kl` is the sum over the sampled tokens, with a reference.
    Raises:
        ValueError: a tensor that the estimator reads is missing or not finite.
    """
    spec = ESTIMATORS[config.estimator]
    kl = token_kl(batch, config)
    sums = {} if kl is None else {"kl": float(torch.where(batch.response_mask, kl, 0).sum())}
    if config.kl_in == "loss":
        kl_coef = 0.0
    elif kl_coef is None:
        kl_coef = config.kl_coef
    returns, own_moments = None, None
    if spec.compares_group:
        advantages = compared_in_groups(batch, config, kl, kl_coef)
    else:
        estimates = estimated_per_token(batch, config, kl, kl_coef, bootstrap_values, world.device)
        advantages, own_moments = estimates.advantages, estimates.moments
        returns = estimates.returns.cpu() if spec.needs_critic else None
    if config.whiten and spec.is_whitened:
        advantages = whitened_over_ranks(advantages, batch.response_mask, own_moments, world)
    return batch.with_fields(advantages=advantages.cpu(), returns=returns), sums


def token_kl(batch: TrainBatch, config: AdvantageConfig) -> Tensor | None:
    """Return the KL estimate of each token, [B, T] float32; None without a reference."""
    assert batch.old_logprobs is not None
    if batch.ref_logprobs is None:
        return None
    return kl_estimate(batch.old_logprobs, batch.ref_logprobs, config.kl_estimator)


def compared_in_groups(batch: TrainBatch, config: AdvantageConfig, kl: Tensor | None, kl_coef: float) -> Tensor:
    """Return [B, T] float32: the advantage of each response or turn on its tokens, minus kl_coef * kl of the token."""
    mask = batch.response_mask
    advantages = compared_turns(batch, config) if config.credit == "turn" else compared_responses(batch, config)
    per_token = torch.where(mask, advantages, 0)
    if kl is None or not kl_coef:
        return per_token
    return per_token - kl_coef * torch.where(mask, kl, 0)


def compared_responses(batch: TrainBatch, config: AdvantageConfig) -> Tensor:
    """Return [B, 1] float32: the advantage of each response, from all that it is paid."""
    assert batch.rewards is not None
    lengths = batch.response_lengths
    return group_advantages(batch.rewards, batch.group_ids, estimator=config.estimator, lengths=lengths)[:, None]


def compared_turns(batch: TrainBatch, config: AdvantageConfig) -> Tensor:
    """Return [B, T] float32: the advantage of each token's turn, from what the turn and its successors are paid."""
    mask = batch.response_mask
    turn_ids = torch.zeros(mask.shape, dtype=torch.int64) if batch.turn_ids is None else batch.turn_ids
    turn_ids = torch.where(mask, turn_ids, 0)
    shape = (len(batch), int(turn_ids.max()) + 1 if len(batch) else 1)
    lengths = torch.zeros(shape, dtype=torch.int64).scatter_add(1, turn_ids, mask.long())
    rewards = torch.zeros(shape, dtype=torch.float64)
    if batch.token_rewards is not None:
        rewards.scatter_add_(1, turn_ids, torch.where(mask, batch.token_rewards, 0).double())
    rewards.scatter_add_(1, turn_ids.amax(1, keepdim=True), final_rewards(batch)[:, None].double())
    advantages = turn_advantages(
        rewards, lengths, batch.group_ids, estimator=config.estimator, turn_gamma=config.turn_gamma
    )
    return advantages.gather(1, turn_ids)


def final_rewards(batch: TrainBatch) -> Tensor:
    """Return [B] float32: the part of the rewards that is paid after the last sampled token."""
    assert batch.rewards is not None
    if batch.token_rewards is None:
        return batch.rewards
    paid = torch.where(batch.response_mask, batch.token_rewards, 0).double().sum(1)
    return (batch.rewards.double() - paid).float()


def estimated_per_token(
    batch: TrainBatch,
    config: AdvantageConfig,
    kl: Tensor | None,
    kl_coef: float,
    bootstrap_values: Tensor | None,
    device: torch.device,
) -> Advantages:
    """Return the advantage of each token, and value targets where the estimator has a critic, on the device."""
    if bootstrap_values is not None:
        bootstrap_values = bootstrap_values * batch.is_truncated

    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    tokens = TokenRewards(
        rewards=final_rewards(batch).to(device),
        response_mask=batch.response_mask.to(device),
        token_rewards=move(batch.token_rewards),
        turn_ids=move(batch.turn_ids),
        turn_gamma=config.turn_gamma,
        kl=move(kl),
        kl_coef=kl_coef,
        baselines=move(batch.baselines),
        values=move(batch.values),
        bootstrap_values=move(bootstrap_values),
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        critic_lambda=config.critic_lambda,
        length_adaptive_alpha=config.length_adaptive_alpha,
    )
    return token_advantages(tokens, estimator=config.estimator)


def whitened_over_ranks(x: Tensor, mask: Tensor, own_moments: Tensor | None, world: World) -> Tensor:
    """Return x [B, T] with mean 0 and variance 1 over all ranks, on their devices.

    Args:
        own_moments: [3] float64, `moments` of this rank's x; None computes them.
    """
    x, mask = x.to(world.device), mask.to(world.device)
    own_moments = moments(x, mask) if own_moments is None else own_moments
    all_moments = merge_moments(torch.stack(world.all_gather(own_moments.cpu())))
    return whiten(x, mask, all_moments.to(world.device))
