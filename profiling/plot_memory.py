"""Write a run's device memory by owner and phase, planned and measured, as CSV and PNG under results/.

python profiling/plot_memory.py runs/<name>            # the last step
python profiling/plot_memory.py runs/<name> --step 2

The script reads the counters of timeline.json: the memory that the driver counts as used, PyTorch's part of it, and the
engines' part if the driver counts by process.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from colocated_run import HERE, PHASES, RunResult, Window, table, write_csv

from hybrid_rl.memory.residency import RESIDENCY

GIB = 1 << 30
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


def plan_owner(name: str) -> str:
    """Return the owner of an allocation of the plan."""
    if spec := RESIDENCY.get(name):
        if spec.model == "engine":
            return "engine KV cache" if spec.content == "kv_cache" else "engine weights"
        return spec.model if spec.is_trained else "frozen models"
    model, _, use = name.partition(" ")
    if use == "context":
        return "contexts"
    if model == "engine":
        return "engine, other"
    return model if use in ("gradients", "buckets") else "activations and buffers"


def planned(allocations: Mapping[str, float]) -> dict[str, float]:
    """Return owner -> bytes of a phase's plan, from allocation -> bytes."""
    owners: dict[str, float] = {}
    for name, num_bytes in allocations.items():
        owners[plan_owner(name)] = owners.get(plan_owner(name), 0.0) + num_bytes
    return owners


def measured(device: Mapping[str, float], by_owner: Mapping[str, float] | None) -> dict[str, float]:
    """Return owner -> bytes of one measurement.

    Args:
        device: bytes of all processes, `used`, and of PyTorch's allocator in the trainer, `trainer`.
        by_owner: bytes of each process, `trainer` and `engine_<pid>`; None if the driver does not count by process.
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


def highest(run: RunResult, window: Window) -> dict[str, float] | None:
    """Return owner -> bytes of the largest measurement in a phase; None without a measurement."""
    samples = run.counters("device_memory", window)
    if not samples:
        return None
    by_process = run.counters("device_memory_by_owner", window)
    place = max(range(len(samples)), key=lambda i: samples[i]["used"])
    return measured(samples[place], by_process[place] if len(by_process) == len(samples) else None)


def memory_of(run: RunResult, step: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return phase -> `plan` or `measured` -> owner -> bytes of a step; the peak of a phase that is opened twice."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for window in run.windows(step):
        owners = highest(run, window)
        if owners is None:
            continue
        plans = run.counters("device_memory_plan", window)
        before = found.get(window.phase, {}).get("measured", {})
        if sum(owners.values()) > sum(before.values()):
            found[window.phase] = ({"plan": planned(plans[0])} if plans else {}) | {"measured": owners}
    return found


def plot(memory: Mapping[str, Mapping[str, Mapping[str, float]]], title: str, path: Path) -> None:
    """Draw two stacked bars for each phase: the planned bytes, hatched, and the measured ones."""
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


def last_step(run: RunResult) -> int:
    """Return the last step that completed every phase; 0 without one."""
    steps = {e["args"]["step"] for e in run.events if e["ph"] == "X" and e["name"] == PHASES[-1]}
    return max(steps, default=0)


def main() -> None:
    """Write results/<run>_memory.csv and .png, and print peak against plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--step", type=int, help="instead of the last")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    run = RunResult(arguments.run)
    step = arguments.step or last_step(run)
    memory = memory_of(run, step)
    if not memory:
        sys.exit(f"error: {arguments.run}/timeline.json has no device memory of step {step}; a run on a CPU has none")
    rows = [
        {"phase": phase, "kind": kind, "owner": owner, "bytes": int(num_bytes)}
        for phase, kinds in memory.items()
        for kind, owners in kinds.items()
        for owner, num_bytes in owners.items()
    ]
    path = arguments.out / f"{arguments.run.name}_memory.csv"
    write_csv(path, f"{run.environment}, step {step}", rows)
    plot(memory, f"{arguments.run.name}, step {step}", path.with_suffix(".png"))
    totals = {phase: {kind: sum(owners.values()) / GIB for kind, owners in memory[phase].items()} for phase in memory}
    for line in table([{"GiB": phase, "plan": 0.0} | kinds for phase, kinds in totals.items()]):
        print(line)


if __name__ == "__main__":
    main()
