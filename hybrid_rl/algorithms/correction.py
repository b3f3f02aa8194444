"""Weights for tokens that the rollout engine sampled from not quite the policy that the trainer computes. All pure.

Engine and trainer give the same token different log-probs: other kernels, other rounding, older weights. A correction
is one function and a line in CORRECTIONS.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_rl.algorithms.advantage import check_finite
from hybrid_rl.algorithms.loss import bounded_exp
from hybrid_rl_kernels.reference import at_least_float32, check_same_shape


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, kind: str, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return the factor on each token's policy loss, made of w = exp(old_logprobs - rollout_logprobs).

    none:          1.
    tis:           w, truncated to [low, high].
    icepop:        w where it lies in [low, high], else 0: the token is masked.
    sequence_mask: w in sequences where exp(mean of log w) lies in [low, high], else 0: the sequence is masked. The
                   weights of a kept sequence are not truncated.

    Args:
        old_logprobs:     [B, T]; the trainer's, before the update.
        rollout_logprobs: [B, T]; the engine's, at the same temperature.
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
    weights, is_out = CORRECTIONS[kind](log_weights, mask, low, high)
    return torch.where(mask, weights, 0), is_out & mask


def _none(log_weights: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return torch.ones_like(log_weights), torch.zeros_like(mask)


def _tis(log_weights: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    weights = bounded_exp(log_weights)
    return weights.clamp(low, high), _is_outside(weights, low, high)


def _icepop(log_weights: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    weights = bounded_exp(log_weights)
    is_out = _is_outside(weights, low, high)
    return weights.masked_fill(is_out, 0), is_out


def _sequence_mask(log_weights: Tensor, mask: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    means = log_weights.double().sum(1) / mask.sum(1).clamp_min(1)
    is_out = _is_outside(bounded_exp(means), low, high)[:, None].expand_as(mask)
    return bounded_exp(log_weights).masked_fill(is_out, 0), is_out


def _is_outside(weights: Tensor, low: float, high: float) -> Tensor:
    return (weights < low) | (weights > high)


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]] = {
    "none": _none,
    "tis": _tis,
    "icepop": _icepop,
    "sequence_mask": _sequence_mask,
}
"""From log-weights, 0 outside the mask, the mask and the bounds to weights and whether a bound changed them."""
