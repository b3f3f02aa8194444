"""Triton kernels that process logits one tile at a time; `logit_passes.py` and `token_loss.py` launch them.

Shape letters: n rows of one launch, H hidden, V columns of one launch (words of the vocabulary, or a slice of them).
Inside the kernels, z is the transformed logits (see reference.LogitTransform) times log2(e), so that the hardware's
exp2 needs no further product.

The softmax of a row is represented by four float32 numbers, its *state*:
    m = max z,  s = sum 2^(z - m),  e = sum 2^(z - m) (z - m),  t = z of the target, or the logit that scales to it
from which, in nats, log-prob = (t - m) ln 2 - ln s and entropy = ln s - e / s ln 2. With z - m in e, both terms of the
entropy are small and no large numbers cancel.
"""

# A kernel is compiled for the types of its arguments.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

STATS, NUMERATORS, GRADIENT = 0, 1, 2
"""Modes of a pass: update the states of the rows; do so and store numerators 2^(z - reference); store gradients."""

MAX_EXPONENT = 60.0
"""Numerators are at most 2^60, so with 2^17 words the scale of a row is at least 2^-77, within bfloat16's range."""

_STATS = tl.constexpr(STATS)
_NUMERATORS = tl.constexpr(NUMERATORS)
_GRADIENT = tl.constexpr(GRADIENT)
_MAX_EXPONENT = tl.constexpr(MAX_EXPONENT)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-1e30)  # replaces -inf: 2^-1e30 is 0, and 0 * -1e30 is 0 instead of NaN

# Triton would compile a kernel anew if one of these became 1 or divisible by 16, in the middle of a training run.
_VARYING = ["num_rows", "stride", "first_column", "tiles_per_split", "num_splits"]


@triton.jit
def _transform(
    logits, bias_ptr, columns, num_columns, scale, steepness, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr
):
    """Return x and f with z = x * f, where z = logits * scale, or cap * tanh(logits * steepness / (2 log2 e)).

    The product with f is left to the caller, where it is fused into a subtraction.
    """
    if HAS_BIAS:
        logits += tl.load(bias_ptr + columns, mask=columns < num_columns, other=0).to(tl.float32)[None, :]
        logits = tl.where(logits < _LOWEST, _LOWEST, logits)  # a bias of -inf forbids a word; NaN stays
    if HAS_CAP:
        logits = cap * (1 - 2 / (1 + tl.exp2(logits * steepness)))  # tanh x = 1 - 2 / (1 + e^2x)
        scale = 1.0
    return logits, scale


@triton.jit
def _no_state(BLOCK_ROWS: tl.constexpr):
    """Return the initial states m, s, e, t of rows."""
    zeros = tl.zeros([BLOCK_ROWS], tl.float32)
    return zeros + _LOWEST, zeros, zeros, zeros


@triton.jit
def _advance(x, f, m, s, e):
    """Return m, s and e, updated with one more tile of z = x * f, and 2^(z - m) of the tile with the new m."""
    new_m = tl.maximum(m, tl.max(x, axis=1) * f)
    rise = m - new_m
    decay = tl.exp2(rise)
    distance = x * f - new_m[:, None]
    share = tl.exp2(distance)
    e = decay * (e + s * rise) + tl.sum(share * distance, axis=1)
    s = decay * s + tl.sum(share, axis=1)
    return new_m, s, e, share


@triton.jit
def _numerators(share, m, reference):
    """Return numerators 2^(z - r), and r: `reference`, or m where m exceeds it by more than MAX_EXPONENT."""
    reference = tl.where(m > reference + _MAX_EXPONENT, m, reference)
    return share * tl.exp2(m - reference)[:, None], reference


@triton.jit
def _gradient(x, f, lse, entropy, grad, grad_entropy, cap, HAS_ENTROPY: tl.constexpr, HAS_CAP: tl.constexpr):
    """Return -p (g + e (log p + H)), the gradient of the logits without onehot; g and e include the derivative of z."""
    log_share = x * f - lse[:, None]
    pull = grad[:, None]
    if HAS_ENTROPY:
        pull += grad_entropy[:, None] * (log_share * _LN_2 + entropy[:, None])
    result = -tl.exp2(log_share) * pull
    if HAS_CAP:
        result *= _cap_slope(x, cap)
    return result


@triton.jit
def _onehot(x, is_target, grad, cap, HAS_CAP: tl.constexpr):
    """Return the term of the gradient at the target, which _gradient omits."""
    result = tl.where(is_target, grad[:, None], 0.0)
    return result * _cap_slope(x, cap) if HAS_CAP else result


@triton.jit
def _cap_slope(z, cap):
    """Return the derivative of the cap: d z / d (uncapped z)."""
    ratio = z / cap
    return 1 - ratio * ratio


@triton.jit
def _select_rows(result, is_row, has_ignored):
    """Return a tile with 0 in ignored rows, selected because they may hold NaN."""
    if has_ignored:
        result = tl.where(is_row[:, None], result, 0.0)
    return result


@triton.jit
def _load_rows(row_ptr, rows, is_inside, stride, MODE: tl.constexpr, HAS_ENTROPY: tl.constexpr):
    """Return lse (or reference), entropy, grad and grad_entropy of rows, of row_ptr [4, n]; 0 if MODE ignores them."""
    first = tl.zeros_like(rows).to(tl.float32)
    entropy, grad, grad_entropy = first, first, first
    if MODE != _STATS:
        first = tl.load(row_ptr + rows, mask=is_inside, other=0)
    if MODE == _GRADIENT:
        grad = tl.load(row_ptr + 2 * stride + rows, mask=is_inside, other=0)
        if HAS_ENTROPY:
            entropy = tl.load(row_ptr + stride + rows, mask=is_inside, other=0)
            grad_entropy = tl.load(row_ptr + 3 * stride + rows, mask=is_inside, other=0)
    return first, entropy, grad, grad_entropy


@triton.jit
def _place(num_rows, num_splits, BLOCK_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Return (row tile, split) of this program.

    GROUP row tiles process the vocabulary at the same time, so that their hidden states stay in L2 and each tile of the
    weight is read from memory once per group.
    """
    program = tl.program_id(0)
    in_group = GROUP * num_splits
    first = program // in_group * GROUP
    size = tl.minimum(tl.cdiv(num_rows, BLOCK_ROWS) - first, GROUP)
    return first + program % in_group % size, program % in_group // size


@triton.jit(do_not_specialize=_VARYING)
def hybrid_rl_vocab_kernel(
    hidden, weight, out, row_ptr, tile_reference_ptr, state_ptr, targets_ptr, bias_ptr,
    num_rows, num_columns, num_hidden, first_column, scale, steepness, cap, tiles_per_split, num_splits,
    MODE: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of rows with some tiles of the vocabulary and process the logits by MODE.

    hidden [n, H], weight [V, H] and out [n, V] are tensor descriptors. state_ptr is [num_splits, 4, n],
    tile_reference_ptr is [tiles, n], and row_ptr is described in _load_rows.
    """
    row_tile, split = _place(num_rows, num_splits, BLOCK_ROWS, GROUP)
    first_row = row_tile * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    is_inside = rows < num_rows
    targets = tl.load(targets_ptr + rows, mask=is_inside, other=-100)
    is_row = targets >= 0
    local_targets = (targets - first_column).to(tl.int32)
    has_ignored = tl.min(targets, axis=0) < 0
    first, entropy, grad, grad_entropy = _load_rows(row_ptr, rows, is_inside, num_rows, MODE, HAS_ENTROPY)
    m, s, e, t = _no_state(BLOCK_ROWS)
    last_tile = tl.minimum((split + 1) * tiles_per_split, tl.cdiv(num_columns, BLOCK_COLUMNS))
    for tile in tl.range(split * tiles_per_split, last_tile, flatten=FLATTEN):
        first_of_tile = tile * BLOCK_COLUMNS
        logits = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for k in range(0, num_hidden, BLOCK_K):
            left, right = hidden.load([first_row, k]), weight.load([first_of_tile, k])
            logits = tl.dot(left, right.T, logits, input_precision=PRECISION)
        columns = first_of_tile + tl.arange(0, BLOCK_COLUMNS)
        x, f = _transform(logits, bias_ptr, columns, num_columns, scale, steepness, cap, HAS_BIAS, HAS_CAP)
        # Few tiles contain a target or ignored rows; branches skip that work, which is half of the instructions outside
        # the product.
        is_here = (local_targets >= first_of_tile) & (local_targets < first_of_tile + BLOCK_COLUMNS)
        has_target = tl.max(is_here.to(tl.int32), axis=0) > 0
        if MODE == _GRADIENT:
            result = _gradient(x, f, first, entropy, grad, grad_entropy, cap, HAS_ENTROPY, HAS_CAP)
            if has_target:
                result += _onehot(x, columns[None, :] == local_targets[:, None], grad, cap, HAS_CAP)
        else:
            if has_target:
                t += tl.sum(tl.where(columns[None, :] == local_targets[:, None], x, 0.0), axis=1)
            if first_of_tile + BLOCK_COLUMNS > num_columns:
                x = tl.where((columns < num_columns)[None, :], x, _LOWEST)
            m, s, e, result = _advance(x, f, m, s, e)
        if MODE == _NUMERATORS:
            result, reference = _numerators(result, m, first)
            tl.store(tile_reference_ptr + tile * num_rows + rows, reference, mask=is_inside)
        if MODE != _STATS:
            out.store([first_row, first_of_tile], _select_rows(result, is_row, has_ignored).to(out.dtype))
    if MODE != _GRADIENT:
        _store_state(state_ptr + split * 4 * num_rows, rows, is_inside, num_rows, m, s, e, t)


@triton.jit
def _store_state(state_ptr, rows, is_inside, stride, m, s, e, t):
    """Store the states of some rows in [4, n]."""
    tl.store(state_ptr + rows, m, mask=is_inside)
    tl.store(state_ptr + stride + rows, s, mask=is_inside)
    tl.store(state_ptr + 2 * stride + rows, e, mask=is_inside)
    tl.store(state_ptr + 3 * stride + rows, t, mask=is_inside)


@triton.jit(do_not_specialize=_VARYING)
def hybrid_rl_row_kernel(
    logits_ptr, out_ptr, row_ptr, tile_reference_ptr, state_ptr, targets_ptr, bias_ptr,
    num_rows, stride, num_columns, logits_stride, out_stride, first_column, scale, steepness, cap,
    MODE: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Process float32 logits [n, V] of a GEMM by MODE, like hybrid_rl_vocab_kernel; updates the states [4, n].

    stride is the row stride of all per-row tensors, which may hold more rows than this launch processes.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_inside = rows < num_rows
    targets = tl.load(targets_ptr + rows, mask=is_inside, other=-100)
    is_row = targets >= 0
    local_targets = (targets - first_column).to(tl.int32)
    first, entropy, grad, grad_entropy = _load_rows(row_ptr, rows, is_inside, stride, MODE, HAS_ENTROPY)
    m, s, e, t = _no_state(BLOCK_ROWS)
    if MODE != _GRADIENT and first_column > 0:
        m = tl.load(state_ptr + rows, mask=is_inside, other=0)
        s = tl.load(state_ptr + stride + rows, mask=is_inside, other=0)
        e = tl.load(state_ptr + 2 * stride + rows, mask=is_inside, other=0)
        t = tl.load(state_ptr + 3 * stride + rows, mask=is_inside, other=0)
    wide_rows = rows.to(tl.int64)[:, None]  # row * stride may exceed 2^31
    for tile in range(0, tl.cdiv(num_columns, BLOCK_COLUMNS)):
        columns = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        is_column, is_target = columns < num_columns, columns[None, :] == local_targets[:, None]
        is_slot = is_inside[:, None] & is_column[None, :]
        logits = tl.load(logits_ptr + wide_rows * logits_stride + columns[None, :], mask=is_slot, other=0)
        x, f = _transform(logits, bias_ptr, columns, num_columns, scale, steepness, cap, HAS_BIAS, HAS_CAP)
        if MODE == _GRADIENT:
            result = _gradient(x, f, first, entropy, grad, grad_entropy, cap, HAS_ENTROPY, HAS_CAP)
            result += _onehot(x, is_target, grad, cap, HAS_CAP)
        else:
            t += tl.sum(tl.where(is_target, x, 0.0), axis=1)
            m, s, e, result = _advance(tl.where(is_column[None, :], x, _LOWEST), f, m, s, e)
        if MODE == _NUMERATORS:
            result, reference = _numerators(result, m, first)
            tl.store(tile_reference_ptr + tile * stride + rows, reference, mask=is_inside)
        if MODE != _STATS:
            result = tl.where(is_row[:, None], result, 0.0)
            slots = wide_rows * out_stride + columns[None, :]
            tl.store(out_ptr + slots, result.to(out_ptr.dtype.element_ty), mask=is_slot)
    if MODE != _GRADIENT:
        _store_state(state_ptr, rows, is_inside, stride, m, s, e, t)


@triton.jit(do_not_specialize=_VARYING)
def hybrid_rl_merge_kernel(
    state_ptr,
    targets_ptr,
    logprobs_ptr,
    entropy_ptr,
    lse_ptr,
    top_ptr,
    num_rows,
    num_splits,
    scale,
    BLOCK_ROWS: tl.constexpr,
):
    """Merge the states [num_splits, 4, n] of each row into log-prob, entropy (0 if ignored), log2-sum-exp2 and max.

    scale is the factor that t still lacks to be z of the target.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_inside = rows < num_rows
    m, s, e, t = _no_state(BLOCK_ROWS)
    for split in range(0, num_splits):
        part = state_ptr + split * 4 * num_rows + rows
        part_m = tl.load(part, mask=is_inside, other=0)
        part_s = tl.load(part + num_rows, mask=is_inside, other=1)
        part_e = tl.load(part + 2 * num_rows, mask=is_inside, other=0)
        t += tl.load(part + 3 * num_rows, mask=is_inside, other=0)
        new_m = tl.maximum(m, part_m)
        rise, part_rise = m - new_m, part_m - new_m
        decay, part_decay = tl.exp2(rise), tl.exp2(part_rise)
        e = decay * (e + s * rise) + part_decay * (part_e + part_s * part_rise)
        s = decay * s + part_decay * part_s
        m = new_m
    is_row = tl.load(targets_ptr + rows, mask=is_inside, other=-100) >= 0
    log_s = tl.log2(s)
    logprobs = (t * scale - m - log_s) * _LN_2
    entropy = (log_s - e / s) * _LN_2
    tl.store(logprobs_ptr + rows, tl.where(is_row, logprobs, 0.0), mask=is_inside)
    tl.store(entropy_ptr + rows, tl.where(is_row, entropy, 0.0), mask=is_inside)
    tl.store(lse_ptr + rows, m + log_s, mask=is_inside)
    tl.store(top_ptr + rows, m, mask=is_inside)


@triton.jit
def hybrid_rl_target_kernel(
    hidden_ptr, weight_ptr, bias_ptr, targets_ptr, z_ptr, num_hidden, scale, steepness, cap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store z of the target of each row, at least _LOWEST, in [n]; one program per row of hidden [n, H]."""
    row = tl.program_id(0)
    target = tl.maximum(tl.load(targets_ptr + row), 0)
    total = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, num_hidden, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.load(hidden_ptr + row.to(tl.int64) * num_hidden + k, mask=k < num_hidden, other=0).to(tl.float32)
        right = tl.load(weight_ptr + target.to(tl.int64) * num_hidden + k, mask=k < num_hidden, other=0).to(tl.float32)
        total += left * right
    logit = tl.sum(total, axis=0)
    if HAS_BIAS:
        logit += tl.load(bias_ptr + target).to(tl.float32)
    z = cap * (1 - 2 / (1 + tl.exp2(logit * steepness))) if HAS_CAP else logit * scale
    tl.store(z_ptr + row, tl.where(z < _LOWEST, _LOWEST, z))


@triton.jit
def hybrid_rl_scale_kernel(
    hidden_ptr, scaled_ptr, scale_ptr, numerators_ptr, stride, targets_ptr, logprobs_ptr, lse_ptr, top_ptr,
    reference_ptr, grad_ptr, num_hidden, factor, IS_FINISHED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store the scale [n] of each row, scale * hidden [n, H] and the numerator of the target; one program per row.

    The gradient of the logits is scale * numerators. Rows that the finish kernel rewrites have scale 1.
    """
    row = tl.program_id(0)
    target = tl.load(targets_ptr + row)
    reference = tl.load(reference_ptr + row)
    lse = tl.load(lse_ptr + row)
    is_finished = (tl.load(top_ptr + row) > reference + _MAX_EXPONENT) | IS_FINISHED
    scale = tl.where(is_finished, 1.0, -tl.load(grad_ptr + row) * factor * tl.exp2(reference - lse))
    scale = tl.where(target >= 0, scale, 0.0)
    tl.store(scale_ptr + row, scale)
    if target >= 0 and not is_finished:
        # g (1 - p) = scale * numerator; 1 - p is accurate, because p is computed from the log-prob in float32.
        share = tl.exp(tl.load(logprobs_ptr + row))
        numerator = (share - 1) * tl.exp2(lse - reference)
        slot = numerators_ptr + row.to(tl.int64) * stride + target
        tl.store(slot, numerator.to(numerators_ptr.dtype.element_ty))
    for start in range(0, num_hidden, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        slots = row.to(tl.int64) * num_hidden + k
        hidden = tl.load(hidden_ptr + slots, mask=k < num_hidden, other=0).to(tl.float32)
        scaled = tl.where(target >= 0, hidden * scale, 0.0)  # selected, because an ignored row may hold NaN
        tl.store(scaled_ptr + slots, scaled.to(scaled_ptr.dtype.element_ty), mask=k < num_hidden)


@triton.jit(do_not_specialize=_VARYING)
def hybrid_rl_finish_kernel(
    numerators_ptr, stride, tile_reference_ptr, top_ptr, reference_ptr, row_ptr, targets_ptr,
    num_rows, num_columns, tile_width, cap,
    IS_FULL: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_CAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Replace numerators [n, V] by the gradient of the logits, in place, in rows whose max z is far above the target's.

    With IS_FULL, all rows are replaced. The tiles of a row are divided among the programs of axis 1. reference_ptr [n]
    holds z of the targets.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_inside = rows < num_rows
    target_z = tl.load(reference_ptr + rows, mask=is_inside, other=0)
    is_far = tl.load(top_ptr + rows, mask=is_inside, other=0) > target_z + _MAX_EXPONENT
    is_chosen = is_inside if IS_FULL else is_far
    if tl.max(is_chosen.to(tl.int32), axis=0) == 0:
        return
    targets = tl.load(targets_ptr + rows, mask=is_inside, other=-100)
    lse, entropy, grad, grad_entropy = _load_rows(row_ptr, rows, is_inside, num_rows, _GRADIENT, HAS_ENTROPY)
    first_slots = numerators_ptr + rows.to(tl.int64)[:, None] * stride
    for place in range(tl.program_id(1), tl.cdiv(num_columns, BLOCK_COLUMNS), tl.num_programs(1)):
        columns = place * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        is_column, is_target = columns < num_columns, columns[None, :] == targets.to(tl.int32)[:, None]
        tile = place * BLOCK_COLUMNS // tile_width
        reference = tl.load(tile_reference_ptr + tile * num_rows + rows, mask=is_inside, other=0)
        is_slot = is_chosen[:, None] & is_column[None, :]
        numerators = tl.load(first_slots + columns[None, :], mask=is_slot, other=0).to(tl.float32)
        z = tl.where(is_target, target_z[:, None], tl.log2(numerators) + reference[:, None])
        z = tl.where(z < _LOWEST, 0.0, z)  # a numerator of 0 gives z = -inf, and a gradient of 0 for any z
        result = _gradient(z, 1.0, lse, entropy, grad, grad_entropy, cap, HAS_ENTROPY, HAS_CAP)
        result += _onehot(z, is_target, grad, cap, HAS_CAP)
        result = tl.where(is_target | (numerators != 0), result, 0.0)
        result = tl.where((targets >= 0)[:, None], result, 0.0)
        tl.store(first_slots + columns[None, :], result.to(numerators_ptr.dtype.element_ty), mask=is_slot)


@triton.jit
def hybrid_rl_rescale_kernel(x_ptr, factor_ptr, num_elements, BLOCK: tl.constexpr):
    """Multiply x in place by the number at factor_ptr; x is neither read nor written if that is 1."""
    factor = tl.load(factor_ptr)
    if factor == 1.0:
        return
    slots = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + slots, mask=slots < num_elements, other=0).to(tl.float32)
    tl.store(x_ptr + slots, (x * factor).to(x_ptr.dtype.element_ty), mask=slots < num_elements)
