"""Time releases and restores of GPU memory, all mechanisms in one process; prints a table, writes memory.csv.

python profiling/bench_memory.py                      # 1.5 billion parameters, 12 bytes of states each
python profiling/bench_memory.py --size 500000000     # another number
python profiling/bench_memory.py --chunks 32 128 512  # MiB that the pool maps, unmaps and copies at a time
python profiling/bench_memory.py --tiny               # a dry run of a second, on a GPU too

Without an installation: cmake -S . -B build && cmake --build build, and PYTHONPATH=.:kernels. Bandwidths are
compared with those of one large copy to and from pinned memory in the same run.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from colocated_run import environment_line, write_csv
from torch import Tensor, nn

from hybrid_rl.config import Config, MemoryConfig, OptimizerConfig
from hybrid_rl.distributed import join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.tenants import OptimizerTenant, Tenants
from hybrid_rl.memory.tenants import PooledTenant, Tenant
from hybrid_rl.monitoring.recorder import environment
from hybrid_rl_kernels.vmm_pool import Region, VmmPool, pool_of, released_bytes

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    provider: str
    gib: float
    ms: float
    """Median; a first release has one value."""
    ratio: float = float("nan")
    of: str = ""
    """What `ratio` compares with: the bandwidth of a pinned copy, or the time of another row."""

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second."""
        return self.gib * GIB / self.ms / 1e6 if self.ms else float("nan")


def milliseconds(function: Callable[[], object]) -> float:
    """Return the milliseconds of a function, including its work on the GPU."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return (time.perf_counter() - start) * 1e3


def in_turns(out: Callable[[], object], back: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of two functions that undo each other."""
    times = [(milliseconds(out), milliseconds(back)) for _ in range(repeats)]
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def pinned(num_bytes: int, repeats: int) -> list[Row]:
    """Return the bandwidth of pinned copies out and back, and of both at once."""
    gpu = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    start = time.perf_counter()
    host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pinning = (time.perf_counter() - start) * 1e3
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        for stream, target, source in zip(streams, (host[0], gpu[1]), (gpu[0], host[1]), strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    out, back = in_turns(
        lambda: host[0].copy_(gpu[0], non_blocking=True), lambda: gpu[0].copy_(host[0], non_blocking=True), repeats
    )
    together, _ = in_turns(both, lambda: None, repeats)
    size = num_bytes / GIB
    return [
        Row(what="pinned copy out", provider="torch", gib=size, ms=out),
        Row(what="pinned copy back", provider="torch", gib=size, ms=back),
        Row(what="pinned copies both ways", provider="torch", gib=2 * size, ms=together),
        Row(what="pinning", provider="torch", gib=2 * size, ms=pinning),
    ]


@dataclass(frozen=True, kw_only=True)
class Bus:
    """Bandwidths of pinned copies in this run, in GB/s; other rows are compared with them."""

    out: float
    back: float

    def row(self, what: str, num_bytes: int, ms: float, *, is_out: bool, provider: str = "VmmPool") -> Row:
        """Return a row whose ratio is the fraction of the pinned bandwidth in its direction."""
        row = Row(what=what, provider=provider, gib=num_bytes / GIB, ms=ms)
        share = row.gb_per_s / (self.out if is_out else self.back)
        return Row(**vars(row) | {"ratio": share, "of": "pinned bandwidth"})


def filled(pool: VmmPool, name: str, num_bytes: int, policy: str) -> tuple[Region, Tensor]:
    """Return a region of the pool and the tensor that fills it."""
    region = pool.region(name, policy=policy)  # type: ignore[arg-type]
    with region:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return region, tensor.fill_(7)


def copies(pool: VmmPool, num_bytes: int, bus: Bus, repeats: int) -> Iterator[Row]:
    """Yield the pool's first and steady moves of one region, and of two in opposite directions."""
    critic, tensor = filled(pool, "critic", num_bytes, "copy")
    size = critic.num_bytes
    first = milliseconds(critic.release)
    yield Row(what="first release, pinning included", provider="VmmPool", gib=size / GIB, ms=first)
    critic.restore()
    out, back = in_turns(critic.release, critic.restore, repeats)
    yield bus.row("release", size, out, is_out=True)
    yield bus.row("restore", size, back, is_out=False)
    assert bool((tensor[:: 1 << 16] == 7).all())
    critic.release()
    actor, other = filled(pool, "actor", num_bytes, "copy")
    yield from reserved(pool, actor, first)
    critic.restore()
    forth, again = in_turns(lambda: pool.exchange(critic, actor), lambda: pool.exchange(actor, critic), repeats)
    ms = (forth + again) / 2
    yield Row(what="exchange", provider="VmmPool", gib=2 * size / GIB, ms=ms, ratio=(out + back) / ms, of="one by one")
    del tensor, other
    give_back(critic, actor)


def reserved(pool: VmmPool, region: Region, unreserved_ms: float) -> Iterator[Row]:
    """Yield a first release into host memory that a thread has pinned, as a run does while the engine starts."""
    pool.reserve_host(region.num_bytes)
    while not pool.reserve.pinning_s:
        time.sleep(0.01)
    first, gib = milliseconds(region.release), region.num_bytes / GIB
    pinning_ms, waited_ms = 1e3 * pool.reserve.pinning_s, 1e3 * pool.reserve.waited_s
    yield Row(what="pinning on a thread", provider="VmmPool", gib=gib, ms=pinning_ms)
    yield Row(what="of that waited for in the release", provider="VmmPool", gib=gib, ms=waited_ms)
    what, of = "first release, pinned on a thread", "pinning included"
    yield Row(what=what, provider="VmmPool", gib=gib, ms=first, ratio=unreserved_ms / first, of=of)


def give_back(*regions: Region) -> None:
    """Free the memory of regions whose tensors are gone."""
    for region in regions:
        region._mem_pool = None
    gc.collect()
    torch.cuda.empty_cache()


def drops(pool: VmmPool, num_bytes: int, repeats: int) -> Iterator[Row]:
    """Yield the time to give memory back and to take it again without contents."""
    region, tensor = filled(pool, "gradients", num_bytes, "drop")
    out, back = in_turns(region.release, region.restore, repeats)
    for what, ms in (("drop release", out), ("drop restore", back), ("drop release + restore", out + back)):
        yield Row(what=what, provider="VmmPool", gib=num_bytes / GIB, ms=ms)
    del tensor
    give_back(region)


class Layers(nn.Module):
    """Square bfloat16 matrices with about the given number of elements."""

    def __init__(self, num_elements: int, width: int) -> None:
        super().__init__()
        layers = [nn.Linear(width, width, bias=False) for _ in range(max(1, num_elements // width**2))]
        self.model = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number."""
        return self.model(inputs).float().square().mean()


def offloads(num_elements: int, width: int, bus: Bus, repeats: int) -> Iterator[Row]:
    """Yield DeepSpeed's offload of a ZeRO-2 engine, then the pool's moves of the same engine."""
    world = join_world()
    with torch.device("cuda"):
        module = Layers(num_elements, width).to(torch.bfloat16)
    engine = DeepSpeedEngine(module, OptimizerConfig(), zero_stage=2, total_steps=10, world=world)
    engine.backward(engine.forward(inputs=torch.randn(8, width, device="cuda", dtype=torch.bfloat16)), is_last=True)
    engine.step()
    size = engine.optimizer_bytes()
    theirs = OptimizerTenant(engine)
    yield Row(what="first release of states", provider="DeepSpeed", gib=size / GIB, ms=milliseconds(theirs.release))
    theirs.restore()
    steady = in_turns(theirs.release, theirs.restore, repeats)
    yield bus.row("release of states", size, steady[0], is_out=True, provider="DeepSpeed")
    yield bus.row("restore of states", size, steady[1], is_out=False, provider="DeepSpeed")

    makes = Tenants(Config(memory=MemoryConfig(swap="vmm")), world.device)
    parts: dict[str, Tenant] = {
        "states": makes.optimizer("actor", engine),
        "weights": makes.parameters("actor", engine, is_aliased=False),
    }
    for name, tenant in parts.items():
        assert isinstance(tenant, PooledTenant)
        moved, first = tenant.kept.num_bytes, milliseconds(tenant.release)
        yield Row(what=f"first release of {name}", provider="VmmPool", gib=moved / GIB, ms=first)
        tenant.restore()
        ours = in_turns(tenant.release, tenant.restore, repeats)
        yield bus.row(f"release of {name}", moved, ours[0], is_out=True)
        yield bus.row(f"restore of {name}", moved, ours[1], is_out=False)
        if name == "states":
            for what, them, us in zip(("release", "restore"), steady, ours, strict=True):
                gib, of = moved / GIB, f"DeepSpeed's {what}"
                yield Row(what=f"{what} of states, times", provider="VmmPool", gib=gib, ms=us, ratio=them / us, of=of)
    yield from left_over(parts)


def left_over(parts: dict[str, Tenant]) -> Iterator[Row]:
    """Yield the device memory that remains when a trainer's states and weights are released."""
    for tenant in parts.values():
        tenant.release()
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved() - released_bytes()
    free, total = torch.cuda.mem_get_info()
    used = (total - free) / GIB
    yield Row(what="left on the device, contexts included", provider="VmmPool", gib=used, ms=float("nan"))
    yield Row(what="left in PyTorch's own cache", provider="VmmPool", gib=reserved / GIB, ms=float("nan"))


def chunks(sizes: list[int], num_bytes: int) -> None:
    """Run this script once for each chunk size, because a process has one pool."""
    for size in sizes:
        print(f"chunks of {size} MiB")
        arguments = ["--chunk", str(size), "--size", str(num_bytes // 12)]
        subprocess.run([sys.executable, __file__, *arguments], check=True)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the whole table."""
    unit = MIB if arguments.tiny else GIB
    num_bytes = 12 * arguments.size
    device = torch.device("cuda", torch.cuda.current_device())
    rows = pinned(4 * unit, arguments.repeats)
    yield from rows
    bus = Bus(out=rows[0].gb_per_s, back=rows[1].gb_per_s)
    torch.cuda.empty_cache()
    pool = pool_of(device) if arguments.chunk is None else VmmPool(device, chunk_bytes=arguments.chunk * MIB)
    yield from drops(pool, 20 * unit, arguments.repeats)
    yield from copies(pool, num_bytes, bus, arguments.repeats)
    if not arguments.only_pool:
        yield from offloads(arguments.size, 64 if arguments.tiny else 4096, bus, arguments.repeats)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1_543_714_304, help="parameters; the default is Qwen2.5-1.5B's")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--chunks", type=int, nargs="+", help="sizes in MiB to compare, without DeepSpeed")
    parser.add_argument("--chunk", type=int, help="MiB, instead of the pool's default")
    parser.add_argument("--only-pool", action="store_true", help="without DeepSpeed, and without a file")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.size, arguments.repeats = 1_000_000, 3
    if arguments.chunks:
        return chunks(arguments.chunks, 12 * arguments.size)
    if not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no GPU")
    arguments.only_pool |= arguments.chunk is not None  # the trainer's tenants make a pool of their own
    line = environment_line(environment(join_world()))
    print(line)
    rows = []
    for row in measure(arguments):
        rows.append(row)
        ratio = "" if row.ratio != row.ratio else f"{row.ratio:6.2f} x {row.of}"
        print(f"{row.what:38} {row.provider:10} {row.gib:7.2f} GiB {row.ms:9.2f} ms {row.gb_per_s:7.1f} GB/s {ratio}")
    if not arguments.only_pool:
        columns = ("what", "provider", "gib", "ms", "gb_per_s", "ratio", "of")
        lines = [{column: getattr(row, column) for column in columns} for row in rows]
        write_csv(arguments.out / "memory.csv", line, lines)
    return None


if __name__ == "__main__":
    main()
