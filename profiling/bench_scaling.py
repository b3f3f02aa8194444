"""Run one config on 1, 2 and 4 GPUs of a node with the same global batch: tokens/s per GPU, efficiency, loss curves.

python profiling/bench_scaling.py                                      # GRPO, 1.5B, 512 x (256 + 512) tokens, ZeRO-2
python profiling/bench_scaling.py --zero-stage 3 --sync copy --name scaling_zero3
python profiling/bench_scaling.py --gpus 2 4 --tensor-parallel 2 --sync copy --name scaling_tp2
python profiling/bench_scaling.py --shape tiny --gpus 1 2 --responses 16 --prompt-tokens 8 --response-tokens 8  # CPU

The default micro-batches need a card of 140 GiB. --micro-batch-tokens 8192 fits 80 GiB, but then the 128 sequences of
an optimizer step are 13 micro-batches on one GPU and 4 on each of four, which bounds the efficiency at 81 %. With
--enforce-eager a decode step takes as long for few sequences as for many, so more GPUs do not shorten it.

The script runs launch/colocated.py and reads the run's files. Step 1 compiles and pins memory, and is not counted.
Every response is sampled with its own seed, on any number of GPUs. Where rounding flips a token, the rest of that
response and its reward differ. The largest difference of the rewards is therefore also given in standard errors of a
step's mean, together with the fraction of responses that are the same in both runs.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import yaml
from colocated_run import (
    PHASES,
    RunFailedError,
    RunResult,
    add_arguments,
    base_settings,
    find_model,
    median,
    run_colocated,
    table,
    write_csv,
)

LEAST_S = 1e-3
"""Seconds below which a phase did nothing, such as the critic's in a run without a critic."""
CURVES = ("reward", "actor/loss", "actor/entropy", "actor/grad_norm", "rollout/logprob_gap")


def settings(arguments: argparse.Namespace, paths: Mapping[str, str], num_gpus: int) -> dict[str, Any]:
    """Return the run's settings; an engine spans the requested number of GPUs, at most those of the run."""
    found = base_settings(arguments, paths)
    found["rollout"]["tensor_parallel_size"] = min(num_gpus, arguments.tensor_parallel)
    kl = {"kl_coef": arguments.kl, "kl_in": "loss", "kl_estimator": "k3"}
    found["advantage"] = {"estimator": "grpo", **kl}
    found["update"]["actor"] = {"lr": arguments.lr}
    return found


def num_tokens(rows: Sequence[Mapping[str, float]], responses: int, prompt_tokens: int) -> float:
    """Return prompt and response tokens of a step, all ranks."""
    return responses * (prompt_tokens + median(rows, "rollout/response_length"))


def speed_rows(runs: Mapping[int, RunResult], *, responses: int, prompt_tokens: int) -> list[dict[str, Any]]:
    """Return a row for each number of GPUs and phase: seconds, tokens/s per GPU, efficiency against the fewest GPUs.

    The batch is the same, so efficiency is time x GPUs of the run with the fewest GPUs, divided by time x GPUs.
    """
    found = []
    fewest, base = min(runs), runs[min(runs)].rows[1:]
    for num_gpus, left in runs.items():
        rows = left.rows[1:]
        tokens = num_tokens(rows, responses, prompt_tokens)
        for phase in ("step", *PHASES):
            seconds = median(rows, f"time/{phase}")
            if seconds < LEAST_S:
                continue
            efficiency = fewest * median(base, f"time/{phase}") / (num_gpus * seconds)
            found.append(
                {"gpus": num_gpus, "phase": phase, "seconds": seconds}
                | {"tokens_per_s_per_gpu": tokens / seconds / num_gpus, "efficiency": efficiency}
            )
    return found


def standard_error(left: RunResult, step: int) -> float:
    """Return the standard error of a step's mean reward."""
    rewards = [row["reward"] for row in left.rollouts(step)]
    return statistics.stdev(rewards) / len(rewards) ** 0.5


def same_responses(one: RunResult, other: RunResult, step: int) -> float:
    """Return the fraction of a step's responses that are the same in two runs."""
    pairs = [[(row["prompt_id"], row["response"]) for row in left.rollouts(step)] for left in (one, other)]
    return len(set(pairs[0]) & set(pairs[1])) / len(set(pairs[0]))


def curve_rows(runs: Mapping[int, RunResult]) -> list[dict[str, Any]]:
    """Return a row for each number of GPUs except the fewest: the largest differences from the curves of the fewest."""
    fewest = min(runs)
    base, found = runs[fewest], []
    for num_gpus, left in runs.items():
        if num_gpus == fewest:
            continue
        pairs = list(zip(base.rows, left.rows, strict=True))
        gaps = {name: max(abs(a.get(name, 0.0) - b.get(name, 0.0)) for a, b in pairs) for name in CURVES}
        errors = [abs(a["reward"] - b["reward"]) / max(standard_error(base, int(a["step"])), 1e-12) for a, b in pairs]
        first, last = int(base.rows[0]["step"]), int(base.rows[-1]["step"])
        found.append(
            {"gpus": num_gpus, "against": fewest}
            | {f"max difference {name}": gap for name, gap in gaps.items()}
            | {"reward, standard errors": max(errors)}
            | {"same responses, first step": same_responses(base, left, first)}
            | {"last step": same_responses(base, left, last)}
        )
    return found


def plot(runs: Mapping[int, RunResult], speed: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw tokens/s per GPU by phase, and the curves of all runs over each other."""
    figure, (left_axes, right_axes) = plt.subplots(1, 2, figsize=(12, 4.5))
    for phase in dict.fromkeys(row["phase"] for row in speed):
        points = [(row["gpus"], row["tokens_per_s_per_gpu"]) for row in speed if row["phase"] == phase]
        left_axes.plot(*zip(*points, strict=True), "o-", label=phase, lw=3 if phase == "step" else 1)
    left_axes.set(xlabel="GPUs, same global batch", ylabel="tokens/s per GPU", yscale="log", xticks=list(runs))
    for num_gpus, left in runs.items():
        steps = [row["step"] for row in left.rows]
        right_axes.plot(steps, [row["reward"] for row in left.rows], "o-", label=f"reward, {num_gpus} GPUs")
    right_axes.set(xlabel="step", title="mean reward")
    for axes in (left_axes, right_axes):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def report(runs: Mapping[int, RunResult], arguments: argparse.Namespace) -> None:
    """Write <name>.csv, <name>_curves.csv and <name>.png, and print both tables."""
    speed = speed_rows(runs, responses=arguments.responses, prompt_tokens=arguments.prompt_tokens)
    environment = f"{runs[min(runs)].environment}, {arguments.model or arguments.shape}, ZeRO {arguments.zero_stage}"
    environment += f", sync {arguments.sync}, engine on {arguments.tensor_parallel}, {arguments.responses} responses"
    write_csv(arguments.out / f"{arguments.name}.csv", environment, speed)
    plot(runs, speed, arguments.out / f"{arguments.name}.png")
    print("", *table(speed), sep="\n")
    curves = curve_rows(runs)
    if curves:
        write_csv(arguments.out / f"{arguments.name}_curves.csv", environment, curves)
        print("", *(f"{name}: {value:.4g}" for row in curves for name, value in row.items()), sep="\n")


def is_finished(folder: Path, arguments: argparse.Namespace, num_gpus: int) -> bool:
    """Return whether this folder has a complete run with these settings."""
    metrics, left = folder / "metrics.jsonl", folder.with_suffix(".yaml")
    if not (metrics.exists() and left.exists()):
        return False
    found = yaml.safe_load(left.read_text())
    paths = {"actor": found["models"]["actor"], "prompts": found["prompts"]["path"]}
    wanted = settings(arguments, paths, num_gpus)
    same = wanted.keys() - {"run", "reward"}  # which name files of that checkout
    return len(RunResult(folder).rows) == arguments.steps and all(found[section] == wanted[section] for section in same)


def main() -> None:
    """Run on each number of GPUs and report; a run that fails is named and not counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, responses=512, prompt_tokens=256, response_tokens=512)
    parser.set_defaults(micro_batch_tokens=24576)  # 32 sequences: what each of four GPUs has of a mini-batch
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4], help="on a CPU, ranks")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of an engine, at most those of the run")
    parser.add_argument("--kl", type=float, default=0.001, help="0 has no reference")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--swap", default="auto", choices=["auto", "vmm", "deepspeed", "off"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--name", default="scaling", help="of the files under results/")
    parser.add_argument("--reuse", action="store_true", help="read what runs of these settings left in --work")
    arguments, more = parser.parse_known_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: must be at least 2, for the first is left out")
    folders = {n: arguments.work / f"{arguments.name}_{n}" for n in sorted(set(arguments.gpus))}
    runs = {n: RunResult(f) for n, f in folders.items() if arguments.reuse and is_finished(f, arguments, n)}
    paths = find_model(parser, arguments, has_reward=False) if len(runs) < len(folders) else {}
    failures = []
    for num_gpus, folder in folders.items():
        if num_gpus in runs:
            continue
        wanted = settings(arguments, paths, num_gpus)
        try:
            runs[num_gpus] = run_colocated(wanted, folder, num_ranks=num_gpus, more=more, timeout_s=arguments.timeout)
        except RunFailedError as error:
            failures.append(f"{num_gpus} GPUs: {error}")
            continue
        print(f"{num_gpus} GPUs: {median(runs[num_gpus].rows[1:], 'time/step'):.2f} s a step", flush=True)
    for line in failures:
        print("did not run:", line, file=sys.stderr)
    if runs:
        report(dict(sorted(runs.items())), arguments)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
