"""Time the trainer without an engine on one GPU: log-probs and updates, by micro-batch size.

python profiling/bench_update.py                                    # 1.5B, 64 x (256 + 512) tokens, ZeRO-2
python profiling/bench_update.py --tokens 8192 --trace               # time by kernel, and gaps between kernels
python profiling/bench_update.py --shape tiny --sequences 8 --prompt-tokens 8 --response-tokens 8    # CPU, a dry run

Operations are counted as in the simulator, an update as three forwards. `allocated` and `reserved` are the peaks of
PyTorch's allocator; their difference is fragmentation.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_memory import milliseconds
from colocated_run import ROOT, environment_line, make_model, table, write_csv
from torch.profiler import ProfilerActivity, profile

from hybrid_rl.batch import Prompt, Rollout, TrainBatch, make_train_batch
from hybrid_rl.config import ModelsConfig, OptimizerConfig, UpdateConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.models.loading import load_actor
from hybrid_rl.monitoring.recorder import environment
from hybrid_rl.planning.shapes import read_shape
from hybrid_rl.steps.logprobs import Packing, token_logprobs
from hybrid_rl.steps.updates import update_actor

GIB = 1 << 30


def make_batch(num: int, prompt_tokens: int, response_tokens: int, vocab_size: int) -> TrainBatch:
    """Return sequences of random tokens with advantages of both signs."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (num, prompt_tokens + response_tokens), generator=draw).tolist()
    rollouts = [
        Rollout(
            prompt=Prompt(prompt_id=i, text="", token_ids=row[:prompt_tokens]),
            sequence_id=i,
            response_ids=row[prompt_tokens:],
            rollout_logprobs=[],
            is_truncated=True,
            text="",
        )
        for i, row in enumerate(ids)
    ]
    batch = make_train_batch(rollouts)
    return batch.with_fields(
        old_logprobs=torch.zeros(batch.response_mask.shape),
        advantages=torch.randn(batch.response_mask.shape, generator=draw),
    )


def peaks(device: torch.device) -> dict[str, float]:
    """Return the allocator's peaks since the last call, then reset them and empty its cache."""
    if device.type == "cpu":
        return {}
    found = {"allocated_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {name: num_bytes / GIB for name, num_bytes in found.items()}


def trace(run: Callable[[], object], device: torch.device) -> None:
    """Print a function's time by kernel, and the time in which the GPU works."""
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        wall = milliseconds(run) / 1e3
    rows = profiler.key_averages()
    busy = sum(row.self_device_time_total for row in rows) / 1e6
    print(rows.table(sort_by=f"self_{'cuda' if is_cuda else 'cpu'}_time_total", row_limit=40, max_name_column_width=70))
    print(f"busy {busy:.3f} s of {wall:.3f} s\n")


def measure(arguments: argparse.Namespace, path: str, world: World) -> Iterator[dict[str, Any]]:
    """Yield a row for each micro-batch size and kind of work: its second run, because the first one compiles."""
    models = ModelsConfig(actor=path, attention=arguments.attention, fused_layers=arguments.fused_layers)
    shape = read_shape(path, field="models.actor", is_policy=True)
    actor = load_actor(path, models, world.device, field="models.actor")
    engine = DeepSpeedEngine(
        actor, OptimizerConfig(lr=1e-6), zero_stage=arguments.zero_stage, total_steps=1000, world=world
    )
    length, num = arguments.prompt_tokens + arguments.response_tokens, arguments.sequences
    batch = make_batch(num, arguments.prompt_tokens, arguments.response_tokens, shape.vocab_size)
    flops = shape.forward_flops(num * length, length) + shape.head_flops(num * arguments.response_tokens)
    for tokens in arguments.tokens:
        config = UpdateConfig(mini_batch_size=num, micro_batch_tokens=tokens)

        def score(tokens: int = tokens) -> None:
            token_logprobs(engine.forward, batch, Packing(limit=TokenLimit(tokens), world=world), temperature=1.0)

        def update(config: UpdateConfig = config) -> None:
            update_actor(
                engine, batch, config, world, seed=0, temperature=1.0, max_response_tokens=arguments.response_tokens
            )

        for what, run, share in (("log-probs", score, 1), ("update", update, 3)):
            first = milliseconds(run) / 1e3
            peaks(world.device)
            time_s = milliseconds(run) / 1e3
            row = {
                "work": what,
                "fused_layers": arguments.fused_layers,
                "micro_batch_tokens": tokens,
                "first_s": first,
                "seconds": time_s,
            }
            row |= {"tokens_per_s": num * length / time_s, "tflops": share * flops / time_s / 1e12}
            yield row | peaks(world.device)
            if arguments.trace:
                trace(run, world.device)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b", help="of random weights, see random_model.py")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="micro-batch sizes")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--fused-layers", default="auto", choices=["auto", "liger", "off"])
    parser.add_argument("--zero-stage", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--name", default="update", help="of the file under results/")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench", help="folder of models")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    path = make_model(arguments.shape, arguments.work, prompt_tokens=arguments.prompt_tokens)["actor"]
    world = join_world()
    line = environment_line(environment(world), arguments.shape)
    rows = []
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        for row in measure(arguments, path, world):
            rows.append(row)
            print(*table([row]), sep="\n", flush=True)
    if not rows:
        sys.exit("error: not even the smallest micro-batch fits")
    write_csv(arguments.out / f"{arguments.name}.csv", line, rows)
    print("", line, *table(rows), sep="\n")


if __name__ == "__main__":
    main()
