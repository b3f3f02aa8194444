"""What a tracker has of a run, kept in the folder of the run. Imports no torch."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from hybrid_rl.atomic import write_atomically

FOLDER = "trackers"
"""Folder of these files in the folder of a run."""
HISTOGRAMS = "histograms.jsonl"
"""File with the histograms of each step, which metrics.jsonl does not hold."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """How far a tracker has followed a run."""

    run_id: str
    last_step: int = 0
    """Last step that was sent, or was about to be when the process ended; no step is sent twice."""
    summarized_step: int = 0
    """Last step of the run when its evaluations were summarized; 0 before that."""
    error: str | None = None
    """Why the tracker does not take the next row; None if it does."""


def ledger_path(run_dir: Path, library: str) -> Path:
    """Return the file of a tracker."""
    return run_dir / FOLDER / f"{library}.json"


def read_ledger(path: Path, run_id: str) -> Ledger:
    """Return the content of a file; a new one if there is none, or if it is of another run or damaged."""
    try:
        ledger = Ledger(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return Ledger(run_id=run_id)
    return ledger if ledger.run_id == run_id else Ledger(run_id=run_id)


def write_ledger(path: Path, ledger: Ledger) -> None:
    """Replace the file.

    Raises:
        FileWriteError: it cannot be written.
    """
    write_atomically(path, json.dumps(dataclasses.asdict(ledger)) + "\n", is_flushed=False)
