"""Time generation alone: microseconds per sampled token, with responses sent whole and as vLLM sends them.

python profiling/bench_rollout.py                            # 1.5B, 256 + 512 tokens, 512 and 128 responses at once
python profiling/bench_rollout.py --kinds whole "two processes"        # scheduling and launching side by side
python profiling/bench_rollout.py --kinds whole --responses 128 --trace       # which kernels a decode step goes to
python profiling/bench_rollout.py --shape tiny --responses 16 --prompt-tokens 8 --response-tokens 16      # dry run, CPU

Random weights end no response early. The first generation of each kind is a warm-up and not counted.
"""

import argparse
import collections
import gzip
import json
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from colocated_run import HERE, ROOT, environment_line, make_model, table, write_csv

from hybrid_rl.config import RolloutConfig
from hybrid_rl.distributed import join_world
from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.engines.vllm.sampling import sampling_params
from hybrid_rl.monitoring.recorder import environment


class TokenByToken(VllmEngine):
    """An engine with vLLM's own scheduler, which sends every token at once."""

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt, whose log-probs vLLM returns."""
        parameters = [
            sampling_params(sampling, seed, num_requests=len(prompts)) for seed in seeds or [None] * len(prompts)
        ]
        for of_request in parameters:
            of_request.flat_logprobs = True
        answers = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
        outputs = [answer.outputs[0] for answer in answers]
        return [
            Generation(
                token_ids=list(output.token_ids),
                logprobs=list(output.logprobs.logprobs),
                is_truncated=output.finish_reason == "length",
            )
            for output in outputs
        ]


TRACED_STEPS = 20
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that are work of the device."""
KINDS: dict[str, tuple[type[VllmEngine], dict[str, Any]]] = {
    "whole": (VllmEngine, {}),
    "two processes": (VllmEngine, {"distributed_executor_backend": "mp"}),
    "token by token": (TokenByToken, {"scheduler_cls": None}),
}
"""The engine's class, and what vLLM is started with in other ways than by it."""


def start(kind: str, model: str, arguments: argparse.Namespace) -> VllmEngine:
    """Return an engine that may generate with its random weights."""
    import vllm

    engine_class, changes = KINDS[kind]
    if arguments.trace:  # in the middle of a generation, when all sequences decode
        profiler = {
            "profiler": "torch",
            "torch_profiler_dir": str(arguments.work.resolve() / "trace"),
            "torch_profiler_with_stack": False,
        }
        steps = {"delay_iterations": arguments.response_tokens // 2, "max_iterations": TRACED_STEPS}
        changes = changes | {"profiler_config": profiler | steps}
    config = RolloutConfig(
        max_num_seqs=max(arguments.responses),
        kv_cache_memory_bytes=int(arguments.kv_gib * (1 << 30)),
        enforce_eager=arguments.enforce_eager,
    )
    make = vllm.LLM
    with mock.patch("vllm.LLM", lambda **given: make(**given | changes)):
        engine = engine_class(
            model,
            config,
            dtype=torch.bfloat16,
            max_model_len=arguments.prompt_tokens + arguments.response_tokens,
            can_sleep=False,
            seed=0,
        )
    engine._weights_valid = True  # its own random ones are as good as any
    return engine


def seconds(engine: VllmEngine, prompts: list[list[int]], arguments: argparse.Namespace, *, has_seeds: bool) -> float:
    """Return the median time of a generation of a response to each prompt."""
    length = arguments.response_tokens
    sampling = Sampling(temperature=1.0, max_tokens=length, stop_token_ids=())
    times = []
    for repeat in range(arguments.repeats + 1):
        seeds = [repeat * len(prompts) + i for i in range(len(prompts))] if has_seeds else None
        begin = time.monotonic()
        found = engine.generate(prompts, sampling, seeds)
        times.append(time.monotonic() - begin)
        assert all(len(g.token_ids) == len(g.logprobs) == length for g in found)
    return statistics.median(times[1:])


def busy_and_wall(events: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Return for how long any of the events of a trace goes on, and from the start of the first to the last's end."""
    events = sorted(events, key=lambda event: event["ts"])
    busy, end = 0.0, events[0]["ts"]
    for event in events:
        busy += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    return busy, end - events[0]["ts"]


def trace(engine: VllmEngine, prompts: list[list[int]], arguments: argparse.Namespace) -> None:
    """Print what the device and CUDA's runtime do in a decode step, and for how much of it the device works."""
    config = engine.llm.llm_engine.vllm_config.profiler_config
    before = set(Path(config.torch_profiler_dir).glob("*.json.gz"))
    engine.llm.start_profile()
    seconds(engine, prompts, argparse.Namespace(**vars(arguments) | {"repeats": 1}), has_seeds=True)
    engine.llm.stop_profile()
    events: list[dict[str, Any]] = []
    for path in set(Path(config.torch_profiler_dir).glob("*.json.gz")) - before:
        with gzip.open(path) as file:
            events += [event for event in json.load(file)["traceEvents"] if "dur" in event]
    device = [event for event in events if event["cat"] in DEVICE]
    if not device:
        print("no work of a GPU in the trace", flush=True)
        return
    (busy, wall), scale = busy_and_wall(device), 1e-3 / TRACED_STEPS
    print(f"a decode step of {len(prompts)}: {wall * scale:.2f} ms, the device works {busy * scale:.2f} ms of them")
    for category in (DEVICE, ("cuda_runtime", "cuda_driver")):
        totals: collections.Counter[str] = collections.Counter()
        counts: collections.Counter[str] = collections.Counter()
        for event in events:
            if event["cat"] in category:
                totals[event["name"]] += event["dur"]
                counts[event["name"]] += 1
        rows = [
            {"name": name[:90], "ms a step": us * scale, "calls a step": counts[name] / TRACED_STEPS}
            for name, us in totals.most_common(25)
        ]
        print("", *table(rows), sep="\n", flush=True)


def main() -> None:
    """Parse the command line, measure each kind, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b", help="of random weights, see random_model.py")
    parser.add_argument("--kinds", nargs="+", default=["whole", "token by token"], choices=KINDS)
    parser.add_argument("--responses", type=int, nargs="+", default=[512, 128], help="at once")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=16.0 if torch.cuda.is_available() else 0.25)
    parser.add_argument(
        "--trace",
        action="store_true",
        help="of some decode steps, into the folder trace of --work; no times are measured then",
    )
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: the engine starts 30 s sooner")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench", help="folder of models and runs")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # the first look at a GPU forbids to fork
    paths = make_model(arguments.shape, arguments.work, prompt_tokens=arguments.prompt_tokens)
    lines = [json.loads(line)["prompt"] for line in Path(paths["prompts"]).read_text().splitlines()]
    prompts = [[ord(letter) - ord("a") + 1 for letter in line] for line in lines]  # as random_model.py's tokenizer
    size = f"{arguments.shape}, {arguments.prompt_tokens} + {arguments.response_tokens} tokens"
    line = environment_line(environment(join_world()), size, f"median of {arguments.repeats}")
    rows: list[dict[str, Any]] = []
    for name in arguments.kinds:
        engine = start(name, paths["actor"], arguments)
        for count in arguments.responses:
            if arguments.trace:
                print(line)
                trace(engine, prompts[:count], arguments)
                continue
            for has_seeds in (True, False):
                took = seconds(engine, prompts[:count], arguments, has_seeds=has_seeds)
                row = {"kind": name, "at once": count, "seeds": has_seeds, "seconds": took}
                row["us_per_token"] = 1e6 * took / count / arguments.response_tokens
                rows.append(row | {"tokens_per_s": 1e6 / row["us_per_token"]})
                print(f"{name}, {count} at once, seeds {has_seeds}: {took:.2f} s", flush=True)
                write_csv(arguments.out / "rollout.csv", line, rows)  # whole at any time: a run may be cut off
        engine.close()
    if rows:
        print("", *table(rows), sep="\n")


if __name__ == "__main__":
    main()
