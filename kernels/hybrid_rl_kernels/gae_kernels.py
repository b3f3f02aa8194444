"""Triton kernels for generalized advantage estimates, computed as one reverse scan; see reference.gae.

    A_t = b_t + a_t A_u,  a_t = g_t lambda,  b_t = r_t + g_t V_u - V_t,  u the sampled token after t

is a chain of affine maps, which compose associatively. One program processes a row in blocks of tokens, from its end; a
row is one of a padded [B, T] or one of the sequences of packed [N] tokens. The map of a slot that is not sampled is the
identity.

A thread holds eight consecutive tokens, so that a block consists of eight tensors [C]. Most of the chain is then plain
arithmetic, and only one map per thread takes part in the scan, which exchanges values between lanes.

Whitening needs number, mean and sum of squared deviations of the advantages. The same pass computes them for each row;
they are merged over rows and ranks (Chan et al. 1979) without the cancellation of sums of squares.
"""

# A kernel is compiled for the types of its arguments, extends tuples, and does not support `*tuple`.
# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rl_kernels.gae_reference import Rows

MAX_BLOCK = 512
"""Largest number of tokens of a block, eight per thread; measured by profiling/bench_kernels.py on an H200."""


@triton.jit
def _compose(late_decay, late_sum, early_decay, early_sum):
    """Return the composed map of a range of tokens, given the maps of its later and its earlier part."""
    return early_decay * late_decay, early_decay * late_sum + early_sum


@triton.jit
def _chain(decays, sums, into):
    """Return the input and the result of each of C maps, each of which is applied to the result of its predecessor.

    into is the input of the first map.
    """
    places = tl.arange(0, sums.shape[0])
    is_first = places == 0
    decays = decays + tl.zeros_like(sums)
    _, results = tl.associative_scan((decays, tl.where(is_first, sums + decays * into, sums)), 0, _compose)
    return tl.where(is_first, into, tl.gather(results, tl.maximum(places - 1, 0), 0)), results


@triton.jit
def _at_end(x):
    """Return the last entry of x [C]."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == x.shape[0] - 1, x, 0.0), axis=0)


@triton.jit
def _columns(x):
    """Return the four columns [C] of x [C, 4], which a thread holds in registers."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _matrix(x0, x1, x2, x3):
    """Return the matrix [C, 4] of four columns [C]."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (x0.shape[0], 4))


@triton.jit
def _load(ptr, first, place, length):
    """Return the values of a row at places [C] and at the seven after each, as eight [C]; 0 beyond its length."""
    place = place[:, None] + tl.arange(0, 4)[None, :]
    low = tl.load(ptr + first + place, mask=place < length, other=0)
    high = tl.load(ptr + first + place + 4, mask=place + 4 < length, other=0)
    return _columns(low) + _columns(high)


@triton.jit
def _store(ptr, first, place, length, x):
    """Store eight [C] at the places that _load reads."""
    place = place[:, None] + tl.arange(0, 4)[None, :]
    tl.store(ptr + first + place, _matrix(x[0], x[1], x[2], x[3]), mask=place < length)
    tl.store(ptr + first + place + 4, _matrix(x[4], x[5], x[6], x[7]), mask=place + 4 < length)


@triton.jit
def _is_set(x):
    """Return a mask of the nonzero entries, eight [C]."""
    result = ()
    for k in tl.static_range(8):
        result = result + (x[k] != 0,)
    return result


@triton.jit
def _add(x, y, factor):
    """Return x + y * factor, for eight [C] each."""
    result = ()
    for k in tl.static_range(8):
        result = result + (x[k] + y[k] * factor,)
    return result


@triton.jit
def _add_at(last, place, x, ptr, row, factor):
    """Return x, eight [C], with factor times the row's entry of a tensor [B] added at the place `last` only.

    The product is selected, not multiplied by 0, because the entries of rows without tokens may be NaN.
    """
    if ptr is None:
        result = x
    else:
        result, added = (), tl.load(ptr + row).to(tl.float32) * factor
        for k in tl.static_range(8):
            result = result + (x[k] + tl.where(place + k == last, added, 0.0),)
    return result


@triton.jit
def _select(is_chosen, x):
    """Return x in float32 where is_chosen, both eight [C], and 0 elsewhere, where x may be NaN."""
    result = ()
    for k in tl.static_range(8):
        result = result + (tl.where(is_chosen[k], x[k].to(tl.float32), 0.0),)
    return result


@triton.jit
def _load_selected(ptr, first, place, length, is_chosen):
    """Return the chosen entries of a row, see _select; 0 everywhere if there is no tensor."""
    if ptr is None:
        zeros = tl.zeros_like(place).to(tl.float32)
        result = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    else:
        result = _select(is_chosen, _load(ptr, first, place, length))
    return result


@triton.jit
def _row_bounds(ends_ptr, row, row_length):
    """Return the first slot and the length of a row."""
    if ends_ptr is None:
        first, length = row.to(tl.int64) * row_length, row_length
    else:
        first = tl.load(ends_ptr + row).to(tl.int64)
        length = (tl.load(ends_ptr + row + 1).to(tl.int64) - first).to(tl.int32)
    return first, length


@triton.jit
def _last_sampled(is_sampled, place):
    """Return the last place of a block whose token is sampled; -1 if there is none."""
    last = tl.zeros_like(place) - 1
    for k in tl.static_range(8):
        last = tl.where(is_sampled[k], place + k, last)
    return tl.max(last, axis=0)


@triton.jit
def _values_behind(values_ptr, is_sampled, values, later_value):
    """Return the value of the next sampled token after each eight tokens, [C], and of the first one in the block.

    later_value is the value of the first sampled token after the block, 0 if there is none.
    """
    if values_ptr is None:
        behind = tl.zeros(values[0].shape, tl.float32)
    else:
        has_none, value = tl.full(values[0].shape, 1.0, tl.float32), tl.zeros(values[0].shape, tl.float32)
        for k in tl.static_range(7, -1, -1):
            has_none = tl.where(is_sampled[k], 0.0, has_none)
            value = tl.where(is_sampled[k], values[k], value)
        behind, values_at = _chain(has_none, value, later_value)
        later_value = _at_end(values_at)
    return behind, later_value


@triton.jit
def _turn_factors(turn_ends_ptr, first, place, length, turn_gamma):
    """Return the factor on the discount of eight tokens [C] each: turn_gamma where a turn ends, 1 elsewhere."""
    ones = tl.full(place.shape, 1.0, tl.float32)
    if turn_ends_ptr is None:
        result = (ones, ones, ones, ones, ones, ones, ones, ones)
    else:
        result, is_end = (), _is_set(_load(turn_ends_ptr, first, place, length))
        for k in tl.static_range(8):
            result = result + (tl.where(is_end[k], turn_gamma, ones),)
    return result


@triton.jit
def _stretches(rewards, values, is_sampled, factors, behind, gamma, decay):
    """Return (sums, decays), eight [C] each: the composed map of each token and of those after it among its eight."""
    total, reach, sums, reaches = tl.zeros_like(behind), tl.full(behind.shape, 1.0, tl.float32), (), ()
    for k in tl.static_range(7, -1, -1):
        error = rewards[k] + gamma * factors[k] * behind - values[k]
        step = decay * factors[k]
        total = tl.where(is_sampled[k], error + step * total, total)
        reach = tl.where(is_sampled[k], step * reach, reach)
        behind = tl.where(is_sampled[k], values[k], behind)
        sums, reaches = (total,) + sums, (reach,) + reaches
    return sums, reaches


@triton.jit
def _add_moments(x, is_counted, count, mean, squares):
    """Return number, mean and squared deviations [C], updated by eight more [C]; x is 0 where it is not counted."""
    own_count, total = is_counted[0].to(tl.float32), x[0]
    for k in tl.static_range(1, 8):
        own_count += is_counted[k].to(tl.float32)
        total += x[k]
    own_mean = total / tl.maximum(own_count, 1.0)
    own_squares = tl.zeros_like(total)
    for k in tl.static_range(8):
        deviation = tl.where(is_counted[k], x[k] - own_mean, 0.0)
        own_squares += deviation * deviation
    # Chan et al. 1979, equation 2.1.
    new_count = count + own_count
    share, difference = own_count / tl.maximum(new_count, 1.0), own_mean - mean
    squares += own_squares + difference * difference * count * share
    return new_count, mean + difference * share, squares


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def hybrid_rl_gae_kernel(
    advantages_ptr, returns_ptr, moments_ptr, rewards_ptr, values_ptr, mask_ptr, bootstrap_ptr, scores_ptr, kl_ptr,
    turn_ends_ptr, decay_ptr, ends_ptr, row_length, gamma, decay, kl_coef, turn_gamma, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the advantages of one row, and returns and moments if they have a pointer; see dispatch.gae_with_moments.

    ends_ptr [B + 1] holds the bounds of packed rows; without it, every row has row_length slots. moments_ptr is [B, 3].
    """
    row = tl.program_id(0)
    first, length = _row_bounds(ends_ptr, row, row_length)
    if decay_ptr is not None:
        decay = tl.load(decay_ptr + row)
    later_advantage, later_value, last = 0.0, 0.0, tl.full([], -1, tl.int32)
    eights = tl.arange(0, BLOCK // 8)
    count = tl.zeros([BLOCK // 8], tl.float32)
    mean, squares = count, count
    for step in range(0, tl.cdiv(length, BLOCK)):
        start = (tl.cdiv(length, BLOCK) - 1 - step) * BLOCK
        place = start + BLOCK - 8 - 8 * eights  # reversed, because a reverse scan exchanges values between lanes
        is_sampled = _is_set(_load(mask_ptr, first, place, length))
        values = _load_selected(values_ptr, first, place, length, is_sampled)
        rewards = _load_selected(rewards_ptr, first, place, length, is_sampled)
        if kl_ptr is not None:
            rewards = _add(rewards, _load_selected(kl_ptr, first, place, length, is_sampled), -kl_coef)
        if last < 0 and (scores_ptr is not None or bootstrap_ptr is not None):
            last = _last_sampled(is_sampled, place)
        rewards = _add_at(last, place, rewards, scores_ptr, row, 1.0)
        rewards = _add_at(last, place, rewards, bootstrap_ptr, row, gamma)
        behind, later_value = _values_behind(values_ptr, is_sampled, values, later_value)
        factors = _turn_factors(turn_ends_ptr, first, place, length, turn_gamma)
        sums, reaches = _stretches(rewards, values, is_sampled, factors, behind, gamma, decay)
        into, results = _chain(reaches[0], sums[0], later_advantage)
        if start > 0:  # _at_end synchronizes all warps, and the last block does not need its result
            later_advantage = _at_end(results)
        advantages = _select(is_sampled, _add(sums, reaches, into))
        _store(advantages_ptr, first, place, length, advantages)
        if returns_ptr is not None:
            _store(returns_ptr, first, place, length, _add(advantages, values, 1.0))
        if moments_ptr is not None:
            count, mean, squares = _add_moments(advantages, is_sampled, count, mean, squares)
    if moments_ptr is not None:
        total_count, total = tl.reduce((count, count * mean), 0, _add_both)
        row_mean = total / tl.maximum(total_count, 1.0)
        deviation = mean - row_mean
        _store_moments(moments_ptr + 3 * row, total_count, row_mean, tl.sum(squares + count * deviation * deviation, 0))


@triton.jit
def _store_moments(ptr, count, mean, squares):
    """Store number, mean and sum of squared deviations."""
    tl.store(ptr, count)
    tl.store(ptr + 1, mean)
    tl.store(ptr + 2, squares)


@triton.jit
def hybrid_rl_moments_kernel(moments_ptr, merged_ptr, num_parts, BLOCK: tl.constexpr):
    """Merge moments [K, 3] into [3] float64 in one program."""
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
    """Store (x - mean) / deviation; 0 outside the mask, or everywhere if the deviation is at most bound * |mean|."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < num_elements
    mean = tl.load(moments_ptr + 1)
    deviation = tl.sqrt(tl.load(moments_ptr + 2) / tl.maximum(tl.load(moments_ptr), 1.0))
    factor = tl.where(deviation <= bound * tl.abs(mean), 0.0, 1 / deviation).to(tl.float32)
    is_counted = tl.load(mask_ptr + place, mask=is_inside, other=0) != 0
    x = tl.load(x_ptr + place, mask=is_inside, other=0)
    tl.store(out_ptr + place, tl.where(is_counted, (x - mean.to(tl.float32)) * factor, 0.0), mask=is_inside)


def scan(
    rows: Rows, gamma: float, gae_lambda: float | Tensor, *, has_moments: bool, has_returns: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return advantages, returns (or None) and moments [B, 3] of each row (or None); the inputs must be checked."""
    mask = rows.mask.bool().contiguous()
    longest = mask.shape[-1]
    num_rows = len(mask) if rows.cu_seqlens is None else len(rows.cu_seqlens) - 1
    turn_ends = None if rows.turn_ends is None else rows.turn_ends.bool()
    inputs = (rows.token_rewards, rows.values, mask, rows.bootstrap_values, rows.scores, rows.kl, turn_ends)
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
        rows.turn_gamma,
        BLOCK=block,
        num_warps=max(block // 256, 1),
    )
    return advantages, returns, moments


def merge_moments(moments: Tensor) -> Tensor:
    """Return the moments [3] float64 of the union of K parts, given their moments [K, 3]."""
    merged = torch.empty(3, dtype=torch.float64, device=moments.device)
    block = min(max(triton.next_power_of_2(len(moments)), 32), 8192)  # a large block: one program does all iterations
    hybrid_rl_moments_kernel[(1,)](
        moments.contiguous(), merged, len(moments), BLOCK=block, num_warps=min(max(block // 128, 1), 32)
    )
    return merged


def whiten(x: Tensor, mask: Tensor, moments: Tensor, bound: float) -> Tensor:
    """Return x whitened by moments [3] float64; 0 outside the mask, or everywhere if std <= bound * |mean|."""
    x, mask, block = x.contiguous(), mask.bool().contiguous(), 2048
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), block),)
        hybrid_rl_whiten_kernel[grid](x, mask, moments, out, x.numel(), bound, BLOCK=block, num_warps=8)
    return out
