"""Keep a run's device memory by owner and phase, the plan beside what was measured: CSV and PNG under results/.

python profiling/plot_memory.py runs/<name>            # the last step
python profiling/plot_memory.py runs/<name> --step 2

The counters of timeline.json are read: what the driver says is in use on the device, what PyTorch has of it, and, where
the driver tells the processes apart, what the engines have.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from colocated_run import HERE, PHASES, RunResult, Window, table, write_csv

GIB = 1 << 30
FROZEN = ("reference", "reward_model")
COLORS = {
    "actor": "#d95f02",
    "critic": "#e6ab02",
    "frozen models": "#a6761d",
    "activations and buffers": "#fdbf6f",
    "trainer's tensors": "#d95f02",
    "engine weights": "#1f78b4",
    "engine KV cache": "#6baed6",
    "engine, other": "#c6dbef",
    "engine": "#1f78b4",
    "contexts": "#999999",
    "engine and contexts": "#7f93a8",
    "other processes": "#444444",
}


def plan_owner(row: str) -> str:
    """Return the owner that a row of the plan counts for."""
    names = {"engine_weights": "engine weights", "engine_kv_cache": "engine KV cache", "trainer context": "contexts"}
    if row in names or row in FROZEN:
        return names.get(row, "frozen models")
    if row.startswith("engine"):
        return "contexts" if row == "engine context" else "engine, other"
    model, _, part = row.replace("_", " ").partition(" ")
    is_kept = model in ("actor", "critic") and part in ("parameters", "states", "gradients", "buckets")
    return model if is_kept else "activations and buffers"


def planned(rows: Mapping[str, float]) -> dict[str, float]:
    """Return owner -> bytes of a phase's plan."""
    owners: dict[str, float] = {}
    for row, num_bytes in rows.items():
        owners[plan_owner(row)] = owners.get(plan_owner(row), 0.0) + num_bytes
    return owners


def measured(device: Mapping[str, float], by_owner: Mapping[str, float] | None) -> dict[str, float]:
    """Return owner -> bytes of one look at the device.

    Args:
        device: `used`, all processes together, and `trainer`, PyTorch's own.
        by_owner: bytes of each process, `trainer` and `engine_<pid>`; None where the driver does not tell.
    """
    tensors, used = device["trainer"], device["used"]
    if by_owner is None:
        return {"trainer's tensors": tensors, "engine and contexts": used - tensors}
    engines = sum(value for name, value in by_owner.items() if name != "trainer")
    return {
        "trainer's tensors": tensors,
        "contexts": by_owner["trainer"] - tensors,
        "engine": engines,
        "other processes": max(0.0, used - by_owner["trainer"] - engines),
    }


def highest(left: RunResult, window: Window) -> dict[str, float] | None:
    """Return the owners at the highest of all looks at the device in a phase; None without a look."""
    looks = left.counters("device_memory", window)
    if not looks:
        return None
    by_process = left.counters("device_memory_by_owner", window)
    place = max(range(len(looks)), key=lambda i: looks[i]["used"])
    return measured(looks[place], by_process[place] if len(by_process) == len(looks) else None)


def memory_of(left: RunResult, step: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return phase -> `plan` or `measured` -> owner -> bytes of a step; of a phase opened twice, its higher peak."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for window in left.windows(step):
        owners = highest(left, window)
        if owners is None:
            continue
        plans = left.counters("device_memory_plan", window)
        before = found.get(window.phase, {}).get("measured", {})
        if sum(owners.values()) > sum(before.values()):
            found[window.phase] = ({"plan": planned(plans[0])} if plans else {}) | {"measured": owners}
    return found


def plot(memory: Mapping[str, Mapping[str, Mapping[str, float]]], title: str, path: Path) -> None:
    """Draw two stacks for each phase: what was planned, hatched, and what was measured."""
    figure, axes = plt.subplots(figsize=(9, 5))
    places = [(phase, kind) for phase in memory for kind in ("plan", "measured") if kind in memory[phase]]
    centres = {place: list(memory).index(place[0]) + (-0.2 if place[1] == "plan" else 0.2) for place in places}
    labels: set[str] = set()
    for phase, kind in places:
        bottom = 0.0
        for owner, color in COLORS.items():
            height = memory[phase][kind].get(owner, 0.0) / GIB
            if not height:
                continue
            label = None if owner in labels else owner
            labels.add(owner)
            hatch = "//" if kind == "plan" else None
            axes.bar(centres[phase, kind], height, 0.36, bottom, color=color, label=label, hatch=hatch, edgecolor="w")
            bottom += height
        axes.text(centres[phase, kind], bottom, f"{bottom:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set(ylabel="GiB on the device", title=f"{title}: plan (hatched) and measured peak")
    axes.set_xticks(range(len(memory)), list(memory))
    axes.legend(bbox_to_anchor=(1.01, 1), loc="upper left", fontsize=8)
    axes.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def last_step(left: RunResult) -> int:
    """Return the last step that went through every phase; 0 without one."""
    steps = {e["args"]["step"] for e in left.events if e["ph"] == "X" and e["name"] == PHASES[-1]}
    return max(steps, default=0)


def main() -> None:
    """Write results/<run>_memory.csv and .png, and print peak against plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--step", type=int, help="instead of the last")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    left = RunResult(arguments.run)
    step = arguments.step or last_step(left)
    memory = memory_of(left, step)
    if not memory:
        sys.exit(f"error: {arguments.run}/timeline.json has no device memory of step {step}; a run on a CPU has none")
    rows = [
        {"phase": phase, "kind": kind, "owner": owner, "bytes": int(num_bytes)}
        for phase, kinds in memory.items()
        for kind, owners in kinds.items()
        for owner, num_bytes in owners.items()
    ]
    path = arguments.out / f"{arguments.run.name}_memory.csv"
    write_csv(path, f"{left.environment}, step {step}", rows)
    plot(memory, f"{arguments.run.name}, step {step}", path.with_suffix(".png"))
    totals = {phase: {kind: sum(owners.values()) / GIB for kind, owners in memory[phase].items()} for phase in memory}
    for line in table([{"GiB": phase, "plan": 0.0} | kinds for phase, kinds in totals.items()]):
        print(line)


if __name__ == "__main__":
    main()
