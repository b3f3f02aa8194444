"""Measure how a model loads as shards: seconds and GB/s, peaks on the GPU against the plan's formulas, and log-probs.

python profiling/bench_sharding.py models/random_7b --shape 7b --out results.csv
torchrun --nproc-per-node 2 profiling/bench_sharding.py models/random_14b --shape 14b --out results.csv

The model, written first where it is missing, loads as shards and whole; both must give the same log-probs. With
--train, it also loads as an actor at ZeRO-3 and takes two optimizer steps.
"""

import argparse
import csv
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from random_model import SHAPES, write_model

from hybrid_rl.batch import Packed, Prompt, Rollout, make_train_batch, pack
from hybrid_rl.config import Config, ModelsConfig, UpdateConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.deepspeed.sharding import frozen_sharder, trained_sharder
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.planning.footprint import Sharding, engine_footprint
from hybrid_rl.planning.shapes import read_shape

T = TypeVar("T")
LENGTH = 512
"""Tokens of a sequence."""


class Report:
    """Rows of (quantity, measured, planned), printed by rank 0 and written as CSV."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rows: list[tuple[str, float, float | None]] = []

    def add(self, name: str, measured: float, planned: float | None = None) -> None:
        """Add the largest value of all ranks."""
        largest = max(self._world.all_gather(float(measured)))
        self.rows.append((name, largest, planned))
        if self._world.is_main:
            share = "" if planned is None else f"   planned {planned:.2f}, {largest / planned:.1%} of it"
            print(f"{name:55} {largest:10.3f}{share}", flush=True)

    def measure(self, name: str, work: Callable[[], T], *, num_bytes: float | None = None) -> tuple[T, float]:
        """Return the result of the work and the GiB that the GPU held at its peak, beside what it held before."""
        gc.collect()
        torch.cuda.empty_cache()
        self._world.barrier()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.monotonic()
        result = work()
        torch.cuda.synchronize()
        self._world.barrier()
        seconds = time.monotonic() - start
        self.add(f"{name}: seconds", seconds)
        if num_bytes:
            self.add(f"{name}: GB/s of the files, all ranks together", num_bytes / seconds / 1e9)
        return result, (torch.cuda.max_memory_allocated() - before) / 2**30


def make_packed(world: World) -> Packed:
    """Return a micro-batch of two sequences, different on every rank."""
    generator = torch.Generator().manual_seed(world.rank)
    ids = torch.randint(30, 128, (2, LENGTH), generator=generator).tolist()
    rollouts = [
        Rollout(
            prompt=Prompt(prompt_id=i, text="", token_ids=row[:8]),
            sequence_id=i,
            response_ids=row[8:],
            rollout_logprobs=[-1.0] * (LENGTH - 8),
            is_truncated=False,
            text="",
        )
        for i, row in enumerate(ids)
    ]
    return pack(make_train_batch(rollouts), [0, 1], world.device)


def inputs_of(packed: Packed) -> dict[str, Any]:
    """Return the arguments of an actor's forward."""
    return {**packed_inputs(packed), "index": packed.response_index, "targets": packed.targets, "temperature": 1.0}


def measure_frozen(folder: str, config: Config, world: World, report: Report) -> None:
    """Load a frozen model as shards and whole, and compare their log-probs."""
    shape = read_shape(folder, field="models.actor", is_policy=True)
    num_bytes = 2 * shape.num_params
    inputs, whole_gib = inputs_of(make_packed(world)), num_bytes / 2**30

    def load(*, is_sharded: bool) -> Any:
        sharder = frozen_sharder(config, world, is_sharded=is_sharded)
        return load_actor(folder, config.models, world.device, sharder=sharder).requires_grad_(False)

    sharded, peak = report.measure("load as shards", lambda: load(is_sharded=True), num_bytes=num_bytes)
    gathered = 2 * shape.gathered_elements / 2**30 if world.size > 1 else 0.0
    report.add("load as shards: peak GiB", peak, whole_gib / world.size + gathered)
    with torch.no_grad():
        for _ in range(2):  # the second forward prefetches
            (found, _), peak = report.measure("forward of shards", lambda: sharded(**inputs))
    report.add("forward of shards: peak GiB", peak)
    whole, peak = report.measure("load whole", lambda: load(is_sharded=False), num_bytes=num_bytes * world.size)
    report.add("load whole: peak GiB", peak, whole_gib)
    with torch.no_grad():
        (expected, _), _ = report.measure("forward of the whole model", lambda: whole(**inputs))
    report.add("largest difference of log-probs", float((found - expected).abs().max()))


def measure_training(folder: str, config: Config, world: World, report: Report) -> None:
    """Load an actor as shards, make its optimizer, and take two steps."""
    shape, optimizer = read_shape(folder, field="models.actor", is_policy=True), config.update.actor
    sharding = Sharding(zero_stage=3, num_ranks=world.size, dtype_bytes=2, optimizer=optimizer)
    part = engine_footprint(shape, sharding, num_trained=shape.num_params)

    def make() -> DeepSpeedEngine:
        actor = load_actor(folder, config.models, world.device, sharder=trained_sharder(config, world, "actor"))
        return DeepSpeedEngine(actor, optimizer, zero_stage=3, total_steps=9, world=world)

    engine, peak = report.measure("load and make the optimizer", make)
    planned = part.parameter_bytes + part.optimizer_bytes + part.initial_gradient_bytes
    report.add("load and make the optimizer: peak GiB", peak, planned / 2**30)
    packed = make_packed(world)
    for number in range(2):
        torch.cuda.reset_peak_memory_stats()
        logprobs, _ = engine.forward(**inputs_of(packed))
        engine.backward(-logprobs.sum() / len(logprobs), is_last=True)
        norm = engine.step()
        report.add(f"step {number + 1}: gradient norm", norm)
        report.add(f"step {number + 1}: peak GiB of the process", torch.cuda.max_memory_allocated() / 2**30)


def main() -> None:
    """Parse the command line, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="7b", choices=SHAPES)
    parser.add_argument("--train", action="store_true", help="also train at ZeRO-3")
    parser.add_argument("--out", type=Path, help="CSV file of the results")
    arguments = parser.parse_args()
    world = join_world()
    world.run_on_main(lambda: write_model(arguments.folder, arguments.shape, 256, has_reward=False))
    torch.set_default_dtype(torch.float32)  # which write_model changes
    folder = str(arguments.folder / "policy")
    models = ModelsConfig(actor=folder, dtype="bfloat16")
    config, report = Config(models=models, update=UpdateConfig(zero_stage=3)), Report(world)
    measure_frozen(folder, config, world, report)
    if arguments.train:
        models = replace(models, gradient_checkpointing=True)
        measure_training(folder, replace(config, models=models), world, report)
    if arguments.out and world.is_main:
        with arguments.out.open("w", newline="") as file:
            csv.writer(file).writerows([("quantity", "measured", "planned"), *report.rows])


if __name__ == "__main__":
    main()
