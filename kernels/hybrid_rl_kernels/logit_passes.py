"""Passes over logits that never exist as a whole: into the rows' states, numerators or gradients.

Two ways to the logits, chosen by shape: `fused`, where a Triton kernel multiplies and reduces tile by tile, and
`chunked`, where cuBLAS writes float32 logits of some rows and columns, which stay in L2, and a Triton kernel reads them
once. Both give the same results up to rounding.

Shape letters: n rows of one pass, H hidden, V words of one pass.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hybrid_rl_kernels import logprob_kernels as kernels
from hybrid_rl_kernels.reference import LogitTransform

MIB = 2**20
LOG2_E = math.log2(math.e)

Path = Literal["fused", "chunked"]


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How hybrid_rl_vocab_kernel divides its work."""

    rows: int
    columns: int
    k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    max_registers: int | None = None
    """Of a thread; 65,536 are shared by all programs on a multiprocessor."""
    group: int = 16
    """Row tiles that walk the vocabulary together."""
    is_flat: bool = True
    """Loads of the next tile start while this one is reduced."""


# Measured by `profiling/bench_kernels.py --sweep` on an H200, November 2026.
STATS_TILES = Tiles(rows=128, columns=256, k=64, num_warps=8, num_stages=3, is_flat=False)
NUMERATOR_TILES = Tiles(rows=128, columns=256, k=64, num_warps=8, num_stages=3, is_flat=False)
GRADIENT_TILES = Tiles(rows=128, columns=256, k=64, num_warps=8, num_stages=3)
MIN_SPLITS = 8
PROGRAM_START = 0.1
"""What a program costs beside its tiles, in tiles."""
STATE_BYTES = 16 * MIB
"""Bound of the states that wait to be merged."""
FUSED_SHARED_BYTES = 216 * 1024
"""What the largest tiles need of a multiprocessor's shared memory."""

TRUNCATION = 9.7e-10
"""Share of a sum of 16-bit products that Hopper's tensor cores lose per term, as they cut what their accumulators do
not hold: on an H200, against float64, logits are too small by 8.3e-7, 2.0e-6 and 4.0e-6 of themselves for H = 896, 2048
and 4096, of cuBLAS as of Triton. In a log-prob that makes up to 6e-5, so the transform gives it back."""

CHUNK_ROWS, CHUNK_COLUMNS = 4096, 2048
"""Logits of the chunked path: 32 MiB, of the 50 MB of L2."""
ROW_TILE = (4, 1024)
"""Rows and columns of hybrid_rl_row_kernel's tile."""


def choose_path(hidden: Tensor, weight: Tensor) -> Path:
    """Return the faster path of those that can run: on an H200 fused at every shape of profiling/bench_kernels.py."""
    # Descriptors take rows that begin at multiples of 16 bytes; a weight may be a part of an optimizer's flat buffer.
    is_aligned = all(x.shape[1] * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 for x in (hidden, weight))
    return "fused" if is_aligned and _has_room(weight.device) else "chunked"


@cache
def _has_room(device: torch.device) -> bool:
    """Whether the tiles fit into shared memory, as on Hopper; the interpreter has no limit."""
    if device.type != "cuda":
        return True
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["max_shared_mem"] >= FUSED_SHARED_BYTES


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@dataclass(frozen=True, kw_only=True)
class Head:
    """Rows of an output projection: what makes logits of hidden states."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    transform: LogitTransform
    first_column: int = 0

    def slice(self, first: int, last: int) -> "Head":
        """Return the words [first, last) of this head."""
        bias = None if self.bias is None else self.bias[first:last]
        return replace(self, weight=self.weight[first:last], bias=bias, first_column=self.first_column + first)

    @property
    def scales(self) -> tuple[float, float, float]:
        """Factors of the kernels' transform: scale (1 with a cap, which holds it), steepness and cap."""
        transform, lost = self.transform, 0.0
        if self.weight.dtype != torch.float32 and _is_hopper(self.weight.device):
            lost = TRUNCATION * self.weight.shape[1]
        if transform.softcap is None:
            return transform.factor * LOG2_E * (1 + lost), 0.0, 1.0
        steepness = 2 * LOG2_E * transform.logit_scale / transform.softcap * (1 + lost)
        return 1.0, steepness, transform.softcap / transform.temperature * LOG2_E


@dataclass(frozen=True, kw_only=True)
class Work:
    """One pass over the logits of some rows and words; `mode` says what becomes of them."""

    mode: int
    hidden: Tensor
    """[n, H]"""
    head: Head
    targets: Tensor
    """[n] int64, -100 where ignored."""
    row_data: Tensor | None = None
    """[4, n] float32: see kernels._load_rows."""
    has_entropy: bool = False
    out: Tensor | None = None
    """[n, V] of hidden's dtype, rows aligned to 16 bytes."""
    tile_reference: Tensor | None = None
    """[tiles, n] float32."""

    @property
    def flags(self) -> dict[str, Any]:
        """Arguments that both kernels share."""
        scale, steepness, cap = self.head.scales
        return {
            "scale": scale,
            "steepness": steepness,
            "cap": cap,
            "MODE": self.mode,
            "HAS_ENTROPY": self.has_entropy,
            "HAS_BIAS": self.head.bias is not None,
            "HAS_CAP": self.head.transform.softcap is not None,
        }


@dataclass(frozen=True, kw_only=True)
class RowResults:
    """What a pass over all words tells of each row, [n] float32."""

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor
    """log2 sum 2^z; like top not selected, so anything in ignored rows."""
    top: Tensor
    """max z."""


@cache
def num_processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; for the interpreter any number does."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tiles_per_program(num_rows: int, num_row_tiles: int, num_column_tiles: int, num_slots: int) -> int:
    """Return how many column tiles each program takes so that all programs, num_slots at a time, end soonest.

    At least MIN_SPLITS programs share the rows of a tile, so that few row tiles, whose hidden states stay in L2, run at
    a time; at most so many that the states fit in STATE_BYTES.
    """
    most = max(STATE_BYTES // (16 * num_rows), MIN_SPLITS)
    splits = range(min(MIN_SPLITS, num_column_tiles), min(most, num_column_tiles) + 1)

    def duration(size: int) -> float:
        num_programs = num_row_tiles * -(-num_column_tiles // size)
        return -(-num_programs // num_slots) * (size + PROGRAM_START)

    return min({-(-num_column_tiles // n) for n in splits}, key=lambda size: (duration(size), -size))


def states(work: Work, path: Path) -> Tensor:
    """Do the work; return the states [splits, 4, n] of its rows, for the gradient mode of no content."""
    return _fused(work) if path == "fused" else _chunked(work)


def tiles_of(mode: int) -> Tiles:
    """Return the tiles of hybrid_rl_vocab_kernel in one of its modes."""
    return {kernels.STATS: STATS_TILES, kernels.NUMERATORS: NUMERATOR_TILES, kernels.GRADIENT: GRADIENT_TILES}[mode]


def _fused(work: Work) -> Tensor:
    tiles = tiles_of(work.mode)
    hidden, weight = work.hidden.contiguous(), work.head.weight.contiguous()
    num_row_tiles, num_tiles = -(-len(hidden) // tiles.rows), -(-len(weight) // tiles.columns)
    num_slots = num_processors(hidden.device) * tiles.programs_per_sm
    tiles_per_split = tiles_per_program(len(hidden), num_row_tiles, num_tiles, num_slots)
    num_splits = -(-num_tiles // tiles_per_split)
    shape = (0,) if work.mode == kernels.GRADIENT else (num_splits, 4, len(hidden))
    state = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    out = None if work.out is None else TensorDescriptor.from_tensor(work.out, [tiles.rows, tiles.columns])
    kernels.hybrid_rl_vocab_kernel[(num_row_tiles * num_splits,)](
        TensorDescriptor.from_tensor(hidden, [tiles.rows, tiles.k]),
        TensorDescriptor.from_tensor(weight, [tiles.columns, tiles.k]),
        out,
        work.row_data,
        work.tile_reference,
        state,
        work.targets,
        work.head.bias,
        num_rows=len(hidden),
        num_columns=len(weight),
        num_hidden=hidden.shape[1],
        first_column=work.head.first_column,
        tiles_per_split=tiles_per_split,
        num_splits=num_splits,
        PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",  # which 16-bit inputs ignore
        GROUP=tiles.group,
        FLATTEN=tiles.is_flat,
        BLOCK_ROWS=tiles.rows,
        BLOCK_COLUMNS=tiles.columns,
        BLOCK_K=tiles.k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **({} if tiles.max_registers is None else {"maxnreg": tiles.max_registers}),
        **work.flags,
    )
    return state


def _chunked(work: Work) -> Tensor:
    num_rows, num_columns = len(work.hidden), len(work.head.weight)
    buffer_shape = (min(CHUNK_ROWS, num_rows), min(CHUNK_COLUMNS, -(-num_columns // 8) * 8))
    buffer = torch.empty(buffer_shape, dtype=torch.float32, device=work.hidden.device)
    state = torch.empty((1, 4, num_rows), dtype=torch.float32, device=work.hidden.device)
    for rows in blocks(num_rows, CHUNK_ROWS):
        for columns in blocks(num_columns, CHUNK_COLUMNS):
            head = work.head.slice(columns.start, columns.stop)
            logits = buffer[: rows.stop - rows.start, : columns.stop - columns.start]
            matmul(work.hidden[rows], head.weight.t(), logits)
            _read_logits(replace(work, head=head), logits, rows, columns, state)
    return state


def _read_logits(work: Work, logits: Tensor, rows: slice, columns: slice, state: Tensor) -> None:
    """Launch hybrid_rl_row_kernel on the logits of some rows of the work and all words of its head."""
    block_rows, block_columns = ROW_TILE
    first_tile = columns.start // block_columns
    kernels.hybrid_rl_row_kernel[(-(-len(logits) // block_rows),)](
        logits,
        None if work.out is None else work.out[rows, columns],
        None if work.row_data is None else work.row_data[:, rows],
        None if work.tile_reference is None else work.tile_reference[first_tile:, rows],
        state[0, :, rows],
        work.targets[rows],
        work.head.bias,
        num_rows=len(logits),
        stride=len(work.hidden),
        num_columns=logits.shape[1],
        logits_stride=logits.stride(0),
        out_stride=0 if work.out is None else work.out.stride(0),
        first_column=work.head.first_column,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        num_warps=4,
        **work.flags,
    )


def merge(state: Tensor, targets: Tensor, head: Head) -> RowResults:
    """Return what the states [splits, 4, n] of rows say; log-probs and entropies are 0 where ignored."""
    results = [torch.empty(len(targets), dtype=torch.float32, device=state.device) for _ in range(4)]
    grid = (-(-len(targets) // 128),)
    kernels.hybrid_rl_merge_kernel[grid](
        state, targets, *results, len(targets), len(state), head.scales[0], BLOCK_ROWS=128, num_warps=4
    )
    return RowResults(logprobs=results[0], entropy=results[1], lse=results[2], top=results[3])


def blocks(total: int, size: int, *, multiple: int = 1) -> Iterator[slice]:
    """Yield slices of about equal length, at most `size` and, but for the last, a multiple of `multiple`."""
    if multiple > 1 and total:
        num_blocks = -(-total // size)
        size = min(size, -(-total // (num_blocks * multiple)) * multiple)
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


@cache
def _addmm_widens(device: torch.device) -> bool:
    """Whether this torch adds a 16-bit product to a float32 matrix; the first versions with out_dtype refuse it."""
    ones = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    total = torch.ones(8, 8, dtype=torch.float32, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def matmul(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write a @ b, with float32 accumulation, to out of a's dtype or float32; `adds` adds it there."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out) if adds else torch.mm(a, b, out=out)
    elif not a.is_cuda:
        product = a.to(out.dtype) @ b.to(out.dtype)
        out.copy_(out + product if adds else product)
    elif not adds:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    elif _addmm_widens(a.device):
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        out += torch.mm(a, b, out_dtype=out.dtype)
