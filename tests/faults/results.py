"""What a run leaves that must not depend on what happened to it on its way."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

OF_THIS_RUN = ("time/", "sync/", "tokens_per_s", "mfu/", "memory/", "rollout/restarts")
"""Beginnings of the names of metrics that differ between two equal runs."""


def results(run_dir: Path) -> dict[str, Any]:
    """Return the metrics and responses of every step, and the checksums of the last checkpoint's tensors."""
    found: dict[str, Any] = {}
    for row in _rows(run_dir / "metrics.jsonl"):
        found[f"metrics of step {row['step']}"] = {k: v for k, v in row.items() if not k.startswith(OF_THIS_RUN)}
    for path in sorted((run_dir / "rollouts").iterdir()):
        found[f"responses in {path.name}"] = sorted(_rows(path), key=lambda row: (row["prompt_id"], row["response"]))
    latest = run_dir / "checkpoints" / (run_dir / "latest").read_text().strip()
    for path in sorted(latest.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
            found[f"{name} in {path.relative_to(latest.parent)}"] = digest.hexdigest()
    return found


def differences(run_dir: Path, expected: dict[str, Any]) -> list[str]:
    """Return the names of the results of a run that are not as expected."""
    try:
        found = results(run_dir)
    except (OSError, ValueError) as error:
        return [f"the results cannot be read: {error}"]
    wrong = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return wrong if len(wrong) < 4 else [*wrong[:3], f"{len(wrong) - 3} more"]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
