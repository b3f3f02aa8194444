"""Importance weights that correct for the gap between the engine's policy and the trainer's. Pure functions of tensors.

Engine and trainer give the same token different log-probs: other kernels, other rounding, older weights. Each name in
specs.CORRECTIONS is a function of this module, from log-weights (0 outside the mask), the mask and the bounds to the
weights and whether a bound changed them.
"""

import torch
from torch import Tensor

from hybrid_rl.algorithms.advantage import check_finite
from hybrid_rl.algorithms.elementwise import bounded_exp
from hybrid_rl.algorithms.specs import CORRECTIONS
from hybrid_rl_kernels.reference import at_least_float32, check_same_shape


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, kind: str, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return the factor on each token's policy loss, a function of w = exp(old_logprobs - rollout_logprobs).

    none:          1.
    tis:           w, truncated to [low, high].
    icepop:        w where it lies in [low, high], else 0: the token is masked.
    sequence_mask: w in sequences where exp(mean of log w) lies in [low, high], else 0: the sequence is masked. The
                   weights of a kept sequence are not truncated.

    Args:
        old_logprobs:     [B, T]; log-probs of the trainer before the update.
        rollout_logprobs: [B, T]; log-probs of the engine at the same temperature.
        response_mask:    [B, T] bool.
        kind:             a name in CORRECTIONS.
        low, high:        bounds, 0 <= low <= high, both included; w itself is bounded to exp(+-20).
    Returns:
        weights: [B, T] float32 (float64 stays), 0 outside the mask, without gradient.
        is_out:  [B, T] bool; a bound changed the weight. False outside the mask.
    Raises:
        ValueError: shapes differ, the kind is unknown, the bounds are no interval, or a log-prob that is read is not
            finite.
    Source: tis: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training. icepop: Ling
    Team 2025 (Ring-1T). sequence_mask: Liu et al. 2025 (MIS), When Speed Kills Stability, in its geometric form.
    """
    if kind not in CORRECTIONS:
        raise ValueError(f"kind must be one of {', '.join(CORRECTIONS)}, got {kind!r}")
    if not 0 <= low <= high:
        raise ValueError(f"bounds must satisfy 0 <= low <= high, got low {low} and high {high}")
    check_same_shape(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, response_mask=response_mask)
    mask = response_mask.bool()
    check_finite("old_logprobs", old_logprobs, mask)
    check_finite("rollout_logprobs", rollout_logprobs, mask)
    dtype = at_least_float32(old_logprobs.dtype)
    log_weights = torch.where(mask, old_logprobs.to(dtype) - rollout_logprobs.to(dtype), 0)
    weights, is_out = globals()[kind](log_weights, mask, low, high)
    return torch.where(mask, weights, 0), is_out & mask


def none(log_weights: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Weigh every token by 1."""
    return torch.ones_like(log_weights), torch.zeros_like(mask)


def tis(log_weights: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Truncate the weights to the bounds."""
    weights = bounded_exp(log_weights)
    return weights.clamp(low, high), _is_outside(weights, low, high)


def icepop(log_weights: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Mask the tokens whose weight lies outside the bounds."""
    weights = bounded_exp(log_weights)
    is_out = _is_outside(weights, low, high)
    return weights.masked_fill(is_out, 0), is_out


def sequence_mask(log_weights: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Mask the sequences whose geometric mean weight lies outside the bounds."""
    means = log_weights.double().sum(1) / mask.sum(1).clamp_min(1)
    is_out = _is_outside(bounded_exp(means), low, high)[:, None].expand_as(mask)
    return bounded_exp(log_weights).masked_fill(is_out, 0), is_out


def _is_outside(weights: Tensor, low: float, high: float) -> Tensor:
    return (weights < low) | (weights > high)
