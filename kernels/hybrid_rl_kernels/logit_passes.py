"""Passes over the logits that reduce them to states of the rows, numerators or gradients, without storing all logits.

There are two paths. `fused`: one Triton kernel multiplies and reduces tile by tile. `chunked`: cuBLAS writes float32
logits of some rows and columns, which fit in the L2 cache, and a Triton kernel reads them once. Both give the same
results up to rounding.

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
    """Tile sizes and launch parameters of hybrid_rl_vocab_kernel."""

    rows: int
    columns: int
    k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    max_registers: int | None = None
    """Registers per thread; all programs on a multiprocessor have 65,536 together. None is no limit."""
    group: int = 16
    """Number of row tiles that process the vocabulary at the same time."""
    is_flat: bool = True
    """Whether the loads of the next tile start while the current one is reduced."""


# Fastest on an H200, by `profiling/bench_kernels.py --sweep`.
STATS_TILES = Tiles(rows=128, columns=256, k=64, num_warps=8, num_stages=3, is_flat=False)
NUMERATOR_TILES = Tiles(rows=128, columns=256, k=64, num_warps=8, num_stages=3, is_flat=False)
GRADIENT_TILES = Tiles(rows=128, columns=256, k=64, num_warps=8, num_stages=3)
MIN_SPLITS = 8
PROGRAM_START = 0.1
"""Fixed cost of a program, in units of a tile."""
STATE_BYTES = 16 * MIB
"""Upper bound of the memory of states before they are merged."""
FUSED_SHARED_BYTES = 216 * 1024
"""Shared memory of a multiprocessor that the largest tiles need."""

TRUNCATION = 9.7e-10
"""Fraction of a sum of 16-bit products that Hopper's tensor cores lose per term, because their accumulators truncate.

Fitted to logits of an H200, against float64, for H of 896 to 4096; cuBLAS loses the same. The transform multiplies
logits by 1 + H * TRUNCATION to correct it."""

CHUNK_ROWS, CHUNK_COLUMNS = 4096, 2048
"""Size of the float32 logits of the chunked path: 32 MiB, which fit in the 50 MB L2 cache of an H100 or H200."""
ROW_TILE = (4, 1024)
"""Rows and columns of a tile of hybrid_rl_row_kernel."""


def choose_path(hidden: Tensor, weight: Tensor) -> Path:
    """Return fused if the device and the alignment of the tensors allow it, else chunked, which is slower."""
    # Tensor descriptors need rows aligned to 16 bytes; a weight may be a slice of an optimizer's flat buffer.
    is_aligned = all(x.shape[1] * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 for x in (hidden, weight))
    return "fused" if is_aligned and _has_room(weight.device) else "chunked"


@cache
def _has_room(device: torch.device) -> bool:
    """Return whether the tiles fit in shared memory, as on Hopper; Triton's interpreter has no limit."""
    if device.type != "cuda":
        return True
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["max_shared_mem"] >= FUSED_SHARED_BYTES


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@dataclass(frozen=True, kw_only=True)
class Head:
    """An output projection, or some of its words, with the transform of its logits."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    transform: LogitTransform
    first_column: int = 0
    """Index of the first word in the whole vocabulary."""

    def slice(self, first: int, last: int) -> "Head":
        """Return the head of the words [first, last) of this one."""
        bias = None if self.bias is None else self.bias[first:last]
        return replace(self, weight=self.weight[first:last], bias=bias, first_column=self.first_column + first)

    @property
    def scales(self) -> tuple[float, float, float]:
        """Arguments (scale, steepness, cap) of kernels._transform; with a cap, scale is 1 and cap includes it."""
        transform, lost = self.transform, 0.0
        if self.weight.dtype != torch.float32 and _is_hopper(self.weight.device):
            lost = TRUNCATION * self.weight.shape[1]
        if transform.softcap is None:
            return transform.factor * LOG2_E * (1 + lost), 0.0, 1.0
        steepness = 2 * LOG2_E * transform.logit_scale / transform.softcap * (1 + lost)
        return 1.0, steepness, transform.softcap / transform.temperature * LOG2_E


@dataclass(frozen=True, kw_only=True)
class Work:
    """One pass over the logits of some rows and words; `mode` selects the result, see logprob_kernels.STATS."""

    mode: int
    hidden: Tensor
    """[n, H]"""
    head: Head
    targets: Tensor
    """[n] int64, -100 where ignored."""
    row_data: Tensor | None = None
    """[4, n] float32; see logprob_kernels._load_rows."""
    has_entropy: bool = False
    out: Tensor | None = None
    """[n, V] of the dtype of hidden, rows aligned to 16 bytes; numerators or gradients."""
    tile_reference: Tensor | None = None
    """[tiles, n] float32; references of the numerators of each tile of words."""

    @property
    def flags(self) -> dict[str, Any]:
        """Arguments that hybrid_rl_vocab_kernel and hybrid_rl_row_kernel have in common."""
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
    """Results of a pass over all words, [n] float32 each."""

    logprobs: Tensor
    entropy: Tensor
    lse: Tensor
    """log2 sum 2^z; arbitrary in ignored rows."""
    top: Tensor
    """max z; arbitrary in ignored rows."""


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; for Triton's interpreter, any number works."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tiles_per_program(num_rows: int, num_row_tiles: int, num_column_tiles: int, num_slots: int) -> int:
    """Return the number of column tiles per program that minimizes the time until all programs have ended.

    The rows of a tile are processed by at least MIN_SPLITS programs, so that only few row tiles, whose hidden states
    stay in L2, are active at a time, and by at most as many as let the states fit in STATE_BYTES.

    Args:
        num_rows: n.
        num_row_tiles, num_column_tiles: of the launch.
        num_slots: number of programs that run at the same time.
    """
    most = max(STATE_BYTES // (16 * num_rows), MIN_SPLITS)
    splits = range(min(MIN_SPLITS, num_column_tiles), min(most, num_column_tiles) + 1)

    def duration(size: int) -> float:
        num_programs = num_row_tiles * -(-num_column_tiles // size)
        return -(-num_programs // num_slots) * (size + PROGRAM_START)

    return min({-(-num_column_tiles // n) for n in splits}, key=lambda size: (duration(size), -size))


def states(work: Work, path: Path) -> Tensor:
    """Run a pass and return the states [splits, 4, n] of its rows; their content is arbitrary in the gradient mode."""
    return _fused(work) if path == "fused" else _chunked(work)


def tiles_of(mode: int) -> Tiles:
    """Return the tile sizes of hybrid_rl_vocab_kernel in a mode."""
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
        PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",  # ignored for 16-bit inputs
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
    """Launch hybrid_rl_row_kernel on the logits of some rows of a pass and all words of its head."""
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
    """Return the results of states [splits, 4, n]; log-probs and entropies of ignored rows are 0."""
    results = [torch.empty(len(targets), dtype=torch.float32, device=state.device) for _ in range(4)]
    grid = (-(-len(targets) // 128),)
    kernels.hybrid_rl_merge_kernel[grid](
        state, targets, *results, len(targets), len(state), head.scales[0], BLOCK_ROWS=128, num_warps=4
    )
    return RowResults(logprobs=results[0], entropy=results[1], lse=results[2], top=results[3])


def blocks(total: int, size: int, *, multiple: int = 1) -> Iterator[slice]:
    """Return slices of [0, total) of at most `size`; all but the last have a length divisible by `multiple`."""
    if multiple > 1 and total:
        num_blocks = -(-total // size)
        size = min(size, -(-total // (num_blocks * multiple)) * multiple)
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


@cache
def _addmm_widens(device: torch.device) -> bool:
    """Return whether this torch can add a 16-bit product to a float32 matrix, which not all with out_dtype can."""
    ones = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    total = torch.ones(8, 8, dtype=torch.float32, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def matmul(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write a @ b to out, or add it there if `adds`; out has the dtype of a or float32, accumulation is in float32."""
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
