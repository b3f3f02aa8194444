"""Keep a run's learning curve: CSV and PNG under profiling/results/, with card and versions.

python profiling/plot_run.py runs/smollm2_chain_sum
"""

import csv
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = [
    "step",
    "reward",
    "accuracy",
    "kl",
    "rollout/response_length",
    "rollout/truncated",
    "rollout/logprob_gap",
    "actor/entropy",
    "actor/clip_fraction",
    "tokens_per_s",
    "time/step",
    "time/rollout",
    "time/score",
    "time/update_critic",
    "time/update_actor",
    "time/sync",
]
RESULTS = Path(__file__).parent / "results"


def main(run_dir: Path) -> None:
    """Write results/<run>.csv and results/<run>.png."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    environment = json.loads((run_dir / "environment.json").read_text())
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    with (RESULTS / f"{run_dir.name}.csv").open("w", newline="") as file:
        file.write("# " + ", ".join(f"{name} {value}" for name, value in environment.items()) + "\n")
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: row.get(name, "") for name in columns} for row in rows)
    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.plot([r["step"] for r in rows], [r["reward"] for r in rows], label="mean reward of the step's responses")
    evaluated = [(r["step"] - 1, r["accuracy"]) for r in rows if "accuracy" in r]
    summary = run_dir / "summary.json"
    if summary.exists():
        evaluated.append((rows[-1]["step"], json.loads(summary.read_text())["after"]["accuracy"]))
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", label="exact accuracy, held out, greedy")
    axes.set(xlabel="step", title=f"{run_dir.name} on {environment['device']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / f"{run_dir.name}.png", dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
