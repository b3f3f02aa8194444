"""Measure collectives between ranks, in bytes per second, GPU and direction: the simulator's rates of links.

python -m torch.distributed.run --standalone --nproc-per-node 2 profiling/bench_links.py
... --megabytes 1 --repeats 3    # a dry run on a CPU

DeepSpeed reduces 50 million bfloat16 elements, 100 MB, at once. A ring of W ranks sends (W - 1) / W of the bytes over
each link for a gather, and twice that for an all-reduce.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from bench_memory import milliseconds
from colocated_run import environment_line, table, write_csv

from hybrid_rl.distributed import World, join_world, leave_world
from hybrid_rl.monitoring.recorder import environment

HERE = Path(__file__).resolve().parent


def slowest_ms(world: World, collective: Callable[[], object]) -> float:
    """Return the seconds of a collective on the slowest rank."""
    world.barrier()
    return max(world.all_gather(milliseconds(collective)))


def collectives(world: World, num_bytes: int) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Yield name, bytes over each link, and the function to time."""
    whole = torch.ones(num_bytes // 4 // world.size * world.size, device=world.device)
    part = torch.empty(len(whole) // world.size, device=world.device)
    sent = whole.nbytes * (world.size - 1) / world.size
    yield "all-reduce", 2 * sent, lambda: dist.all_reduce(whole)
    if world.device.type == "cuda":  # gloo cannot
        yield "reduce-scatter", sent, lambda: dist.reduce_scatter_tensor(part, whole)
    yield "all-gather", sent, lambda: dist.all_gather_into_tensor(whole, part)
    yield "broadcast", whole.nbytes, lambda: dist.broadcast(whole, 0)


def main() -> None:
    """Time each collective; rank 0 prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 200, 3000])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    world = join_world()
    rows = []
    for megabytes in arguments.megabytes:
        for name, sent, collective in collectives(world, megabytes * 10**6):
            ms = statistics.median([slowest_ms(world, collective) for _ in range(arguments.repeats + 1)][1:])
            rows.append({"what": name, "megabytes": megabytes, "ms": ms, "gb_per_s": sent / ms / 1e6})
    if world.is_main:
        line = environment_line(environment(world), f"median of {arguments.repeats}")
        write_csv(arguments.out / "links.csv", line, rows)
        print(*table(rows), sep="\n")
    leave_world()


if __name__ == "__main__":
    main()
