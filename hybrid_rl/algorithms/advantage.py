"""The maths that advantage estimators are made of: returns, GAE, whitening. Pure functions of tensors.

Every input is read only where its mask is 1, and a NaN or inf read there is an error that names the row.
"""

from typing import Any

import torch
from torch import Tensor

import hybrid_rl_kernels as kernels
from hybrid_rl_kernels import Advantages, gae_with_moments
from hybrid_rl_kernels.reference import check_same_shape


def overlong_penalty(lengths: Tensor, *, max_response_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Return the penalty of a long response: 0 up to the buffer, then falling to -penalty at the limit.

    Args:
        lengths:             [B] int64; sampled tokens of each response.
        max_response_tokens: limit of a response; longer ones get -penalty.
        buffer:              tokens before the limit over which the penalty grows, in 1..max_response_tokens.
        penalty:             at least 0.
    Returns:
        penalties: [B] float32, in [-penalty, 0]; to be added to the rewards.
    Raises:
        ValueError: buffer or penalty is out of range.
    Source: Yu et al. 2025 (DAPO), eq. 13, there with penalty 1.
    """
    if not 0 < buffer <= max_response_tokens:
        raise ValueError(f"buffer must lie in 1..max_response_tokens = {max_response_tokens}, got {buffer}")
    if not penalty >= 0:
        raise ValueError(f"penalty must not be negative, got {penalty}")
    tokens_left = max_response_tokens - buffer - lengths
    return tokens_left.clamp(-buffer, 0).float() / buffer * penalty


def length_adaptive_lambda(response_mask: Tensor, alpha: float) -> Tensor:
    """Return GAE's lambda for each response, 1 - 1 / (alpha * length): in a longer one rewards reach further back.

    The weights lambda^k over all k add up to alpha * length.

    Args:
        response_mask: [B, T] bool; the length is the number of sampled tokens.
        alpha:         greater than 0.
    Returns:
        gae_lambda: [B] float32, in [0, 1]; 0 where alpha * length is at most 1.
    Raises:
        ValueError: alpha is not greater than 0.
    Source: Yue et al. 2025 (VAPO), Length-Adaptive GAE; alpha is 0.05 there.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be greater than 0, got {alpha}")
    lengths = response_mask.bool().sum(1).double()
    return (1 - 1 / (alpha * lengths)).clamp(0, 1).float()


def discounted_returns(
    rewards: Tensor | None,
    response_mask: Tensor,
    *,
    gamma: float,
    token_rewards: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    turn_ids: Tensor | None = None,
    turn_gamma: float = 1.0,
) -> Advantages:
    """Return, as advantages, the discounted reward still to come at each sampled token, G_t = R_t + g_t * G_u.

    u is the sampled token after t: observations between two sampled tokens neither discount nor end the sum.

    Args:
        rewards, token_rewards, kl, kl_coef, turn_ids, turn_gamma: see gae_advantages.
        response_mask: [B, T] bool.
        gamma:         in [0, 1].
    Returns:
        advantages and returns [B, T] float32, the same, 0 outside the mask; their moments; without gradient.
    Raises:
        ValueError: shapes differ, a discount leaves [0, 1], or a reward or kl that is read is missing or not finite.
    Source: REINFORCE++ (Hu et al. 2025) and ReMax (Li et al. 2024) build on it.
    """
    check_unit("gamma", gamma)
    mask = response_mask.bool()
    return gae_with_moments(
        None,
        mask,
        gamma=gamma,
        gae_lambda=1.0,
        **_payments(rewards, token_rewards, mask, kl, kl_coef),
        **_turn_discounts(turn_ids, mask, turn_gamma),
    )


def gae_advantages(
    rewards: Tensor | None,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    token_rewards: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    turn_ids: Tensor | None = None,
    turn_gamma: float = 1.0,
    bootstrap_values: Tensor | None = None,
) -> Advantages:
    """Return generalized advantage estimates, value targets, and the moments of the estimates for whitening.

    The reward of a token is its entry of token_rewards minus kl_coef * kl; rewards are paid in addition after the last
    sampled token.

    Observations are skipped: the state after the last token of a turn is the first token of the next turn, whose value
    knows the observation between them. Gamma and lambda count sampled tokens, turn_gamma counts turns.

    Args:
        rewards:           [B] float32 or None; not read in rows without sampled tokens.
        values:            [B, T] float32; critic's estimate before token t is emitted.
        response_mask:     [B, T] bool; the sampled tokens.
        gamma:             in [0, 1]; discount per sampled token.
        gae_lambda:        in [0, 1]; one number, or one per row [B].
        token_rewards:     [B, T] float32 or None.
        kl:                [B, T] float32 or None; KL estimate per token.
        kl_coef:           factor on kl.
        turn_ids:          [B, T] int64 or None; number of each sampled token's turn; None is one turn per row.
        turn_gamma:        in [0, 1]; discount from a turn to the next one, in addition to gamma.
        bootstrap_values:  [B] float32 or None; value after the last token, for truncated rows; 0 when None.
    Returns:
        advantages and returns [B, T] float32, 0 outside the mask; not whitened, without gradient.
    Raises:
        ValueError: shapes differ, a coefficient leaves [0, 1], kl is missing, or a value that is read is not finite.
    Source: Schulman et al. 2016, eq. 16.
    """
    check_unit("gamma", gamma)
    check_unit("gae_lambda", gae_lambda)
    mask = response_mask.bool()
    check_same_shape(values=values, response_mask=mask)
    check_finite("values", values, mask)
    if bootstrap_values is not None:
        check_same_shape(bootstrap_values=bootstrap_values, rows=mask.any(1))
        check_finite("bootstrap_values", bootstrap_values, mask.any(1))
    return gae_with_moments(
        values,
        mask,
        gamma=gamma,
        gae_lambda=gae_lambda,
        bootstrap_values=bootstrap_values,
        **_payments(rewards, token_rewards, mask, kl, kl_coef),
        **_turn_discounts(turn_ids, mask, turn_gamma),
    )


def _payments(
    rewards: Tensor | None, token_rewards: Tensor | None, mask: Tensor, kl: Tensor | None, kl_coef: float
) -> dict[str, Any]:
    """Return the checked arguments of gae_with_moments that hold the reward of each token."""
    if rewards is not None:
        check_same_shape(rewards=rewards, rows=mask.any(1))
        check_finite("rewards", rewards, mask.any(1))
    if token_rewards is not None:
        check_same_shape(token_rewards=token_rewards, response_mask=mask)
        check_finite("token_rewards", token_rewards, mask)
    paid: dict[str, Any] = {"scores": rewards, "token_rewards": token_rewards}
    if kl_coef == 0:
        return paid
    if kl is None:
        raise ValueError(f"kl_coef is {kl_coef} but kl is None: give the KL estimate of every token")
    check_same_shape(kl=kl, response_mask=mask)
    check_finite("kl", kl, mask)
    return paid | {"kl": kl, "kl_coef": kl_coef}


def _turn_discounts(turn_ids: Tensor | None, mask: Tensor, turn_gamma: float) -> dict[str, Any]:
    """Return the checked arguments of gae_with_moments that discount per turn; none where nothing is discounted."""
    check_unit("turn_gamma", turn_gamma)
    if turn_ids is None or turn_gamma == 1:
        return {}
    check_same_shape(turn_ids=turn_ids, response_mask=mask)
    return {"turn_ends": turn_ends(turn_ids, mask), "turn_gamma": turn_gamma}


def turn_ends(turn_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Return [B, T] bool, true for the last sampled token of every turn that another turn follows.

    Args:
        turn_ids:      [B, T] int64; read at the sampled tokens, where it does not fall.
        response_mask: [B, T] bool; the sampled tokens.
    """
    mask, none = response_mask.bool(), torch.iinfo(torch.int64).max
    turns = torch.where(mask, turn_ids, none)
    following = turns.flip(1).cummin(1).values.flip(1)[:, 1:]  # turn of the first sampled token at or after each slot
    following = torch.cat([following, torch.full_like(turns[:, :1], none)], dim=1)
    return mask & (following > turns) & (following < none)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Return [3] float64: number, mean and sum of squared deviations of x [B, T] in the mask, without gradient.

    `hybrid_rl_kernels.merge_moments` merges the moments of several ranks without the cancellation of sums of squares.
    """
    return gae_with_moments(None, mask.bool(), gamma=0.0, gae_lambda=1.0, token_rewards=x).moments


def whiten(x: Tensor, mask: Tensor, all_moments: Tensor | None = None) -> Tensor:
    """Return x with mean 0 and population variance 1 over the mask.

    Args:
        x:           [B, T] float32.
        mask:        [B, T] bool.
        all_moments: [3] float64 or None; the merged `moments` of all ranks; None takes the moments of this x.
    Returns:
        whitened: as x, 0 outside the mask; all 0 if the entries are equal up to rounding or there is only one.
    Raises:
        ValueError: shapes differ.
    Source of the pass and its merging: Chan et al. 1979.
    """
    return kernels.whiten(x, mask, moments(x, mask) if all_moments is None else all_moments)


def check_unit(name: str, coefficient: float | Tensor) -> None:
    """Raise ValueError unless the number, or every row of [B], lies in [0, 1]."""
    if not isinstance(coefficient, Tensor):
        if not 0 <= coefficient <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {coefficient}")
        return
    is_good = (coefficient >= 0) & (coefficient <= 1)
    if not is_good.all():
        row = int((~is_good).nonzero()[0, 0])
        raise ValueError(f"{name} must lie in [0, 1], got {coefficient[row].item()} in row {row}")


def check_finite(name: str, x: Tensor, mask: Tensor) -> None:
    """Raise ValueError naming the first row of [B] or [B, T] x that holds a NaN or inf inside the mask."""
    is_bad = mask & ~x.isfinite()
    if is_bad.any():
        place = tuple(is_bad.nonzero()[0].tolist())
        column = f", token {place[1]}" if len(place) > 1 else ""
        raise ValueError(f"{name} is {x[place].item()} in row {place[0]}{column}: must be finite")
