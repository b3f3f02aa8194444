"""Advantage estimators: each name in specs.ESTIMATORS is a function of this module. Pure functions of tensors.

An estimator that compares groups is a function of one group, from the rewards [n] of its responses, float64 and not all
equal, and their lengths [n], float64, to their advantages [n]. Every other one is a function of TokenRewards.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_rl.algorithms.advantage import (
    check_finite,
    check_unit,
    discounted_returns,
    gae_advantages,
    length_adaptive_lambda,
    moments,
)
from hybrid_rl.algorithms.specs import ESTIMATORS
from hybrid_rl_kernels import Advantages
from hybrid_rl_kernels.reference import at_least_float32, check_same_shape


@dataclass(frozen=True, kw_only=True)
class TokenRewards:
    """What an estimator reads that gives every token its own advantage; all tensors are on one device."""

    rewards: Tensor
    """[B] float32; paid after the last sampled token."""
    response_mask: Tensor
    """[B, T] bool; the sampled tokens."""
    gamma: float
    token_rewards: Tensor | None = None
    """[B, T] float32; paid at their tokens, in addition to `rewards`."""
    turn_ids: Tensor | None = None
    """[B, T] int64; number of each sampled token's turn."""
    turn_gamma: float = 1.0
    """Discount from a turn to the next one, in addition to gamma."""
    kl: Tensor | None = None
    """[B, T] float32; kl_coef * kl is subtracted from the reward of each token."""
    kl_coef: float = 0.0
    baselines: Tensor | None = None
    """[B] float32; rewards of the greedy responses."""
    values: Tensor | None = None
    """[B, T] float32; the critic's."""
    bootstrap_values: Tensor | None = None
    """[B] float32; the critic's value after the last token, 0 when None."""
    gae_lambda: float = 1.0
    critic_lambda: float | None = None
    """Lambda of the value targets; None takes the one of the advantages."""
    length_adaptive_alpha: float | None = None
    """Replaces gae_lambda by `length_adaptive_lambda` for the advantages."""


def token_advantages(tokens: TokenRewards, *, estimator: str) -> Advantages:
    """Return the advantage of each token by an estimator that compares no group, not whitened.

    Args:
        estimator: a name in ESTIMATORS.
    Returns:
        advantages, their moments, and returns, which are the value targets of an estimator with a critic.
    Raises:
        ValueError: the estimator is unknown or compares groups, a tensor that it reads is missing, shapes differ, or a
            value that is read is not finite.
    """
    _check_name(estimator, compares_group=False)
    found: Advantages = globals()[estimator](tokens)
    return found


def group_advantages(rewards: Tensor, group_ids: Tensor, *, estimator: str, lengths: Tensor | None = None) -> Tensor:
    """Return each response's reward compared with the other responses to its prompt.

    Args:
        rewards:   [B] float32.
        group_ids: [B] int64; equal for the responses to one prompt, which may lie in any order.
        estimator: a name in ESTIMATORS.
        lengths:   [B] int64, sampled tokens of each response; read by opo alone.
    Returns:
        advantages: [B] float32, not whitened; exactly 0 in a group whose rewards are equal.
    Raises:
        ValueError: shapes differ, the estimator is unknown or compares no groups, a group has one response, a reward is
            not finite, or opo lacks the lengths.
    """
    _check_name(estimator, compares_group=True)
    if lengths is None:
        if ESTIMATORS[estimator].reads_lengths:
            raise ValueError(f"lengths is None: {estimator} weights the rewards by the lengths of the responses")
        lengths = torch.ones_like(group_ids)
    check_same_shape(rewards=rewards, group_ids=group_ids, lengths=lengths)
    check_finite("rewards", rewards, torch.ones_like(rewards, dtype=torch.bool))
    groups, sizes = group_ids.unique(return_counts=True)
    if (sizes == 1).any():
        group = int(groups[sizes == 1][0])
        raise ValueError(f"group {group} has one response, {estimator} compares at least 2")
    compare = globals()[estimator]
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    for rows in group_ids.argsort(stable=True).split(sizes.tolist()):
        group_rewards = rewards[rows].double()
        if group_rewards.min() < group_rewards.max():
            advantages[rows] = compare(group_rewards, lengths[rows].double())
    return advantages.to(at_least_float32(rewards.dtype))


def turn_advantages(
    turn_rewards: Tensor,
    turn_lengths: Tensor,
    group_ids: Tensor,
    *,
    estimator: str,
    turn_gamma: float,
) -> Tensor:
    """Return the return of each turn of a conversation, compared with the same turn of the group's other conversations.

    The return of a turn is its own reward and, discounted, the rewards of the turns that follow. The baseline of turn k
    is taken over the conversations of the group that have a turn k. A turn that only one conversation has reached is
    compared with nothing, and its advantage is 0.

    Args:
        turn_rewards: [B, K] float64; reward of each turn, 0 after the last one.
        turn_lengths: [B, K] int64; sampled tokens of each turn, 0 after the last one.
        group_ids:    [B] int64.
        estimator:    a name in ESTIMATORS that compares groups.
        turn_gamma:   in [0, 1]; discount per turn.
    Returns:
        advantages: [B, K] float32, not whitened, 0 after the last turn.
    Raises:
        ValueError: shapes differ, turn_gamma leaves [0, 1], or see group_advantages.
    Source: Ding et al. 2025 (GTPO, arXiv 2511.14846), returns of turns normalised in their group; the baselines are the
    ones of the estimator.
    """
    _check_name(estimator, compares_group=True)
    check_same_shape(turn_rewards=turn_rewards, turn_lengths=turn_lengths)
    check_unit("turn_gamma", turn_gamma)
    returns = turn_rewards.double()
    for turn in reversed(range(returns.shape[1] - 1)):
        returns[:, turn] += turn_gamma * returns[:, turn + 1]
    has_turn = turn_lengths > 0
    has_turn[:, 0] = True  # a response without tokens is compared, too
    rows, turns = has_turn.nonzero().unbind(1)
    pairs = torch.stack([group_ids[rows], turns], dim=1)
    _, pair_ids, sizes = pairs.unique(dim=0, return_inverse=True, return_counts=True)
    is_compared = (sizes[pair_ids] > 1) | (turns == 0)
    rows, turns, pair_ids = rows[is_compared], turns[is_compared], pair_ids[is_compared]
    advantages = torch.zeros(returns.shape)
    advantages[rows, turns] = group_advantages(  # rounded to float32 once: equal returns stay equal
        returns[rows, turns].float(), pair_ids, estimator=estimator, lengths=turn_lengths[rows, turns]
    )
    return advantages


def _check_name(estimator: str, *, compares_group: bool) -> None:
    names = [name for name, spec in ESTIMATORS.items() if spec.compares_group == compares_group]
    if estimator not in names:
        raise ValueError(f"estimator must be one of {', '.join(names)}, got {estimator!r}")


# Every token has its own advantage


def gae(tokens: TokenRewards) -> Advantages:
    """Generalized advantage estimates against the critic's values.

    Source: Schulman et al. 2016; a lambda of its own for the value targets, and one that grows with the response, are
    Yue et al. 2025 (VAPO).
    """
    values = tokens.values
    if values is None:
        raise ValueError("values is None: gae needs the critic's values")

    def estimate(gae_lambda: float | Tensor) -> Advantages:
        return gae_advantages(
            tokens.rewards,
            values,
            tokens.response_mask,
            gamma=tokens.gamma,
            gae_lambda=gae_lambda,
            token_rewards=tokens.token_rewards,
            kl=tokens.kl,
            kl_coef=tokens.kl_coef,
            turn_ids=tokens.turn_ids,
            turn_gamma=tokens.turn_gamma,
            bootstrap_values=tokens.bootstrap_values,
        )

    if tokens.length_adaptive_alpha is None:
        found = estimate(tokens.gae_lambda)
    else:
        found = estimate(length_adaptive_lambda(tokens.response_mask, tokens.length_adaptive_alpha))
    return found if tokens.critic_lambda is None else replace(found, returns=estimate(tokens.critic_lambda).returns)


def reinforce_pp(tokens: TokenRewards) -> Advantages:
    """Discounted returns, which whitening compares over the whole step. Source: Hu et al. 2025 (REINFORCE++)."""
    return discounted_returns(
        tokens.rewards,
        tokens.response_mask,
        gamma=tokens.gamma,
        token_rewards=tokens.token_rewards,
        kl=tokens.kl,
        kl_coef=tokens.kl_coef,
        turn_ids=tokens.turn_ids,
        turn_gamma=tokens.turn_gamma,
    )


def remax(tokens: TokenRewards) -> Advantages:
    """Discounted returns minus the reward of the greedy response. Source: Li et al. 2024 (ReMax)."""
    if tokens.baselines is None:
        raise ValueError("baselines is None: remax needs the rewards of the greedy responses")
    found = reinforce_pp(tokens)
    mask = tokens.response_mask.bool()
    advantages = torch.where(mask, found.advantages - tokens.baselines[:, None], 0)
    return replace(found, advantages=advantages, moments=moments(advantages, mask))


# The responses of a group are compared


def grpo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Standard scores, unbiased std. Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; eps as in verl."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def rloo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the mean of the others, r_i - sum_{j != i} r_j / (n - 1). Source: Ahmadian et al. 2024."""
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


def dr_grpo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the group mean. Source: Liu et al. 2025 (Dr. GRPO)."""
    return rewards - rewards.mean()


def reinforce_pp_baseline(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the group mean, which is whitened over the whole step. Source: Hu et al. 2025 (REINFORCE++)."""
    return rewards - rewards.mean()


def opo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the mean over the group's tokens, sum_j l_j r_j / sum_j l_j. Source: Hao et al. 2025 (OPO).

    The baseline has the least variance if a response's squared gradient grows with its length; it is 0 in a group
    without tokens.
    """
    return rewards - lengths @ rewards / lengths.sum().clamp_min(1)
