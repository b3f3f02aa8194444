"""Decides how a run starts from what lies in its folder. Reads only, and needs neither a GPU nor torch."""

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_rl.checkpoints.find import find_newest, list_checkpoints, read_state
from hybrid_rl.checkpoints.model_content import model_contents
from hybrid_rl.checkpoints.resume_settings import (
    Changes,
    compare,
    compare_models,
    compare_reward_files,
    reward_files,
)
from hybrid_rl.config import Config, ConfigError, check

RECORD = "run.json"
"""File with the run's id, settings, models and hashes of reward files."""
EXPORTS = "exports"
"""Folder of the Hugging Face folders that are written every few steps."""
EXPORTED = ("best", "export", "export_ema", "export_adapter", "export_critic", EXPORTS)
"""Folders with exported models."""
PRODUCTS = (
    "metrics.jsonl",
    "rollouts",
    "latest",
    "checkpoints",
    "phase_log",
    *EXPORTED,
    "summary.json",
)
"""Files and folders of a run that hold results."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a run starts."""

    run_id: str
    """Identifies the run in its files, also when it continues."""
    checkpoint: Path | None = None
    """Folder of the checkpoint to continue from; None starts at step 1."""
    is_moved_aside: bool = False
    """Whether the folder holds the results of another run, which must be moved out of it."""
    is_other_evaluation: bool = False
    """Whether accuracies before and after do not compare, so that the best actor is sought anew."""
    models: dict[str, Any] | None = None
    """What model_contents returns; None for a new run, whose models need not be known before they load."""
    warnings: tuple[str, ...] = field(default=())
    """One sentence each."""


def decide_start(config: Config) -> Start:
    """Return how the run of these settings starts; the folder need not exist.

    Raises:
        ConfigError: `run.resume` asks for a checkpoint and there is none; no checkpoint is whole, or with `must` the
            newest is not; a setting or a model is not the checkpoint's; the folder holds files of several runs.
    """
    run_dir, resume = config.run_dir, config.run.resume
    _check_folders(run_dir)
    if resume == "never":
        return _new_run(run_dir)
    newest, warnings = find_newest(run_dir, may_lose_steps=resume == "auto")
    check(newest is not None or resume != "must", f"run.resume = must: {run_dir} has no checkpoint; use auto")
    record = read_record(run_dir)
    if newest is None:
        return _restart(config, record) if record else _new_run(run_dir)
    _check_one_run(run_dir, record)
    saved = read_state(newest).get("run", {})
    models, changes = _compare(config, saved, record)
    if changes.refused:
        raise ConfigError(*changes.refused)
    if changes.warned:
        warnings.append(f"{run_dir} goes on with other settings: {'; '.join(changes.warned)}")
    return Start(
        run_id=saved.get("id") or new_id(),
        checkpoint=newest,
        models=models,
        is_other_evaluation=changes.is_other_evaluation,
        warnings=tuple(warnings),
    )


def new_id() -> str:
    """Return an id that no other run has."""
    return uuid.uuid4().hex


def read_record(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of run.json; None if it is missing or damaged."""
    try:
        record = json.loads((run_dir / RECORD).read_text())
        return record if isinstance(record["id"], str) and isinstance(record["settings"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _new_run(run_dir: Path) -> Start:
    return Start(run_id=new_id(), is_moved_aside=has_results(run_dir))


def has_results(run_dir: Path) -> bool:
    """Return whether a folder holds results of a run."""
    found = [run_dir / name for name in PRODUCTS]
    return any((any(path.iterdir()) if path.is_dir() else path.stat().st_size) for path in found if path.exists())


def _restart(config: Config, record: Mapping[str, Any]) -> Start:
    """Return the start at step 1 of a run that ended before its first checkpoint, or the start of a new run."""
    if (config.run_dir / "summary.json").exists():
        return _new_run(config.run_dir)
    models, changes = _compare(config, record, record)
    if changes.refused or changes.warned:
        return _new_run(config.run_dir)
    return Start(run_id=record["id"], models=models)


def _compare(
    config: Config, saved: Mapping[str, Any], record: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Changes]:
    """Return the present models, and how settings, models and reward files differ from the saved ones.

    Args:
        record: content of run.json, whose checksums of unchanged files are taken.
    """
    models = model_contents(config, (record or {}).get("models"))
    changes = compare(saved.get("settings", {}), config) + compare_models(saved.get("models", {}), models)
    return models, changes + compare_reward_files(saved.get("reward_files", {}), reward_files(config), config)


def _check_folders(run_dir: Path) -> None:
    for name in ("checkpoints", "rollouts", "phase_log", "tensorboard", "trackers", EXPORTS):
        path = run_dir / name
        check(path.is_dir() or not os.path.lexists(path), f"{path} is in the way: it must be a folder; move it away")


def _check_one_run(run_dir: Path, record: Mapping[str, Any] | None) -> None:
    """Check that all checkpoints that can be read are of one run, the one of run.json."""
    files: dict[str, list[str]] = {record["id"]: [RECORD]} if record else {}
    for folder in list_checkpoints(run_dir):
        try:
            found = read_state(folder).get("run", {}).get("id")
        except ConfigError:
            continue
        if found:
            files.setdefault(found, []).append(folder.name)
    groups = " and ".join(f"{', '.join(names)} of run {run_id[:8]}" for run_id, names in files.items())
    check(
        len(files) <= 1,
        f"{run_dir} holds files of several runs, {groups}: keep the files of one, and move the others away",
    )
