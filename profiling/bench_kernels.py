"""Time the kernels against other implementations, interleaved in one process; writes a CSV and a plot.

python profiling/bench_kernels.py                    # the table of docs/benchmarks.md, on a GPU
python profiling/bench_kernels.py --sweep            # tiles and chunks: the constants of the kernels
python profiling/bench_kernels.py --breakdown        # which kernels the time of a step goes to
python profiling/bench_kernels.py --device cpu --tiny  # a dry run in Triton's interpreter

G is cuBLAS's bfloat16 product of the shape in the same run. liger-kernel, cut-cross-entropy and matplotlib are used
where installed. Shape letters: T tokens, H hidden, V vocabulary, B sequences.
"""

import argparse
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read once, when Triton is imported

import torch
import torch.utils.checkpoint
import triton
from bench_breakdown import breakdown
from bench_sweep import sweep
from colocated_run import write_csv
from torch import Tensor

import hybrid_rl_kernels
from hybrid_rl_kernels import gae_kernels, gae_reference, logit_passes, logprobs, reference, token_loss

SHAPES = [(8192, 4096, 128256), (16384, 2048, 151936), (16384, 896, 151936)]
GAE_SHAPES = [(512, 1024), (4096, 1024), (512, 8192), (16384, 512)]
TINY_SHAPES, TINY_GAE_SHAPES = [(24, 16, 67)], [(3, 40)]
MIB = 2**20

Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    shape: str
    phase: str
    provider: str
    ms: float
    ratio: float = float("nan")
    """ms / G; for gae, bandwidth / bandwidth of a copy."""
    workspace_mib: float = float("nan")
    """Peak memory beyond inputs and results."""
    max_error: float = float("nan")
    """Error of log-probs or advantages against float64 on the same inputs."""
    mean_error: float = float("nan")


@dataclass(kw_only=True)
class Clock:
    """Runs functions in turns and times each; on a GPU with events, after work that hides the launches."""

    device: str
    repeats: int
    missing: list[str] = field(default_factory=list)
    """Names of functions that failed, with the reason."""

    def medians(self, functions: dict[str, Run], *, cold: bool = False) -> dict[str, float]:
        """Return milliseconds per name; `cold` empties L2 before each run."""
        working = {name: function for name, function in functions.items() if self._warms_up(name, function)}
        times: dict[str, list[float]] = {name: [] for name in working}
        # Read, not written: what is written would have to leave L2 in the time of the function after it.
        flood = torch.ones(128 * MIB if cold and self.device == "cuda" else 1, dtype=torch.uint8, device=self.device)
        for _ in range(self.repeats):
            for name, function in working.items():
                flood.max()
                times[name].append(self._milliseconds(function))
        return {name: statistics.median(values) for name, values in times.items()}

    def _warms_up(self, name: str, function: Run) -> bool:
        try:
            for _ in range(2):
                function()
            if self.device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # another library's provider may fail in any way, and costs only its own line
            self.missing.append(f"{name}: {type(error).__name__} {str(error).splitlines()[0][:150]}")
            return False
        return True

    def _milliseconds(self, function: Run) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1000
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # about 0.6 ms in which the launches queue up
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def workspace(self, function: Run, result_bytes: int) -> float:
        """Return the peak memory of a run in MiB, without its inputs and results."""
        if self.device == "cpu":
            return float("nan")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before - result_bytes) / MIB


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Inputs of one shape: hidden states, a head, and tokens sampled from it, as in training."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    upstream: Tensor
    """[T] gradient of the log-probs."""
    old_logprobs: Tensor

    @staticmethod
    def make(shape: tuple[int, int, int], device: str) -> "Problem":
        """Return logits of standard deviation 4, which put most mass on a few words, as a language model does."""
        T, H, V = shape
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        hidden = torch.randn(T, H, generator=generator, device=device).to(dtype).requires_grad_()
        weight = (torch.randn(V, H, generator=generator, device=device) * 4 * H**-0.5).to(dtype).requires_grad_()
        with torch.no_grad():
            chunks = [chunk @ weight.t() for chunk in hidden[:1024].split(256)]
            sampled = torch.cat([torch.multinomial(c.float().softmax(1), 1, generator=generator) for c in chunks])
            targets = sampled[:, 0].repeat(-(-T // len(sampled)))[:T].clone()
        upstream = torch.randn(T, generator=generator, device=device)
        old = -3 * torch.rand(T, generator=generator, device=device)
        return Problem(hidden=hidden, weight=weight, targets=targets, upstream=upstream, old_logprobs=old)

    def product_ms(self, clock: Clock) -> float:
        """Return G, the milliseconds of all logits in the inputs' dtype."""
        hidden, weight = self.hidden.detach(), self.weight.detach()
        out = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)
        return clock.medians({"G": lambda: torch.mm(hidden, weight.t(), out=out)})["G"]

    def errors(self, values: Tensor) -> tuple[float, float]:
        """Return largest and mean error of log-probs on the first 512 tokens."""
        with torch.no_grad():
            logits = self.hidden[:512].double() @ self.weight.double().t()
            exact = logits.log_softmax(1).gather(1, self.targets[:512, None])[:, 0]
        error = (values[:512].double() - exact).abs()
        return float(error.max()), float(error.mean())

    def clipped_loss(self, values: Tensor, _: Tensor, rows: slice) -> Tensor:
        """PPO's clipped objective, the loss of the one-pass rows."""
        ratio, advantages = (values - self.old_logprobs[rows]).exp(), self.upstream[rows]
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def full_logits(p: Problem) -> Tensor:
    """All logits in float32."""
    return (p.hidden @ p.weight.t()).float().log_softmax(1).gather(1, p.targets[:, None])[:, 0]


def _chunk_forward(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = (hidden @ weight.t()).float().log_softmax(1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(1)


def compiled_chunks(p: Problem) -> Tensor:
    """1024 rows at a time under torch.compile; the backward pass recomputes them."""
    function = torch.compile(_chunk_forward)
    parts = [
        torch.utils.checkpoint.checkpoint(function, h, p.weight, t, use_reentrant=False)[0]
        for h, t in zip(p.hidden.split(1024), p.targets.split(1024), strict=True)
    ]
    return torch.cat(parts)


def cut_cross_entropy(p: Problem, **options: object) -> Tensor:
    """Apple's kernel."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(p.hidden, p.weight, p.targets, reduction="none", **options)


def liger(p: Problem) -> Tensor:
    """Liger's fused linear cross-entropy; it has gradients of a mean only, and computes them in forward."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return -LigerFusedLinearCrossEntropyFunction.apply(p.hidden, p.weight, p.targets)[0]


def providers(p: Problem, device: str) -> dict[str, Callable[[], Tensor]]:
    """Return name -> function that computes the log-probs of a problem; only installed packages."""

    def ours(path: logit_passes.Path) -> Callable[[], Tensor]:
        return lambda: logprobs.fused_logprobs(p.hidden, p.weight, p.targets, path=path)[0]

    found: dict[str, Callable[[], Tensor]] = {"ours fused": ours("fused"), "ours chunked": ours("chunked")}
    found["reference"] = lambda: reference.fused_logprobs(p.hidden, p.weight, p.targets)[0]
    found["torch, full logits"] = lambda: full_logits(p)
    if device == "cuda":
        found["torch.compile, chunks"] = lambda: compiled_chunks(p)
    if device == "cuda" and importlib.util.find_spec("cut_cross_entropy"):
        found["cut-cross-entropy"] = lambda: cut_cross_entropy(p)
        found["cut-cross-entropy, exact"] = lambda: cut_cross_entropy(p, filter_eps=None)
        found["torch.compile, full logits"] = lambda: cut_cross_entropy(p, impl="torch_compile")
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        found["liger-kernel"] = lambda: liger(p)
    return found


def one_pass(p: Problem, path: logit_passes.Path) -> Run:
    """Return a function that runs the one-pass token loss and its backward pass."""
    transform = reference.LogitTransform(temperature=1.0, logit_scale=1.0, softcap=None)

    def run() -> None:
        loss, _, _ = token_loss.token_loss(p.hidden, p.weight, None, p.targets, transform, p.clipped_loss, path)
        torch.autograd.grad(loss, (p.hidden, p.weight))

    return run


def own_steps(p: Problem) -> dict[str, Run]:
    """Return name -> function: our forward and backward on the path of this shape, and the one-pass loss."""
    path = logit_passes.choose_path(p.hidden, p.weight)

    def both() -> object:
        values, _ = logprobs.fused_logprobs(p.hidden, p.weight, p.targets, path=path)
        return torch.autograd.grad(values, (p.hidden, p.weight), p.upstream)

    return {f"forward+backward {path}": both, f"token loss {path}": one_pass(p, path)}


def logprob_rows(shape: tuple[int, int, int], clock: Clock, only: str) -> Iterator[Row]:
    """Yield the rows of one shape: forward, forward and backward, and loss with gradients."""
    p, name = Problem.make(shape, clock.device), "x".join(map(str, shape))
    given = {key: value for key, value in providers(p, clock.device).items() if only in key}
    G = p.product_ms(clock)
    yield Row(shape=name, phase="product", provider="cuBLAS", ms=G, ratio=1.0)

    def forward(function: Callable[[], Tensor]) -> Run:
        def run() -> Tensor:
            with torch.no_grad():
                return function()

        return run

    def both(function: Callable[[], Tensor]) -> Run:
        def run() -> object:
            values = function()
            upstream = p.upstream if values.dim() else p.upstream[0]
            return torch.autograd.grad(values, (p.hidden, p.weight), upstream)

        return run

    loss_names: tuple[logit_passes.Path, ...] = ("fused", "chunked")
    runs: dict[str, dict[str, Run]] = {
        "forward": {key: forward(f) for key, f in given.items()},
        "forward+backward": {key: both(f) for key, f in given.items()},
        "token loss": {f"ours {path}": one_pass(p, path) for path in loss_names if only in f"ours {path}"},
    }
    gradient_bytes = (p.hidden.numel() + p.weight.numel()) * p.hidden.element_size()
    for phase, functions in runs.items():
        times = clock.medians(functions)
        for key, ms in times.items():
            errors = (float("nan"), float("nan"))
            if phase == "forward" and key != "liger-kernel":
                with torch.no_grad():
                    errors = p.errors(given[key]())
            results = 8 * shape[0] + (0 if phase == "forward" else gradient_bytes)
            workspace = clock.workspace(functions[key], results)
            yield Row(shape=name, phase=phase, provider=key, ms=ms, ratio=ms / G, workspace_mib=workspace,
                      max_error=errors[0], mean_error=errors[1])  # fmt: skip


def gae_rows(shape: tuple[int, int], clock: Clock, only: str) -> Iterator[Row]:
    """Yield the rows of one [B, T]; the ratio is the fraction of a copy's bandwidth."""
    B, T = shape
    generator = torch.Generator(clock.device).manual_seed(0)
    rewards, values = torch.randn(2, B, T, generator=generator, device=clock.device)
    lengths = torch.randint(T // 2, T + 1, (B, 1), generator=generator, device=clock.device)
    mask = torch.arange(T, device=clock.device) < lengths
    rows = gae_reference.Rows(mask=mask, values=values, token_rewards=rewards)

    def ours() -> Tensor:
        return gae_kernels.scan(rows, 0.99, 0.95, has_moments=False, has_returns=False)[0]

    def whitened() -> Tensor:
        advantages, _, moments = gae_kernels.scan(rows, 0.99, 0.95, has_moments=True, has_returns=True)
        assert moments is not None
        merged = gae_kernels.merge_moments(moments)
        return gae_kernels.whiten(advantages, mask, merged, hybrid_rl_kernels.dispatch.CONSTANT_BOUND)

    source = torch.empty(256 * MIB if clock.device == "cuda" else 1024, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    functions: dict[str, Run] = {"ours": ours, "ours, whitened": whitened, "copy": lambda: target.copy_(source)}
    times = clock.medians({k: f for k, f in functions.items() if only in k or k == "copy"}, cold=True)
    few = Clock(device=clock.device, repeats=3)
    functions["Python loop"] = lambda: reference.gae(rewards, values, mask, 0.99, 0.95)
    times |= few.medians({"Python loop": functions["Python loop"]})
    exact = reference.gae(rewards.double(), values.double(), mask, 0.99, 0.95)
    centred = exact - exact[mask].mean()
    expected = {"ours": exact, "Python loop": exact, "ours, whitened": centred / exact[mask].std(correction=0)}
    bandwidth = 2 * source.numel() / times.pop("copy")
    per_token = {"ours": 13, "Python loop": 13, "ours, whitened": 13 + 4 + 9}  # bytes that must move
    for key, ms in times.items():
        errors = (functions[key]() - expected[key])[mask].abs()
        ratio = per_token[key] * B * T / ms / bandwidth
        yield Row(shape=f"{B}x{T}", phase="gae", provider=key, ms=ms, ratio=ratio, max_error=float(errors.max()),
                  mean_error=float(errors.mean()))  # fmt: skip


def environment(device: str) -> str:
    """Return card and versions as one line."""
    card = torch.cuda.get_device_name() if device == "cuda" else f"CPU {platform.machine()}"
    return f"device {card}, torch {torch.__version__}, triton {triton.__version__}, cuda {torch.version.cuda}"


def write(rows: list[Row], out: Path, device: str) -> None:
    """Write kernels.csv and, where matplotlib is installed, kernels.png."""
    write_csv(out / "kernels.csv", f"# {environment(device)}", [vars(row) for row in rows])
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no plot")
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row.phase, row.shape) for row in rows if row.phase != "product"))
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 1.9 * len(panels)), squeeze=False)
    for axis, (phase, shape) in zip(axes[:, 0], panels, strict=True):
        chosen = [row for row in rows if (row.phase, row.shape) == (phase, shape)]
        axis.barh([row.provider for row in chosen], [row.ratio for row in chosen])
        unit = "share of copy bandwidth" if phase == "gae" else "times one cuBLAS product"
        axis.set(title=f"{phase} {shape}: {unit}")
        axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(out / "kernels.png", dpi=100)


def show(rows: list[Row]) -> None:
    """Print the table."""
    print(
        f"{'shape':>20} {'phase':17} {'provider':28} {'ms':>9} {'ratio':>7} {'MiB':>7} {'max err':>8} {'mean err':>8}"
    )
    for r in rows:
        print(f"{r.shape:>20} {r.phase:17} {r.provider:28} {r.ms:9.3f} {r.ratio:7.3f} {r.workspace_mib:7.0f} "
              f"{r.max_error:8.1e} {r.mean_error:8.1e}")  # fmt: skip


def main() -> None:
    """Parse the command line, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small shapes in Triton's interpreter")
    parser.add_argument("--quick", action="store_true", help="5 repeats in place of 31")
    parser.add_argument("--sweep", action="store_true", help="search the kernels' constants instead of comparing")
    parser.add_argument("--breakdown", action="store_true", help="trace our own kernels instead of comparing")
    parser.add_argument("--only", default="", help="providers whose name holds this")
    parser.add_argument("--shapes", nargs="*", help="TxHxV, or BxT for gae; all when left out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    shapes: list[tuple[int, ...]] = [*TINY_SHAPES, *TINY_GAE_SHAPES] if args.tiny else [*SHAPES, *GAE_SHAPES]
    if args.shapes is not None:
        shapes = [tuple(map(int, text.split("x"))) for text in args.shapes]
    clock = Clock(device=args.device, repeats=5 if args.quick or args.sweep else 2 if args.tiny else 31)
    if args.sweep:
        sweep(shapes, clock, Problem.make, is_tiny=args.tiny)
        return
    if args.breakdown:
        for shape in (shape for shape in shapes if len(shape) == 3):
            p = Problem.make(shape, args.device)
            breakdown("x".join(map(str, shape)), own_steps(p), p.product_ms(clock))
        return
    rows: list[Row] = []
    for shape in shapes:
        rows += logprob_rows(shape, clock, args.only) if len(shape) == 3 else gae_rows(shape, clock, args.only)
    write(rows, args.out, args.device)
    print(environment(args.device))
    show(rows)
    for line in clock.missing:
        print("did not run:", line)
    for name in ("liger_kernel", "cut_cross_entropy"):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed and left out")


if __name__ == "__main__":
    main()
