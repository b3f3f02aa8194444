"""Write a run's learning curve as CSV and PNG into profiling/results/, with card and versions.

python profiling/plot_run.py runs/smollm2_chain_sum
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from colocated_run import HERE, RunResult, write_csv

COLUMNS = [
    "step",
    "reward",
    "accuracy",
    "kl",
    "rollout/response_length",
    "rollout/truncated",
    "rollout/logprob_gap",
    "environment/turns",
    "environment/tool_calls",
    "environment/failed_tool_calls",
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
RESULTS = HERE / "results"


def main(run_dir: Path) -> None:
    """Write results/<run>.csv and results/<run>.png."""
    left = RunResult(run_dir)
    rows = left.rows
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    write_csv(RESULTS / f"{run_dir.name}.csv", left.environment, [{n: row.get(n, "") for n in columns} for row in rows])
    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.plot([r["step"] for r in rows], [r["reward"] for r in rows], label="mean reward of the step's responses")
    evaluated = [(r["step"] - 1, r["accuracy"]) for r in rows if "accuracy" in r]
    summary = run_dir / "summary.json"
    if summary.exists():
        evaluated.append((rows[-1]["step"], json.loads(summary.read_text())["after"]["accuracy"]))
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), "o-", label="accuracy on held-out prompts")
    axes.set(xlabel="step", title=f"{run_dir.name} on {left.device}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / f"{run_dir.name}.png", dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
