"""Advantages and their moments in PyTorch, padded or packed; `gae_kernels.py` computes the same on a GPU.

Shape letters: B sequences, T response tokens, N packed tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl_kernels import reference


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Arguments of `dispatch.gae_with_moments`: per token [B, T], or [N] with cu_seqlens, and per row [B]."""

    mask: Tensor
    values: Tensor | None = None
    token_rewards: Tensor | None = None
    scores: Tensor | None = None
    kl: Tensor | None = None
    kl_coef: float = 0.0
    bootstrap_values: Tensor | None = None
    turn_ends: Tensor | None = None
    turn_gamma: float = 1.0
    cu_seqlens: Tensor | None = None

    def padding(self) -> tuple[Tensor, Tensor] | None:
        """Return the packed position of each token [N], and a mask [B, T] of slots that hold tokens; None if padded."""
        if self.cu_seqlens is None:
            return None
        lengths = self.cu_seqlens.diff()
        place = torch.arange(int(lengths.max()) if len(lengths) else 0, device=self.mask.device)
        is_token = place < lengths[:, None]
        return (self.cu_seqlens[:-1, None] + place)[is_token], is_token


def _pad(x: Tensor, padding: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return packed tokens [N] as [B, T]; padded input is returned unchanged."""
    if padding is None:
        return x
    tokens, is_token = padding
    result = x.new_zeros(is_token.shape)
    result[is_token] = x[tokens]
    return result


def _pack(x: Tensor, padding: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return padded values [B, T] of packed tokens as [N]; the inverse of _pad."""
    return x if padding is None else x[padding[1]]


def scan(
    rows: Rows, gamma: float, gae_lambda: float | Tensor, *, has_moments: bool, has_returns: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return advantages, returns (or None) and moments [B, 3] of each row (or None); the inputs must be checked."""
    padding = rows.padding()
    mask = _pad(rows.mask.bool(), padding)

    def selected(x: Tensor | None) -> Tensor:
        return torch.zeros(mask.shape, device=mask.device) if x is None else torch.where(mask, _pad(x, padding), 0)

    rewards, values = selected(rows.token_rewards) - rows.kl_coef * selected(rows.kl), selected(rows.values)
    if rows.scores is not None:
        is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        rewards = rewards + torch.where(is_last, rows.scores[:, None], 0)
    turn_ends = None if rows.turn_ends is None else _pad(rows.turn_ends, padding)
    advantages = reference.gae(
        rewards,
        values,
        mask,
        gamma,
        gae_lambda,
        rows.bootstrap_values,
        turn_ends=turn_ends,
        turn_gamma=rows.turn_gamma,
    )
    moments = _row_moments(advantages, mask) if has_moments else None
    returns = _pack(torch.where(mask, advantages + values, 0), padding) if has_returns else None
    return _pack(advantages, padding), returns, moments


def _row_moments(x: Tensor, mask: Tensor) -> Tensor:
    """Return number, mean and sum of squared deviations [B, 3] of the entries inside the mask, for each row."""
    count = mask.sum(1)
    mean = x.sum(1) / count.clamp_min(1)
    deviation = torch.where(mask, x - mean[:, None], 0)
    return torch.stack([count.to(x.dtype), mean, deviation.square().sum(1)], dim=1)


def merge_moments(moments: Tensor) -> Tensor:
    """Return the moments [3] float64 of the union of K parts, given their moments [K, 3]. Source: Chan et al. 1979."""
    counts, means, squares = moments.double().unbind(1)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp_min(1)
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum()])


def whiten(x: Tensor, mask: Tensor, moments: Tensor, bound: float) -> Tensor:
    """Return x whitened by moments [3] float64; 0 outside the mask, or everywhere if std <= bound * |mean|."""
    count, mean, squares = moments.unbind()
    deviation = (squares / count.clamp_min(1)).sqrt()
    factor = torch.where(deviation <= bound * mean.abs(), 0, 1 / deviation)
    return torch.where(mask.bool(), (x - mean.to(x.dtype)) * factor.to(x.dtype), 0)
