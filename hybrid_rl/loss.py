"""Losses of actor and critic. Pure functions of tensors; token losses are elementwise, so padded and packed both do.

Wherever the incoming gradient is 0, as in every slot that `aggregate` masks out, the outgoing one is 0 too, whatever
NaN or inf the slot holds: bounds are clamps, and clamp() *selects* its gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_rl_kernels.reference import at_least_float32, check_same_shape

MAX_LOG_RATIO = 20.0
"""Bound of an exponent before exp(); float32 overflows above 88."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return an estimate of the KL divergence from the reference at each token, with d = logprobs - ref_logprobs.

    Args:
        logprobs, ref_logprobs: one shape, any float dtype.
        estimator:              k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d, whose gradient is 0 beyond d = -20.
    Returns:
        kl: same shape, float32 (float64 stays); NaN where d is NaN.
    Raises:
        ValueError: shapes differ or the estimator is unknown.
    Source: Schulman 2020, Approximating KL Divergence; expm1 because exp(-d) - 1 + d cancels for small d.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return KL_ESTIMATORS[estimator](_difference(logprobs, ref_logprobs))


def _half_square(x: Tensor) -> Tensor:
    """Return x^2 / 2; the clamp changes no x with a finite square, and keeps 0 * inf out of the gradient."""
    limit = torch.finfo(x.dtype).max / 4
    return 0.5 * x.clamp(-limit, limit).square()


def _k3(d: Tensor) -> Tensor:
    d = d.clamp_min(-MAX_LOG_RATIO)  # the exponent -d stays below 20; bounding it alone would leave a slope of +1 there
    return torch.expm1(-d) + d


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": lambda d: d, "k2": _half_square, "k3": _k3}
"""From log-prob differences d, at least float32, to estimates."""


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return the clipped policy loss of each token, -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A).

    Args:
        logprobs, old_logprobs: one shape; rho = exp(logprobs - old_logprobs), bounded to exp(+-20).
        advantages:             same shape, constant.
        clip_low, clip_high:    distance of the bounds from ratio 1.
    Returns:
        token_loss, is_clipped: same shape; float32 (float64 stays), and bool: a bound cuts off the gradient.
    Raises:
        ValueError: shapes differ.
    Source: Schulman et al. 2017, eq. 7; two bounds as in Yu et al. 2025 (DAPO).
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = _difference(logprobs, old_logprobs)
    # A NaN advantage must pass through clamp() like a NaN log-prob, else 0 * NaN reaches the gradient of a masked slot.
    log_ratio = log_ratio.masked_fill(~advantages.isfinite(), torch.nan)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    objective = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(objective, clipped), clipped < objective


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the clipped value loss of each token, max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2.

    Args:
        values, old_values, returns: one shape; old values and returns are constant.
        value_clip:                  c; None does not clip.
    Returns:
        token_loss, is_clipped: same shape; float32 (float64 stays), and bool: a bound cuts off the gradient.
    Raises:
        ValueError: shapes differ.
    Source: Schulman et al., OpenAI baselines ppo2; the half as in OpenRLHF and verl.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    loss = _half_square(_difference(values, returns))
    if value_clip is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    change = _difference(values, old_values)
    clipped_values = old_values + change.clamp(-value_clip, value_clip)
    clipped_loss = _half_square(_difference(clipped_values, returns))
    # Within the bound old + change is not exactly new: rounding is no clipping.
    return torch.maximum(loss, clipped_loss), (change.abs() > value_clip) & (clipped_loss > loss)


def token_weights(
    response_mask: Tensor,
    mode: str,
    *,
    num_tokens: Tensor | float | None = None,
    num_sequences: Tensor | float | None = None,
    max_response_tokens: int | None = None,
) -> Tensor:
    """Return the weight of each token loss, such that sum(weights * token_loss) is the aggregate.

    With normalisers counted over the whole optimizer step and all ranks, the parts of any split add up to the whole.

    Args:
        response_mask:       [B, T] bool.
        mode:                token_mean: over all tokens. sequence_mean: over the sequences, of each one's token mean.
                             sequence_sum_constant: sum over num_sequences * max_response_tokens.
        num_tokens:          tokens in the step; None counts the mask.
        num_sequences:       sequences with at least one token in the step; None counts the mask's rows.
        max_response_tokens: limit of a response; None takes the mask's longest.
    Returns:
        weights: [B, T] float32, 0 outside the mask; all 0 without tokens.
    Raises:
        ValueError: the mode is unknown.
    Source: sequence_sum_constant is Liu et al. 2025 (Dr. GRPO).
    """
    mask = response_mask.bool()
    lengths = mask.sum(dim=1, keepdim=True)
    if num_sequences is None:
        num_sequences = (lengths > 0).sum()
    denominator: Tensor | float
    if mode == "token_mean":
        denominator = lengths.sum() if num_tokens is None else num_tokens
    elif mode == "sequence_mean":
        denominator = lengths * num_sequences
    elif mode == "sequence_sum_constant":
        longest = max(lengths.flatten().tolist(), default=0)
        denominator = num_sequences * (longest if max_response_tokens is None else max_response_tokens)
    else:
        raise ValueError(f"mode must be token_mean, sequence_mean or sequence_sum_constant, got {mode!r}")
    return torch.where(mask, mask / denominator, 0).float()  # selects away the 0 / 0 of a row without tokens


def aggregate(
    token_loss: Tensor,
    response_mask: Tensor,
    mode: str,
    *,
    num_tokens: Tensor | float | None = None,
    num_sequences: Tensor | float | None = None,
    max_response_tokens: int | None = None,
) -> Tensor:
    """Return the loss as one number; see `token_weights` for modes and normalisers.

    Args:
        token_loss:    [B, T] float32.
        response_mask: [B, T] bool; a masked slot adds nothing to value and gradient, whatever it holds.
    Returns:
        loss: scalar; 0 without tokens.
    Raises:
        ValueError: shapes differ or the mode is unknown.
    """
    check_same_shape(token_loss=token_loss, response_mask=response_mask)
    weights = token_weights(
        response_mask,
        mode,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        max_response_tokens=max_response_tokens,
    )
    return (torch.where(response_mask.bool(), token_loss, 0) * weights).sum()


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """Return a - b in at least float32: in float16 its exponential would overflow above 11."""
    dtype = at_least_float32(a.dtype)
    return a.to(dtype) - b.to(dtype)
