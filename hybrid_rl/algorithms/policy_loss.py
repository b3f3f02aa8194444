"""Losses of the actor: each name in specs.POLICY_LOSSES is a function of this module.

Pure functions of tensors. All but gspo are elementwise and take padded or packed tokens; gspo reads whole sequences and
takes packed tokens. `elementwise.py` says how NaN and inf in masked slots stay out of gradients.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybrid_rl.algorithms.elementwise import bounded_exp, difference
from hybrid_rl.algorithms.specs import POLICY_LOSSES
from hybrid_rl_kernels.reference import check_same_shape


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """What a policy loss reads of some tokens; see `policy_loss` for shapes."""

    logprobs: Tensor
    """At least float32, like log_ratio."""
    log_ratio: Tensor
    """logprobs - old_logprobs, not bounded."""
    advantages: Tensor
    lowest: float
    """Lower bound of the ratio."""
    highest: float
    """Upper bound of the ratio."""
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
    if dual_clip is not None and not (dual_clip > 1 and POLICY_LOSSES[kind].takes_dual_clip):
        names = " and ".join(name for name, spec in POLICY_LOSSES.items() if spec.takes_dual_clip)
        raise ValueError(f"dual_clip must be above 1 and goes with {names}, got {dual_clip} for {kind}")
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = difference(logprobs, old_logprobs)
    tokens = PolicyTokens(
        logprobs=logprobs.to(log_ratio.dtype),
        log_ratio=log_ratio,
        advantages=advantages,
        lowest=1 - clip_low,
        highest=1 + clip_high,
        dual_clip=dual_clip,
        sequence_index=sequence_index,
        num_sequences=num_sequences,
    )
    token_loss, is_clipped = globals()[kind](tokens)
    return token_loss, is_clipped


def clip(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Return the clipped objective of PPO.

    Source: Schulman et al. 2017, eq. 7; two bounds as in Yu et al. 2025 (DAPO); dual clip is Ye et al. 2020.
    """
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


def gspo(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Return the clipped objective with the ratio of the sequence, s = exp(mean log-ratio); gradients flow per token.

    The ratio of token t is sg[s] * exp(logprob_t - sg[logprob_t]), whose value is s. The gradient of a token's loss is
    s A_t whatever weights and advantages its neighbours have. Where these are equal along a sequence, the sum over its
    tokens has the gradient of s itself.
    Source: Zheng et al. 2025 (GSPO), section 4.3, GSPO-token.
    """
    index, logprobs = tokens.sequence_index, tokens.logprobs
    if index is None or tokens.num_sequences is None:
        raise ValueError("sequence_index or num_sequences is None: gspo needs the sequence of every token")
    check_same_shape(logprobs=logprobs, sequence_index=index)
    log_ratio = tokens.log_ratio.detach().double()  # float64 hides the order of addition, which is random on a GPU
    addends = torch.stack([log_ratio, torch.ones_like(log_ratio)])
    sums, counts = addends.new_zeros(2, tokens.num_sequences).index_add_(1, index, addends)
    mean = (sums / counts)[index]
    return clip(replace(tokens, log_ratio=mean.to(logprobs.dtype) + (logprobs - logprobs.detach())))


def cispo(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Return the likelihood weighted by the clipped ratio. Source: MiniMax 2025 (MiniMax-M1), eq. 4 and 5."""
    ratio = bounded_exp(tokens.log_ratio.detach())
    weights = ratio.clamp(tokens.lowest, tokens.highest)
    return _weighted_likelihood(weights * tokens.advantages, tokens.logprobs), weights != ratio


def pg(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """Return the likelihood weighted by the advantage. Source: Williams 1992 (REINFORCE)."""
    loss = _weighted_likelihood(tokens.advantages, tokens.logprobs)
    return loss, torch.zeros_like(loss, dtype=torch.bool)


def _weighted_likelihood(weights: Tensor, logprobs: Tensor) -> Tensor:
    """Return -weights * logprobs, NaN and without gradient where a weight is not finite."""
    return -weights * logprobs.masked_fill(~weights.isfinite(), torch.nan)
