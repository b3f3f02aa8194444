"""Time weight sync of adapters beside an aliased base against merged copies; prints a table, writes a CSV.

python profiling/bench_adapters.py                                # 1.5B in Qwen2's shape, rank 32, about 100 s on a GPU
python profiling/bench_adapters.py --device cpu --shape tiny      # a dry run

"gap" is the largest |engine - trainer| log-prob of 32 sampled tokens for each of 8 prompts; "tokens/s" is the speed of
64 sequences of 128 tokens, without CUDA graphs.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_memory import milliseconds
from colocated_run import environment_line, write_csv
from random_model import make_tokenizer, shape_config
from transformers import Qwen2ForCausalLM

from hybrid_rl.batch import Prompt, Rollout, make_train_batch, pack
from hybrid_rl.config import LoraConfig, ModelsConfig, OptimizerConfig, RolloutConfig, SyncConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.models.loading import choose_dtype, load_actor
from hybrid_rl.models.lora import adapter_factors, adapter_settings, base_parameters
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.monitoring.recorder import environment
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.adapter_sync import AdapterSync
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.sync import CopySync, WeightSync

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of the adapters to the engine."""

    way: str
    num_bytes: int
    """Bytes that a sync copies."""
    first_ms: float
    """Milliseconds of the first sync, which opens the bucket, records routes and verifies all tensors."""
    ms: float
    """Median milliseconds of later syncs without verification."""
    verified_ms: float
    """The same with eight checksums of the adapters and, with an aliased base, eight of the base."""
    gap: float
    tokens_per_s: float


def measure_gap(engine: VllmEngine, trainer: DeepSpeedEngine, device: torch.device) -> float:
    """Return the largest |engine - trainer| log-prob."""
    sampling = Sampling(temperature=1.0, max_tokens=32, stop_token_ids=())
    prompts = [[(37 * row + 11 * k) % 100 + 1 for k in range(8 + 3 * row)] for row in range(8)]
    found = engine.generate(prompts, sampling, list(range(8)))
    rollouts = [
        Rollout(
            prompt=Prompt(prompt_id=row, text="", token_ids=ids),
            sequence_id=row,
            response_ids=each.token_ids,
            rollout_logprobs=each.logprobs,
            is_truncated=True,
            text="",
        )
        for row, (ids, each) in enumerate(zip(prompts, found, strict=True))
    ]
    packed = pack(make_train_batch(rollouts), list(range(8)), device)
    with torch.no_grad():
        ours, _ = trainer.forward(
            **packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0
        )
    theirs = torch.tensor([value for each in found for value in each.logprobs], device=device)
    return float((ours - theirs).abs().max())


def measure_speed(engine: VllmEngine) -> float:
    """Return the generated tokens per second of 64 sequences."""
    sampling = Sampling(temperature=1.0, max_tokens=128, stop_token_ids=())
    prompts = [[row + 1] * 16 for row in range(64)]
    engine.generate(prompts[:2], sampling, [0, 1])
    began = time.perf_counter()
    engine.generate(prompts, sampling, list(range(64)))
    return 64 * 128 / (time.perf_counter() - began)


def measure(way: str, make: Callable[[SyncConfig], WeightSync], engine: VllmEngine, repeats: int) -> dict[str, Any]:
    """Return bytes and times of syncs without and with verification."""
    found: dict[str, Any] = {"way": way}
    for num_verified, name in ((0, "ms"), (8, "verified_ms")):
        engine.weights_version = 0
        sync = make(SyncConfig(num_verified=num_verified))
        found["first_ms"] = milliseconds(sync.sync)
        found["num_bytes"] = sync.sync().num_bytes
        found[name] = statistics.median(milliseconds(sync.sync) for _ in range(repeats))
    return found


def run_all(world: World, *, shape: str, rank: int, repeats: int, path: Path, ways: list[str]) -> list[Row]:
    """Return the rows, and write them after each way."""
    device, dtype, rows = world.device, choose_dtype("auto", world.device), []
    config = shape_config(shape)
    config.architectures = ["Qwen2ForCausalLM"]
    rollout = RolloutConfig(kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.3, enforce_eager=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        with torch.device(device):
            Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
        make_tokenizer(config.vocab_size).save_pretrained(folder)
        actor = load_actor(folder, ModelsConfig(), device, lora=LoraConfig(rank=rank, alpha=2.0 * rank))
        for factor in adapter_factors(actor.model).values():
            factor.base.data.normal_(std=0.02)
        buffer = AliasBuffer(base_parameters(actor.model), world)
        optimizer = OptimizerConfig(lr=1e-4)
        trainer = DeepSpeedEngine(actor, optimizer, zero_stage=2, total_steps=9, world=world, alias_buffer=buffer)
        adapters = LoraConfig(rank=rank, target_modules=adapter_settings(actor.model)["target_modules"])
        for way in ways:
            given = {"aliased": buffer.export(), "adapters": adapters} if way == "adapters" else {}
            engine = VllmEngine(folder, rollout, dtype=dtype, max_model_len=256, can_sleep=False, seed=0, **given)

            def make(config: SyncConfig, way: str = way, engine: VllmEngine = engine) -> WeightSync:
                if way == "merged":
                    return CopySync(trainer, engine, config, device, Timeline())
                ends = (trainer.base, trainer.adapters, engine, config, device, Timeline())
                return AdapterSync(*ends, alias_buffer=buffer, keeps_base=True)

            times = measure(way, make, engine, repeats)
            gap, speed = measure_gap(engine, trainer, device), measure_speed(engine)
            rows.append(Row(**times, gap=gap, tokens_per_s=speed))
            print(rows[-1], flush=True)
            engine.close()
            write_csv(path, environment_line(environment(world), f"median of {repeats}"), [asdict(r) for r in rows])
    return rows


def main() -> None:
    """Parse the command line, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", default="1.5b", choices=["tiny", "0.5b", "1.5b", "7b"])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--ways", nargs="+", default=["adapters", "merged"], choices=["adapters", "merged"])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    world = join_world()
    if world.device.type != args.device:
        parser.error(f"--device {args.device}: this machine has {world.device.type}")
    sizes = {"shape": args.shape, "rank": args.rank, "repeats": args.repeats, "path": args.out / "adapters.csv"}
    rows = run_all(world, ways=args.ways, **sizes)
    print(f"{'way':10} {'bytes':>14} {'first ms':>9} {'ms':>8} {'verified':>9} {'gap':>9} {'tokens/s':>9}")
    for row in rows:
        print(
            f"{row.way:10} {row.num_bytes:14,} {row.first_ms:9.1f} {row.ms:8.2f} {row.verified_ms:9.2f} "
            f"{row.gap:9.5f} {row.tokens_per_s:9.0f}"
        )


if __name__ == "__main__":
    main()
