"""From rewards to advantages. Pure functions of tensors; a group estimator is one function and a line in ESTIMATORS.

Every input is read only where its mask is 1, and a NaN or inf read there is an error that names the row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_rl_kernels import gae
from hybrid_rl_kernels.reference import at_least_float32, check_same_shape


def token_rewards(rewards: Tensor, response_mask: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Return the reward paid after each token: the score on the last sampled one, minus kl_coef * kl on every one.

    Args:
        rewards:       [B] float32; score of the response. Not read in rows without tokens.
        response_mask: [B, T] bool.
        kl:            [B, T] float32 or None; KL estimate per token.
        kl_coef:       factor on kl.
    Returns:
        token_rewards: [B, T] float32, 0 outside the mask.
    Raises:
        ValueError: shapes do not fit, kl is missing, or a reward or kl that is read is not finite.
    """
    mask = response_mask.bool()
    check_same_shape(rewards=rewards, rows=mask.any(1))
    _check_finite("rewards", rewards, mask.any(1))
    num_left = mask.flip(1).cumsum(1).flip(1)
    result = torch.where(mask & (num_left == 1), rewards[:, None], 0).to(at_least_float32(rewards.dtype))
    if kl_coef == 0:
        return result
    if kl is None:
        raise ValueError(f"kl_coef is {kl_coef} but kl is None: give the KL estimate of every token")
    check_same_shape(kl=kl, response_mask=mask)
    _check_finite("kl", kl, mask)
    return result - kl_coef * torch.where(mask, kl, 0)


def gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimates and value targets.

    Args:
        token_rewards:     [B, T] float32; reward paid after token t.
        values:            [B, T] float32; critic's estimate before token t is emitted.
        response_mask:     [B, T] bool; slots masked between two tokens count as states of value 0.
        gamma, gae_lambda: in [0, 1].
        bootstrap_values:  [B] float32 or None; value after the last token, for truncated rows; 0 when None.
    Returns:
        advantages, returns: [B, T] float32, 0 outside the mask; not whitened, without gradient.
    Raises:
        ValueError: shapes differ, a coefficient leaves [0, 1], or a value that is read is not finite.
    Source: Schulman et al. 2016, eq. 16.
    """
    for name, coefficient in {"gamma": gamma, "gae_lambda": gae_lambda}.items():
        if not 0 <= coefficient <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {coefficient}")
    check_same_shape(token_rewards=token_rewards, values=values, response_mask=response_mask)
    mask = response_mask.bool()
    _check_finite("token_rewards", token_rewards, mask)
    _check_finite("values", values, mask)
    if bootstrap_values is not None:
        check_same_shape(bootstrap_values=bootstrap_values, rows=mask.any(1))
        _check_finite("bootstrap_values", bootstrap_values, mask.any(1))
    advantages = gae(token_rewards, values, mask, gamma, gae_lambda, bootstrap_values=bootstrap_values)
    return advantages, torch.where(mask, advantages + values.detach(), 0)


def masked_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Return [3] float64: the number of masked-in entries, their sum and their sum of squares; ranks add theirs up."""
    check_same_shape(x=x, mask=mask)
    selected = torch.where(mask.bool(), x, 0).double()
    return torch.stack([mask.bool().sum().double(), selected.sum(), selected.square().sum()])


def whiten(x: Tensor, mask: Tensor, sums: Tensor | None = None) -> Tensor:
    """Return x with mean 0 and population variance 1 over the mask.

    Args:
        x:    any shape, float32.
        mask: same shape, bool.
        sums: [3] float64 or None; `masked_sums` of this x plus those of the other ranks, this x alone when None.
    Returns:
        whitened: as x, 0 outside the mask; all 0 if the entries are equal or there is only one.
    Raises:
        ValueError: shapes differ.
    """
    sums = masked_sums(x, mask) if sums is None else sums.to(x.device)
    count, total, squares = sums.unbind()
    mean = total / count
    variance = squares / count - mean.square()
    # Rounding of the sums leaves equal entries a variance of a few eps * mean^2 (6e-15 mean^2 seen for 8 million).
    # The bound is a standard deviation of 1.2e-7 mean: one unit in the last place of float32.
    is_constant = variance <= 64 * torch.finfo(torch.float64).eps * mean.square()
    whitened = (x.double() - mean) / variance.sqrt()
    return torch.where(mask.bool() & ~is_constant, whitened, 0).to(x.dtype)


def group_advantages(rewards: Tensor, group_ids: Tensor, *, estimator: str) -> Tensor:
    """Return each response's reward compared with the other responses to its prompt.

    Args:
        rewards:   [B] float32.
        group_ids: [B] int64; responses to one prompt share it, in any order.
        estimator: a name in ESTIMATORS.
    Returns:
        advantages: [B] float32; exactly 0 in a group whose rewards are equal.
    Raises:
        ValueError: shapes differ, the estimator is unknown, a group has one response, or a reward is not finite.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    check_same_shape(rewards=rewards, group_ids=group_ids)
    _check_finite("rewards", rewards, torch.ones_like(rewards, dtype=torch.bool))
    groups, sizes = group_ids.unique(return_counts=True)
    if (sizes == 1).any():
        group = int(groups[sizes == 1][0])
        raise ValueError(f"group {group} has one response, {estimator} compares at least 2")
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    for rows in group_ids.argsort(stable=True).split(sizes.tolist()):
        group_rewards = rewards[rows].double()
        if group_rewards.min() < group_rewards.max():
            advantages[rows] = ESTIMATORS[estimator](group_rewards)
    return advantages.to(at_least_float32(rewards.dtype))


def _grpo(rewards: Tensor) -> Tensor:
    """Standard scores, unbiased std. Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; eps as in verl."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def _rloo(rewards: Tensor) -> Tensor:
    """Reward minus the mean of the others, r_i - sum_{j != i} r_j / (n - 1). Source: Ahmadian et al. 2024."""
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


def _dr_grpo(rewards: Tensor) -> Tensor:
    """Reward minus the group mean. Source: Liu et al. 2025."""
    return rewards - rewards.mean()


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"grpo": _grpo, "rloo": _rloo, "dr_grpo": _dr_grpo}
"""From the rewards of one group, [n] float64 and not all equal, to its advantages."""


def _check_finite(name: str, x: Tensor, mask: Tensor) -> None:
    """Raise ValueError naming the first row of [B] or [B, T] x that holds a NaN or inf inside the mask."""
    is_bad = mask & ~x.isfinite()
    if is_bad.any():
        place = tuple(is_bad.nonzero()[0].tolist())
        column = f", token {place[1]}" if len(place) > 1 else ""
        raise ValueError(f"{name} is {x[place].item()} in row {place[0]}{column}: must be finite")
