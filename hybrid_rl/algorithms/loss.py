"""The critic's loss, and how the losses of tokens become one number. Pure functions of tensors."""

import torch
from torch import Tensor

from hybrid_rl.algorithms.elementwise import difference, half_square
from hybrid_rl_kernels.reference import check_same_shape


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
    loss = half_square(difference(values, returns))
    if value_clip is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    change = difference(values, old_values)
    clipped_values = old_values + change.clamp(-value_clip, value_clip)
    clipped_loss = half_square(difference(clipped_values, returns))
    # Within the bound, old_values + change may differ from values by rounding, which does not count as clipped.
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

    Where the normalisers count the whole optimizer step on all ranks, the aggregates of its parts add up to the whole.

    Args:
        response_mask:       [B, T] bool.
        mode:                token_mean: mean over all tokens. sequence_mean: mean over the sequences of their token
                             means. sequence_sum_constant: sum / (num_sequences * max_response_tokens).
        num_tokens:          tokens in the step; None counts the mask.
        num_sequences:       sequences with at least one token in the step; None counts the mask's rows.
        max_response_tokens: limit of a response; None takes the longest of the mask.
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
    return torch.where(mask, mask / denominator, 0).float()  # a row without tokens is 0 / 0


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
        response_mask: [B, T] bool; a masked slot adds nothing to value and gradient, even NaN.
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
