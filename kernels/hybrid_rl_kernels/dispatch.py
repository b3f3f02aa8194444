"""The public functions, each of which selects Triton or PyTorch by the device and dtype of its tensors.

Shape letters: N packed tokens, n tokens of a slice, H hidden, V vocabulary, B sequences, T response tokens.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_rl_kernels import gae_reference, reference
from hybrid_rl_kernels.gae_reference import Rows
from hybrid_rl_kernels.reference import LogitTransform, check_head_shapes, check_same_shape

SETTING = os.environ.get("HYBRID_RL_KERNELS", "triton")
"""Kernels that compute on a GPU: triton or reference."""
if SETTING not in ("triton", "reference"):
    raise ValueError(f"HYBRID_RL_KERNELS must be triton or reference, got {SETTING!r}")

CONSTANT_BOUND = 2.0**-20
"""Entries whose standard deviation is below this fraction of their mean count as equal; float32 rounds to 2^-22."""


def _is_triton(x: Tensor, *dtypes: torch.dtype) -> bool:
    return x.is_cuda and SETTING == "triton" and x.dtype in dtypes


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the targets and entropies, both [N] float32; see reference.fused_logprobs."""
    function: Callable[..., tuple[Tensor, Tensor]] = reference.fused_logprobs
    if _is_triton(weight, torch.bfloat16, torch.float16):
        from hybrid_rl_kernels.logprobs import fused_logprobs as function  # a CPU needs no Triton
    return function(hidden, weight, targets, temperature, bias, logit_scale=logit_scale, softcap=softcap)


def token_loss_one_pass(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    loss_of_logprobs: Callable[[Tensor, Tensor, slice], Tensor],
    bias: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the tokens' losses, with gradients, and their log-probs and entropies, without gradients.

    On a GPU, with bfloat16 weights and when gradients are needed, one pass over the logits computes the loss and its
    gradients with three matrix products of N, H and V, where fused_logprobs and its backward need four. In all other
    cases fused_logprobs computes the log-probs.

    Args:
        hidden, weight, targets, temperature, bias, logit_scale, softcap: see fused_logprobs.
        loss_of_logprobs: maps log-probs and entropies [n] of the tokens in a slice of [0, N) to their losses. It is
            called once per slice and its results are summed, so the loss of a token must not depend on tokens of other
            slices. Log-probs and entropies of ignored rows are 0, and gradients to them are dropped.
    Returns:
        loss:              float32 scalar; its backward can run once.
        logprobs, entropy: [N] float32, detached.
    Raises:
        ValueError: see fused_logprobs.
    """
    wants_gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    if wants_gradients and _is_triton(weight, torch.bfloat16):
        from hybrid_rl_kernels.token_loss import token_loss

        check_head_shapes(hidden, weight, targets, bias)
        transform = LogitTransform(temperature=temperature, logit_scale=logit_scale, softcap=softcap)
        return token_loss(hidden.to(weight.dtype), weight, bias, targets, transform, loss_of_logprobs)
    logprobs, entropy = fused_logprobs(
        hidden, weight, targets, temperature, bias, logit_scale=logit_scale, softcap=softcap
    )
    loss = loss_of_logprobs(logprobs, entropy, slice(0, len(targets))).sum()
    return loss, logprobs.detach(), entropy.detach()


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """The results of `gae_with_moments`."""

    advantages: Tensor
    """[B, T] or [N] float32, 0 outside the mask."""
    returns: Tensor
    """Advantages + values, 0 outside the mask."""
    moments: Tensor
    """[3] float64: number, mean and sum of squared deviations of the advantages inside the mask."""


@torch.no_grad()
def gae(
    token_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
    bootstrap_values: Tensor | None = None,
    *,
    turn_ends: Tensor | None = None,
    turn_gamma: float = 1.0,
) -> Tensor:
    """Return generalized advantage estimates [B, T]; see reference.gae."""
    scan = _scan_module(token_rewards, values)
    if scan is gae_reference:
        arguments = (token_rewards, values, response_mask, gamma, gae_lambda, bootstrap_values)
        return reference.gae(*arguments, turn_ends=turn_ends, turn_gamma=turn_gamma)
    check_same_shape(token_rewards=token_rewards, values=values, response_mask=response_mask)
    if turn_ends is not None:
        check_same_shape(turn_ends=turn_ends, response_mask=response_mask)
    _check_rows(len(response_mask), gae_lambda=gae_lambda, bootstrap_values=bootstrap_values)
    rows = Rows(
        mask=response_mask,
        values=values,
        token_rewards=token_rewards,
        bootstrap_values=bootstrap_values,
        turn_ends=turn_ends,
        turn_gamma=turn_gamma,
    )
    results = scan.scan(rows, gamma, gae_lambda, has_moments=False, has_returns=False)
    return results[0]


@torch.no_grad()
def gae_with_moments(
    values: Tensor | None,
    response_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    token_rewards: Tensor | None = None,
    scores: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    bootstrap_values: Tensor | None = None,
    turn_ends: Tensor | None = None,
    turn_gamma: float = 1.0,
    cu_seqlens: Tensor | None = None,
) -> Advantages:
    """Return advantages, value targets, and the moments of the advantages that whitening needs.

    The reward of a token is its token_rewards minus kl_coef * kl, plus the score of the row at its last sampled token.
    Without values and with a lambda of 1, the advantages are the discounted returns of REINFORCE++.

    Args:
        values:            [B, T] float32, or [N] with cu_seqlens; None is 0 everywhere.
        response_mask:     same shape, bool or 0 and 1; other tensors of this shape are read inside the mask only.
        gamma, gae_lambda, bootstrap_values, turn_gamma: see reference.gae.
        token_rewards, kl: same shape, float32, or None.
        scores:            [B] float32 or None; not read for rows without tokens.
        kl_coef:           factor on kl.
        turn_ends:         same shape as the mask, or None; see reference.gae.
        cu_seqlens:        [B + 1] int, ascending from 0 to N: the bounds of packed sequences; None for padded input.
    Raises:
        ValueError: shapes do not fit.
    """
    num_rows = len(response_mask) if cu_seqlens is None else len(cu_seqlens) - 1
    if response_mask.dim() != (2 if cu_seqlens is None else 1):
        raise ValueError(f"response_mask must be [B, T], or [N] with cu_seqlens, got {list(response_mask.shape)}")
    per_token = {"values": values, "token_rewards": token_rewards, "kl": kl, "turn_ends": turn_ends}
    check_same_shape(response_mask=response_mask, **{name: x for name, x in per_token.items() if x is not None})
    _check_rows(num_rows, gae_lambda=gae_lambda, bootstrap_values=bootstrap_values, scores=scores)
    scan = _scan_module(response_mask, *(x for x in (values, token_rewards, kl, scores) if x is not None))
    rows = Rows(
        mask=response_mask,
        values=values,
        token_rewards=token_rewards,
        scores=scores,
        kl=kl,
        kl_coef=kl_coef,
        bootstrap_values=bootstrap_values,
        turn_ends=turn_ends,
        turn_gamma=turn_gamma,
        cu_seqlens=cu_seqlens,
    )
    advantages, returns, moments = scan.scan(rows, gamma, gae_lambda, has_moments=True, has_returns=True)
    return Advantages(advantages=advantages, returns=returns, moments=scan.merge_moments(moments))


def merge_moments(moments: Tensor) -> Tensor:
    """Return the moments [3] float64 of the union of K parts, such as ranks, given their moments [K, 3].

    Source: Chan et al. 1979, equation 2.1.
    """
    return _scan_module(moments).merge_moments(moments)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Return x, whitened by its moments [3] to mean 0 and population variance 1, and 0 outside the mask.

    The result is 0 everywhere if all entries are equal or there is only one.
    """
    check_same_shape(x=x, mask=mask)
    return _scan_module(x).whiten(x, mask, moments, CONSTANT_BOUND)


def _scan_module(*tensors: Tensor) -> Any:
    """Return gae_kernels if all tensors are on a GPU and none is float64, else gae_reference."""
    if SETTING == "reference" or any(not x.is_cuda or x.dtype == torch.float64 for x in tensors):
        return gae_reference
    from hybrid_rl_kernels import gae_kernels  # a CPU needs no Triton

    return gae_kernels


def _check_rows(num_rows: int, **per_row: float | Tensor | None) -> None:
    """Raise ValueError unless every tensor of `per_row` is [B]."""
    for name, x in per_row.items():
        if isinstance(x, Tensor) and x.shape != (num_rows,):
            raise ValueError(f"{name} must be [B] with B = {num_rows}, got {list(x.shape)}")
