"""Run one config twice with and twice without run.deterministic: whether both runs are equal, and seconds per phase.

python profiling/bench_deterministic.py                                          # GRPO, 0.5B, 512 x (128 + 512) tokens
python profiling/bench_deterministic.py --shape tiny --responses 16 --prompt-tokens 8 --response-tokens 8    # a CPU

Two runs are equal if all metrics except times and memory, and all responses with their rewards, are the same bits.
Step 1 compiles and pins memory; its time is not counted.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from colocated_run import (
    PHASES,
    RunResult,
    add_arguments,
    base_settings,
    find_model,
    median,
    run_colocated,
    table,
    write_csv,
)

MEASURED = ("time/", "memory/", "tokens_per_s", "mfu/")
"""Prefixes of metrics that are measurements of the machine."""


def settings(arguments: argparse.Namespace, paths: Mapping[str, str], *, is_deterministic: bool) -> dict[str, Any]:
    """Return the settings of one run."""
    found = base_settings(arguments, paths)
    found["run"]["deterministic"] = is_deterministic
    found["advantage"] = {"estimator": "grpo", "kl_coef": 0.0}
    found["update"]["actor"] = {"lr": 1e-5}
    return found


def different_metrics(one: RunResult, other: RunResult) -> list[str]:
    """Return the names of the metrics that differ in any step."""
    pairs = zip(one.rows, other.rows, strict=True)
    names = {name for a, b in pairs for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    return sorted(name for name in names if not name.startswith(MEASURED))


def different_responses(one: RunResult, other: RunResult) -> list[int]:
    """Return for each step the number of responses that differ in text, length or reward."""
    steps = [int(row["step"]) for row in one.rows]
    return [sum(a != b for a, b in zip(one.rollouts(s), other.rollouts(s), strict=True)) for s in steps]


def row_of(name: str, runs: Sequence[RunResult]) -> dict[str, Any]:
    """Return the row of a mode: seconds per phase, medians over both runs, and how the runs differ."""
    counted = [row for run in runs for row in run.rows[1:]]
    names = different_metrics(*runs)
    return (
        {"mode": name}
        | {phase: median(counted, f"time/{phase}") for phase in ("step", *PHASES) if phase != "update_critic"}
        | {"different metrics": len(names), "different responses": " ".join(map(str, different_responses(*runs)))}
        | {"first of them": names[0] if names else "-"}
    )


def main() -> None:
    """Run, write the CSV file, and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, responses=512, prompt_tokens=128, response_tokens=512)
    parser.set_defaults(shape="0.5b", micro_batch_tokens=24576)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--swap", default="auto")
    parser.add_argument(
        "--modes", nargs="+", default=["default", "deterministic"], choices=["default", "deterministic"]
    )
    parser.add_argument("--name", default="deterministic", help="of the CSV file")
    arguments, more = parser.parse_known_args()
    paths = find_model(parser, arguments, has_reward=False)
    rows, environment = [], ""
    for name in arguments.modes:
        found = settings(arguments, paths, is_deterministic=name == "deterministic")
        runs = [
            run_colocated(found, arguments.work / f"{name}_{i}", num_ranks=1, more=more, timeout_s=arguments.timeout)
            for i in range(2)
        ]
        rows.append(row_of(name, runs))
        environment = f"{runs[0].environment}, {arguments.model or arguments.shape}, {arguments.responses} responses"
        print(*table(rows), sep="\n", flush=True)
    write_csv(arguments.out / f"{arguments.name}.csv", environment, rows)


if __name__ == "__main__":
    main()
