"""Time the steps of a whole run on one GPU: phases, moves between them, and device memory against the plan.

python profiling/bench_iteration.py                               # PPO, 1.5B, four models, 512 x (256 + 512) tokens
python profiling/bench_iteration.py --steps 20 --responses 64 --response-tokens 32 --name cycles   # many short cycles
python profiling/bench_iteration.py --shape 7b --estimator grpo --kl 0 --sync alias --gradient-checkpointing \
    --update.actor.kind cpu_adam                                   # other options go to colocated.py
python profiling/bench_iteration.py --shape tiny --responses 8 --prompt-tokens 8 --response-tokens 8

The script runs launch/colocated.py and reads its metrics.jsonl and timeline.json. A transition is what a phase does
before its body: it releases and restores tenants and measures memory. The SYNC phase counts as a whole. Step 1 includes
the first releases and compilation; later steps are steady.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
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

GIB, MIB = 1 << 30, 1 << 20
FLAT_FROM = 3
"""First step whose memory must be flat; the first two steps allocate what later steps keep."""


def transitions_s(left: RunResult, step: int) -> float:
    """Return the seconds of a step that transitions and weight sync take."""
    moves = [e["dur"] for e in left.spans("transition", step) if e["args"]["phase"] != "sync"]
    return (sum(moves) + sum(e["dur"] for e in left.spans("sync", step))) / 1e6


def time_rows(left: RunResult) -> list[dict[str, Any]]:
    """Return a row for each step: its seconds by phase, and the percentage of all transitions."""
    rows = []
    for row in left.rows:
        moving = transitions_s(left, int(row["step"]))
        phases = {phase: row.get(f"time/{phase}", 0.0) for phase in PHASES}
        rows.append(
            {"step": int(row["step"]), "step_s": row["time/step"]}
            | phases
            | {"transitions_s": moving, "share_percent": 100 * moving / row["time/step"]}
            | {"tokens_per_s": row["tokens_per_s"]}
        )
    return rows


def move_rows(left: RunResult) -> list[dict[str, Any]]:
    """Return a row for each move of the last step: bytes, seconds, bandwidth."""
    step = int(left.rows[-1]["step"])
    found = []
    for event in left.events:
        words = event["name"].split()
        if event["ph"] == "X" and words[0] in ("release", "restore", "exchange") and event["args"]["step"] == step:
            args, seconds = event["args"], event["dur"] / 1e6
            found.append(
                {"phase": args["phase"], "move": event["name"], "gib": args["bytes"] / GIB, "ms": 1e3 * seconds}
                | {"gb_per_s": args["GB_per_s"]}
            )
    return found


def memory_rows(left: RunResult) -> list[dict[str, Any]]:
    """Return a row for each phase: planned and measured peak, and how much its memory at entry varies between steps."""
    rows, last, steady = [], left.rows[-1], [row for row in left.rows if row["step"] >= FLAT_FROM]
    for phase in PHASES:
        if f"memory/{phase}_peak_bytes" not in last:
            continue
        peak, error = last[f"memory/{phase}_peak_bytes"], last.get(f"memory/{phase}_plan_error", float("nan"))
        entries = [row[f"memory/{phase}_bytes"] for row in steady]
        rows.append(
            {
                "phase": phase,
                "plan_gib": peak / (1 + error) / GIB,
                "peak_gib": peak / GIB,
                "over_plan_percent": 100 * error,
            }
            | {"entry_gib": last[f"memory/{phase}_bytes"] / GIB}
            | {"entry_moves_mib": (max(entries) - min(entries)) / MIB if entries else float("nan")}
        )
    return rows


def settings(arguments: argparse.Namespace, paths: Mapping[str, str]) -> dict[str, Any]:
    """Return the run's settings."""
    found = base_settings(arguments, paths)
    advantage = {"estimator": arguments.estimator, "kl_coef": arguments.kl}
    if arguments.estimator != "gae":
        advantage |= {"kl_in": "loss", "kl_estimator": "k3"}
    found["advantage"] = advantage
    if "reward" in paths:
        found["models"]["reward"] = paths["reward"]
    return found


def report(left: RunResult, out: Path, name: str) -> None:
    """Print three tables and write them as <name>.csv, <name>_moves.csv and <name>_memory.csv."""
    tables = {"": time_rows(left), "_moves": move_rows(left), "_memory": memory_rows(left)}
    for suffix, rows in tables.items():
        if rows:
            write_csv(out / f"{name}{suffix}.csv", left.environment, rows)
            print(*table(rows), "", sep="\n")
    steady = tables[""][1:] or tables[""]
    share, seconds = median(steady, "share_percent"), median(steady, "step_s")
    print(f"transitions: {share:.2f} % of {seconds:.2f} s, median of {len(steady)} steps")


def main() -> None:
    """Run and report; with --read, report on a run that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, responses=512, prompt_tokens=256, response_tokens=512)
    parser.add_argument("--estimator", default="gae", help="gae is PPO with a critic; grpo and others have none")
    parser.add_argument("--kl", type=float, default=0.02, help="0 has no reference")
    parser.add_argument("--swap", default="vmm", choices=["auto", "vmm", "deepspeed", "off"], help="vmm: all moves")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--name", default="iteration", help="of the run and of the files under results/")
    parser.add_argument("--read", type=Path, help="folder of a run to report on, instead of starting one")
    arguments, more = parser.parse_known_args()
    if arguments.read:
        return report(RunResult(arguments.read), arguments.out, arguments.name)
    has_reward = arguments.estimator == "gae" and not arguments.model
    paths = find_model(parser, arguments, has_reward=has_reward)
    folder = arguments.work / arguments.name
    try:
        left = run_colocated(settings(arguments, paths), folder, num_ranks=1, more=more, timeout_s=arguments.timeout)
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    report(left, arguments.out, arguments.name)
    return None


if __name__ == "__main__":
    main()
