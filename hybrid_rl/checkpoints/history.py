"""The starts of a run, each with what differs from the start before: history.jsonl. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.atomic import write_atomically
from hybrid_rl.checkpoints.resume_settings import flatten

HISTORY = "history.jsonl"


def settings_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return dotted name -> `from` and `to` of each setting with another value; one that is missing counts as null.

    Args:
        old, new: settings as JSON values, in sections.
    """
    before, after = flatten(old), flatten(new)
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return {name: {"from": before.get(name), "to": after.get(name)} for name in names}


def add_start(run_dir: Path, start: Mapping[str, Any]) -> None:
    """Add a line with a start of the run to the history.

    Raises:
        FileWriteError: the file cannot be written; it is unchanged.
    """
    path = run_dir / HISTORY
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    write_atomically(path, "".join(f"{line}\n" for line in [*lines, json.dumps(start)]))
