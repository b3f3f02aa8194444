"""Losses of actor and critic. Pure functions of tensors; token losses are elementwise, so padded and packed both do.

gspo alone looks at whole sequences, and takes them packed. A new policy loss is one function and a line in
POLICY_LOSSES.

Wherever the incoming gradient is 0, as in every slot that `aggregate` masks out, the outgoing one is 0 too, whatever
NaN or inf the slot holds: bounds are clamps and bad slots are filled, and both *select* their gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_rl_kernels.reference import at_least_float32, check_same_shape

MAX_LOG_RATIO = 20.0
"""Bound of an exponent before exp(); float32 overflows above 88."""


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x), x bounded to +-MAX_LOG_RATIO; beyond the bounds, and for NaN, the gradient is 0."""
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


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


def kl_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: str, *, unbiased: bool) -> Tensor:
    """Return the KL penalty of each token for the loss, to be minimised through logprobs.

    An estimate that is right on average need not have a gradient that is. On tokens y of the policy p itself, with
    reference q and d = log p - log q, the expected gradients are
        k1: 0, as E[grad log p] = 0: noise, no penalty.
        k2: E[d grad log p], that of KL(p || q), the penalty that is meant.
        k3: E[(1 - q/p) grad log p], that of KL(q || p): it pulls p to cover q, and is bounded where p > q.
    All three miss that the tokens came from the old policy as soon as p has moved. `unbiased` multiplies the estimate
    by rho = p / p_old and differentiates through rho too, so that over tokens of the old policy, prefixes given,
        k1, k3: is the gradient of KL(p || q), exact in expectation; k3 with less variance.
        k2:     is that of E_p[d^2] / 2, which is KL(p || q) only to second order in d.

    Args:
        logprobs, old_logprobs, ref_logprobs: one shape; old and ref are constant, and old is read only if unbiased.
        estimator:                            k1, k2 or k3, see `kl_estimate`.
        unbiased:                             weight by rho, bounded to exp(+-20).
    Returns:
        token_kl: same shape, float32 (float64 stays); NaN where an input that is read, or the estimate, is not finite.
    Raises:
        ValueError: shapes differ or the estimator is unknown.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), Unbiased KL Estimate, with k3; Tang and Munos 2025 for the
    gradients of the plain estimates.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
    kl = kl_estimate(logprobs, ref_logprobs, estimator)
    if not unbiased:
        return kl
    log_ratio = _difference(logprobs, old_logprobs)
    # Each factor is the other's gradient, and 0 * inf is NaN: a slot that is bad in one is filled in both.
    is_bad = ~(kl.isfinite() & log_ratio.isfinite())
    return bounded_exp(log_ratio.masked_fill(is_bad, torch.nan)) * kl.masked_fill(is_bad, torch.nan)


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """What a policy loss reads of some tokens; see `policy_loss`."""

    logprobs: Tensor
    """At least float32, as all here."""
    log_ratio: Tensor
    """logprobs - old_logprobs, not bounded."""
    advantages: Tensor
    lowest: float
    """Lower bound of the ratio."""
    highest: float
    dual_clip: float | None
    sequence_index: Tensor | None
    num_sequences: int | None


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    kind: str = "clip",
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    sequence_index: Tensor | None = None,
    num_sequences: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the policy loss of each token, with A its advantage and rho = exp(logprobs - old_logprobs).

    clip:  -min(rho A, clip(rho) A), and not above -dual_clip A where A < 0.
    gspo:  the same, with the ratio of the whole sequence.
    cispo: -sg[clip(rho)] A logprob; the bounds limit a token's weight, and no token loses its gradient.
    pg:    -A logprob, the plain policy gradient; old_logprobs and the bounds are not read.

    Args:
        logprobs, old_logprobs: one shape; [R] packed tokens for gspo. rho is bounded to exp(+-20).
        advantages:             same shape, constant.
        kind:                   a name in POLICY_LOSSES.
        clip_low, clip_high:    distance of the bounds from ratio 1; for cispo a clip_low of 1 is no lower bound.
        dual_clip:              above 1, or None; clip and gspo only.
        sequence_index:         [R] int64 in [0, num_sequences), the sequence of each token; read by gspo alone, which
                                averages over all tokens that it is given.
        num_sequences:          some may have no token.
    Returns:
        token_loss, is_clipped: same shape; float32 (float64 stays), and bool: a bound cuts off the gradient, or for
                                cispo changes the weight. A NaN in an input that is read gives a NaN loss.
    Raises:
        ValueError: shapes differ, the kind is unknown, dual_clip does not fit, or gspo lacks its sequences.
    """
    if kind not in POLICY_LOSSES:
        raise ValueError(f"kind must be one of {', '.join(POLICY_LOSSES)}, got {kind!r}")
    if dual_clip is not None and not (dual_clip > 1 and kind in ("clip", "gspo")):
        raise ValueError(f"dual_clip must be above 1 and goes with clip and gspo, got {dual_clip} for {kind}")
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = _difference(logprobs, old_logprobs)
    return POLICY_LOSSES[kind](
        PolicyTokens(
            logprobs=logprobs.to(log_ratio.dtype),
            log_ratio=log_ratio,
            advantages=advantages,
            lowest=1 - clip_low,
            highest=1 + clip_high,
            dual_clip=dual_clip,
            sequence_index=sequence_index,
            num_sequences=num_sequences,
        )
    )


def _clip(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Source: Schulman et al. 2017, eq. 7; two bounds as in Yu et al. 2025 (DAPO); dual clip is Ye et al. 2020."""
    advantages = tokens.advantages
    # A NaN advantage must pass through clamp() like a NaN log-prob, else 0 * NaN reaches the gradient of a masked slot.
    ratio = bounded_exp(tokens.log_ratio.masked_fill(~advantages.isfinite(), torch.nan))
    objective = ratio * advantages
    clipped = ratio.clamp(tokens.lowest, tokens.highest) * advantages
    is_clipped, objective = clipped < objective, torch.minimum(objective, clipped)
    if tokens.dual_clip is not None:
        floor = tokens.dual_clip * advantages
        is_floored = (advantages < 0) & (objective < floor)
        is_clipped, objective = is_clipped | is_floored, torch.where(is_floored, floor, objective)
    return -objective, is_clipped


def _gspo(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Clip the sequence's ratio s = exp(mean log-ratio), in the form whose gradient flows through the token.

    The ratio of token t is sg[s] * exp(logprob_t - sg[logprob_t]), of value s. Of the two forms it is the clean one: a
    token's gradient is its own loss's, s A_t, whatever weights and advantages its neighbours have. Where these are the
    same along a sequence, it equals the gradient of s itself, whose 1 / length the sum over the tokens undoes.
    Source: Zheng et al. 2025 (GSPO), section 4.3, GSPO-token.
    """
    index, logprobs = tokens.sequence_index, tokens.logprobs
    if index is None or tokens.num_sequences is None:
        raise ValueError("sequence_index or num_sequences is None: gspo needs the sequence of every token")
    check_same_shape(logprobs=logprobs, sequence_index=index)
    log_ratio = tokens.log_ratio.detach().double()  # so that the order of addition, random on a GPU, does not show
    addends = torch.stack([log_ratio, torch.ones_like(log_ratio)])
    sums, counts = addends.new_zeros(2, tokens.num_sequences).index_add_(1, index, addends)
    mean = (sums / counts)[index]
    return _clip(replace(tokens, log_ratio=mean.to(logprobs.dtype) + (logprobs - logprobs.detach())))


def _cispo(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Source: MiniMax 2025 (MiniMax-M1), eq. 4 and 5, where the lower bound is off."""
    ratio = bounded_exp(tokens.log_ratio.detach())
    weights = ratio.clamp(tokens.lowest, tokens.highest)
    return _weighted_likelihood(weights * tokens.advantages, tokens.logprobs), weights != ratio


def _pg(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Source: Williams 1992 (REINFORCE)."""
    loss = _weighted_likelihood(tokens.advantages, tokens.logprobs)
    return loss, torch.zeros_like(loss, dtype=torch.bool)


def _weighted_likelihood(weights: Tensor, logprobs: Tensor) -> Tensor:
    """Return -weights * logprobs, NaN and without gradient where a weight is not finite."""
    return -weights * logprobs.masked_fill(~weights.isfinite(), torch.nan)


POLICY_LOSSES: dict[str, Callable[[PolicyTokens], tuple[Tensor, Tensor]]] = {
    "clip": _clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "pg": _pg,
}
"""From tokens to their losses, and whether a bound was in the way."""


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
