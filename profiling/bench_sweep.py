"""Search the constants of the kernels on one card: `python profiling/bench_kernels.py --sweep`.

Prints the candidates for each shape and pass, fastest first, in times of one cuBLAS product. Candidates that need more
shared memory or registers than the card has are skipped. Copy the winners by hand into logit_passes, logprobs,
token_loss and gae_kernels; training searches nothing.
"""

from collections.abc import Callable
from typing import Any

import torch

from hybrid_rl_kernels import gae_kernels, gae_reference, logit_passes, logprob_kernels, logprobs, reference, token_loss
from hybrid_rl_kernels.logit_passes import MIB, Tiles, Work


def _tiles(text: str) -> Tiles:
    """Return tiles from `rows columns k warps stages programs_per_sm group flat max_registers`, 0 for no bound."""
    rows, columns, k, warps, stages, programs, group, flat, registers = map(int, text.split())
    return Tiles(rows=rows, columns=columns, k=k, num_warps=warps, num_stages=stages, programs_per_sm=programs,
                 group=group, is_flat=bool(flat), max_registers=registers or None)  # fmt: skip


CANDIDATES = [
    "128 256 64 8 3 1 16 1 0",
    "128 256 64 8 3 1 16 0 0",
    "128 256 64 8 4 1 16 1 0",
    "128 256 64 8 4 1 16 0 0",
    "128 256 64 8 3 1 8 1 0",
    "128 256 64 8 3 1 32 1 0",
    "128 256 128 8 2 1 16 1 0",
    "128 128 64 4 3 2 16 1 0",
    "128 128 64 4 3 2 16 0 0",
    "128 128 64 4 2 2 16 0 0",
    "128 128 64 4 3 2 32 0 0",
    "128 128 64 8 4 1 16 1 0",
    "256 128 64 8 3 1 16 1 0",
    "256 128 64 8 3 1 8 0 0",
    "64 256 64 4 4 1 16 1 0",
    "128 128 64 8 3 2 16 1 128",
    "128 128 64 8 3 2 16 0 128",
    "128 128 64 8 2 2 16 1 128",
    "128 128 64 8 2 2 16 0 128",
]
TINY = ["16 16 16 1 1 1 2 0 0", "16 32 16 1 1 1 1 0 0"]
CHUNKS = [(2048, 2048), (4096, 2048), (4096, 4096), (8192, 2048), (2048, 4096), (1024, 8192)]
MODES = {
    "STATS_TILES": logprob_kernels.STATS,
    "GRADIENT_TILES": logprob_kernels.GRADIENT,
    "NUMERATOR_TILES": logprob_kernels.NUMERATORS,
}
GRADIENT_COLUMNS = 8192
NUMERATOR_ROWS = 1664


def _show(title: str, times: dict[str, float], unit: float) -> None:
    print(f"{title}:")
    for name, ms in sorted(times.items(), key=lambda item: item[1])[:6]:
        print(f"    {ms / unit:7.3f}  {ms:9.3f} ms  {name}")


def _work(p: Any, mode: int) -> tuple[Work, float]:
    """Return one pass of a mode, and its fraction of the whole product."""
    hidden, weight, targets = p.hidden.detach(), p.weight.detach(), p.targets
    T, V = len(hidden), len(weight)
    if mode == logprob_kernels.GRADIENT:
        weight = weight[:GRADIENT_COLUMNS]
    if mode == logprob_kernels.NUMERATORS:
        hidden, targets = hidden[:NUMERATOR_ROWS], targets[:NUMERATOR_ROWS]
    transform = reference.LogitTransform(temperature=1.0, logit_scale=1.0, softcap=None)
    work = Work(mode=mode, hidden=hidden, head=logit_passes.Head(weight=weight, bias=None, transform=transform),
                targets=targets)  # fmt: skip
    if mode == logprob_kernels.STATS:
        return work, 1.0
    num_rows, num_words = len(hidden), len(weight)
    out = hidden.new_empty((num_rows, -(-num_words // 64) * 64))[:, :num_words]
    row_data = torch.zeros((4, num_rows), dtype=torch.float32, device=hidden.device)
    tile_reference = row_data.new_empty((-(-num_words // 16), num_rows))
    work = Work(mode=mode, hidden=hidden, head=work.head, targets=targets, row_data=row_data, out=out,
                tile_reference=tile_reference)  # fmt: skip
    return work, num_rows * num_words / (T * V)


def _passes(p: Any, clock: Any, G: float, name: str, is_tiny: bool) -> None:
    """Compare tiles for each mode of the fused path, and chunks for each of the chunked one."""
    for constant, mode in MODES.items():
        work, share = _work(p, mode)

        def fused(text: str, constant: str = constant, work: Work = work) -> Callable[[], object]:
            def run() -> object:
                setattr(logit_passes, constant, _tiles(text))
                return logit_passes.states(work, "fused")

            return run

        def chunked(size: tuple[int, int], work: Work = work) -> Callable[[], object]:
            def run() -> object:
                logit_passes.CHUNK_ROWS, logit_passes.CHUNK_COLUMNS = size
                return logit_passes.states(work, "chunked")

            return run

        runs = {text: fused(text) for text in (TINY if is_tiny else CANDIDATES)}
        runs |= {f"chunked {size}": chunked(size) for size in ([(16, 1024)] if is_tiny else CHUNKS)}
        _show(f"{name} {constant}", clock.medians(runs), G * share)


def _budgets(p: Any, clock: Any, G: float, name: str, is_tiny: bool) -> None:
    """Compare how much of the gradient of the logits exists at a time, in both backward passes."""
    transform = reference.LogitTransform(temperature=1.0, logit_scale=1.0, softcap=None)

    def generic(size: int) -> Callable[[], object]:
        def run() -> object:
            logprobs.GRADIENT_BYTES = size * MIB
            values, _ = logprobs.fused_logprobs(p.hidden, p.weight, p.targets, path="fused")
            return torch.autograd.grad(values, (p.hidden, p.weight), p.upstream)

        return run

    def one_pass(size: int) -> Callable[[], object]:
        def run() -> object:
            token_loss.NUMERATOR_BYTES = size * MIB
            loss, _, _ = token_loss.token_loss(p.hidden, p.weight, None, p.targets, transform, p.clipped_loss, "fused")
            return torch.autograd.grad(loss, (p.hidden, p.weight))

        return run

    sizes = (1,) if is_tiny else (128, 192, 256, 384)
    _show(f"{name} GRADIENT_BYTES, MiB", clock.medians({str(size): generic(size) for size in sizes}), G)
    sizes = (1,) if is_tiny else (264, 400, 528, 1056)
    _show(f"{name} NUMERATOR_BYTES, MiB", clock.medians({str(size): one_pass(size) for size in sizes}), G)


def _gae(shape: tuple[int, ...], clock: Any, is_tiny: bool) -> None:
    B, T = shape
    rewards, values = torch.randn(2, B, T, device=clock.device)
    rows = gae_reference.Rows(mask=rewards > -1.5, values=values, token_rewards=rewards)

    def scan(block: int) -> Callable[[], object]:
        def run() -> object:
            gae_kernels.MAX_BLOCK = block
            return gae_kernels.scan(rows, 0.99, 0.95, has_moments=True, has_returns=True)

        return run

    runs = {f"MAX_BLOCK {block}": scan(block) for block in ((64,) if is_tiny else (256, 512, 1024, 2048, 4096))}
    times = clock.medians(runs, cold=True)
    _show(f"gae {B}x{T}, unit: 17 bytes a token at 3 TB/s", times, 17 * B * T / 3e9)


def sweep(shapes: list[tuple[int, ...]], clock: Any, make_problem: Callable[..., Any], *, is_tiny: bool) -> None:
    """Print the candidates of every constant for the shapes."""
    for shape in shapes:
        if len(shape) == 2:
            _gae(shape, clock, is_tiny)
            continue
        p, name = make_problem(shape, clock.device), "x".join(map(str, shape))
        G = p.product_ms(clock)
        before = vars(logit_passes).copy()
        _passes(p, clock, G, name, is_tiny)
        for constant in (*MODES, "CHUNK_ROWS", "CHUNK_COLUMNS"):
            setattr(logit_passes, constant, before[constant])
        _budgets(p, clock, G, name, is_tiny)
    for line in clock.missing:
        print("did not run:", line)
