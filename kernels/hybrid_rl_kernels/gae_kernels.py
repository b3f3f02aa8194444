"""Generalized advantage estimates as one reverse scan on a GPU; see reference.gae for what they are.

    A_t = b_t + a_t A_{t+1},  a_t = gamma lambda,  b_t = r_t + gamma V_{t+1} - V_t

is a chain of affine maps, and these compose associatively. One program walks a row from its end in blocks of tokens;
rows are those of a padded [B, T] or the sequences of packed [N] tokens. Slots that are no states are the identity.

Whitening needs number, mean and sum of squared deviations of the advantages. Each row's come from the same pass, and
merge over rows and ranks (Chan et al. 1979) without the cancellation of sums of squares.
"""

# A kernel is compiled for whatever types it is given.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rl_kernels.gae_reference import Mode, Rows

# Measured by `profiling/bench_kernels.py --sweep` on an H200, November 2026; within 2 % all from 512 to 4096 do.
MAX_BLOCK = 2048
ELEMENTS_PER_THREAD = 8

_NONE = tl.constexpr(2**31 - 1)  # index of a token that does not exist


@triton.jit
def _compose(late_decay, late_sum, early_decay, early_sum):
    """Return the map of a stretch of tokens from those of its later and its earlier part."""
    return early_decay * late_decay, early_decay * late_sum + early_sum


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _merge_moments(count, mean, squares, other_count, other_mean, other_squares):
    """Return number, mean and sum of squared deviations of two sets together."""
    total = count + other_count
    share = other_count / tl.maximum(total, 1.0)
    difference = other_mean - mean
    return total, mean + difference * share, squares + other_squares + difference * difference * count * share


@triton.jit
def _load(ptr, slots, is_inside, is_chosen):
    """Return what a tensor holds in the chosen slots, 0 elsewhere and without a tensor.

    Selected after a load of all, since whole vectors load faster than what a mask leaves of them.
    """
    if ptr is None:
        x = tl.where(is_chosen, 0.0, 0.0)
    else:
        x = tl.where(is_chosen, tl.load(ptr + slots, mask=is_inside, other=0).to(tl.float32), 0.0)
    return x


@triton.jit
def _row_bounds(ends_ptr, row, row_length):
    """Return first slot and length of a row."""
    if ends_ptr is None:
        first, length = row.to(tl.int64) * row_length, row_length
    else:
        first = tl.load(ends_ptr + row).to(tl.int64)
        length = (tl.load(ends_ptr + row + 1).to(tl.int64) - first).to(tl.int32)
    return first, length


@triton.jit
def _following(mask_ptr, first, place, length, next_sampled, IS_CARRY: tl.constexpr):
    """Return the place of the state after each one, and whether a sampled token is there."""
    is_after = tl.load(mask_ptr + first + place + 1, mask=place + 1 < length, other=0) != 0
    following = place + 1
    if IS_CARRY:
        following = tl.where(is_after, following, _NONE)
        following = tl.minimum(tl.associative_scan(following, 0, _least, reverse=True), next_sampled)
        is_after = following != _NONE
    return following, is_after


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _moments(x, is_counted):
    """Return number, mean and sum of squared deviations of one block."""
    count, total = tl.reduce((is_counted.to(tl.float32), x), 0, _add_both)
    mean = total / tl.maximum(count, 1.0)
    deviation = tl.where(is_counted, x - mean, 0.0)
    return count, mean, tl.sum(deviation * deviation, axis=0)


@triton.jit
def hybrid_rl_gae_kernel(
    advantages_ptr, returns_ptr, moments_ptr, rewards_ptr, values_ptr, mask_ptr, bootstrap_ptr, scores_ptr, kl_ptr,
    decay_ptr, ends_ptr, row_length, gamma, decay, kl_coef,
    IS_CARRY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the advantages of one row, and what else has a pointer; see dispatch.gae_with_moments.

    ends_ptr [B + 1] bounds the rows of packed tokens; without it all have row_length. moments_ptr is [B, 3].
    """
    row = tl.program_id(0)
    first, length = _row_bounds(ends_ptr, row, row_length)
    if decay_ptr is not None:
        decay = tl.load(decay_ptr + row)
    last, next_sampled = tl.full([], -1, tl.int32), tl.full([], _NONE, tl.int32)
    next_advantage = tl.full([], 0.0, tl.float32)
    count, mean, squares = next_advantage, next_advantage, next_advantage
    for step in range(0, tl.cdiv(length, BLOCK)):
        start = (tl.cdiv(length, BLOCK) - 1 - step) * BLOCK
        place = start + tl.arange(0, BLOCK)
        slots = first + place
        is_inside = place < length
        is_sampled = tl.load(mask_ptr + slots, mask=is_inside, other=0) != 0
        if last < 0:  # the last sampled token of the row, from which on there are states
            last = tl.max(tl.where(is_sampled, place, -1), axis=0)
        following, is_after = _following(mask_ptr, first, place, length, next_sampled, IS_CARRY)
        if IS_CARRY:
            next_sampled = tl.minimum(next_sampled, tl.min(tl.where(is_sampled, place, _NONE), axis=0))
        value = _load(values_ptr, slots, is_inside, is_sampled)
        next_value = _load(values_ptr, first + following, is_after, is_after)
        reward = _load(rewards_ptr, slots, is_inside, is_sampled) - kl_coef * _load(
            kl_ptr, slots, is_inside, is_sampled
        )
        # A row's bootstrap value and score are read at its last token alone: rows without tokens may hold NaN.
        is_last, same_row = place == last, row + place * 0
        next_value += _load(bootstrap_ptr, same_row, is_last, is_last)
        reward += _load(scores_ptr, same_row, is_last, is_last)
        is_state = is_sampled if IS_CARRY else place <= last
        own_decay = tl.where(is_state, decay, 1.0)
        own_sum = tl.where(is_state, reward + gamma * next_value - value, 0.0)
        total_decay, total = tl.associative_scan((own_decay, own_sum), 0, _compose, reverse=True)
        advantage = total + total_decay * next_advantage
        if start > 0:  # a reduction waits for all warps: none where the row ends
            next_advantage = tl.sum(tl.where(place == start, advantage, 0.0), axis=0)
        advantage = tl.where(is_sampled, advantage, 0.0)
        tl.store(advantages_ptr + slots, advantage, mask=is_inside)
        if returns_ptr is not None:
            tl.store(returns_ptr + slots, advantage + value, mask=is_inside)
        if moments_ptr is not None:
            own_count, own_mean, own_squares = _moments(advantage, is_sampled)
            count, mean, squares = _merge_moments(count, mean, squares, own_count, own_mean, own_squares)
    if moments_ptr is not None:
        _store_moments(moments_ptr + 3 * row, count, mean, squares)


@triton.jit
def _store_moments(ptr, count, mean, squares):
    """Write number, mean and sum of squared deviations."""
    tl.store(ptr, count)
    tl.store(ptr + 1, mean)
    tl.store(ptr + 2, squares)


@triton.jit
def hybrid_rl_moments_kernel(moments_ptr, merged_ptr, num_parts, BLOCK: tl.constexpr):
    """Merge moments [K, 3] into [3] float64; one program."""
    count, total = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for start in range(0, num_parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        own = tl.load(moments_ptr + 3 * part, mask=part < num_parts, other=0).to(tl.float64)
        count += own
        total += own * tl.load(moments_ptr + 3 * part + 1, mask=part < num_parts, other=0).to(tl.float64)
    all_count = tl.sum(count, axis=0)
    mean = tl.sum(total, axis=0) / tl.maximum(all_count, 1.0)
    squares = tl.zeros([BLOCK], tl.float64)
    for start in range(0, num_parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        own = tl.load(moments_ptr + 3 * part, mask=part < num_parts, other=0).to(tl.float64)
        distance = tl.load(moments_ptr + 3 * part + 1, mask=part < num_parts, other=0).to(tl.float64) - mean
        squares += tl.load(moments_ptr + 3 * part + 2, mask=part < num_parts, other=0).to(tl.float64)
        squares += own * distance * distance
    _store_moments(merged_ptr, all_count, mean, tl.sum(squares, axis=0))


@triton.jit
def hybrid_rl_whiten_kernel(x_ptr, mask_ptr, moments_ptr, out_ptr, num_elements, bound, BLOCK: tl.constexpr):
    """Write (x - mean) / deviation, 0 outside the mask or where the deviation is less than bound * |mean|."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < num_elements
    mean = tl.load(moments_ptr + 1)
    deviation = tl.sqrt(tl.load(moments_ptr + 2) / tl.maximum(tl.load(moments_ptr), 1.0))
    factor = tl.where(deviation <= bound * tl.abs(mean), 0.0, 1 / deviation).to(tl.float32)
    is_counted = tl.load(mask_ptr + place, mask=is_inside, other=0) != 0
    x = tl.load(x_ptr + place, mask=is_inside, other=0)
    tl.store(out_ptr + place, tl.where(is_counted, (x - mean.to(tl.float32)) * factor, 0.0), mask=is_inside)


def scan(
    rows: Rows, gamma: float, gae_lambda: float | Tensor, mode: Mode, *, has_moments: bool, has_returns: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return advantages, returns and moments [B, 3] of each row (or None) of inputs that are checked."""
    mask = rows.mask.bool().contiguous()
    longest = mask.shape[-1]
    num_rows = len(mask) if rows.cu_seqlens is None else len(rows.cu_seqlens) - 1
    inputs = (rows.token_rewards, rows.values, mask, rows.bootstrap_values, rows.scores, rows.kl)
    decay = None
    if isinstance(gae_lambda, Tensor):
        decay, gae_lambda = (gamma * gae_lambda.double()).float().contiguous(), 0.0
    advantages = torch.empty(mask.shape, dtype=torch.float32, device=mask.device)
    returns = torch.empty_like(advantages) if has_returns else None
    moments = advantages.new_empty((num_rows, 3)) if has_moments else None
    if not mask.numel():
        return advantages, returns, None if moments is None else moments.zero_()
    block = min(max(triton.next_power_of_2(longest), 32), MAX_BLOCK)
    hybrid_rl_gae_kernel[(num_rows,)](
        advantages,
        returns,
        moments,
        *(None if x is None else x.contiguous() for x in inputs),
        decay,
        None if rows.cu_seqlens is None else rows.cu_seqlens.contiguous(),
        longest,
        gamma,
        gamma * gae_lambda,
        rows.kl_coef,
        IS_CARRY=mode == "carry",
        BLOCK=block,
        num_warps=min(max(block // (32 * ELEMENTS_PER_THREAD), 1), 16),
    )
    return advantages, returns, moments


def merge_moments(moments: Tensor) -> Tensor:
    """Return the moments [3] float64 of all parts [K, 3] together."""
    merged = torch.empty(3, dtype=torch.float64, device=moments.device)
    block = min(max(triton.next_power_of_2(len(moments)), 32), 8192)  # one program: the fewer turns, the sooner it ends
    hybrid_rl_moments_kernel[(1,)](
        moments.contiguous(), merged, len(moments), BLOCK=block, num_warps=min(max(block // 128, 1), 32)
    )
    return merged


def whiten(x: Tensor, mask: Tensor, moments: Tensor, bound: float) -> Tensor:
    """Return x whitened by moments [3] float64, 0 outside the mask and where the deviation is below bound * |mean|."""
    x, mask, block = x.contiguous(), mask.bool().contiguous(), 2048
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), block),)
        hybrid_rl_whiten_kernel[grid](x, mask, moments, out, x.numel(), bound, BLOCK=block, num_warps=8)
    return out
