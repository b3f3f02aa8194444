"""Finds the newest whole checkpoint of a run. Imports no torch."""

import json
import re
from pathlib import Path
from typing import Any

from hybrid_rl.checkpoints.manifest import find_damage
from hybrid_rl.config import ConfigError, check

STATE = "state.json"
REMEDY = "start a new run with another run.name, or with run.resume = never, which moves this one aside"
_NAME = re.compile(r"(?:\.replaced-)?step_(\d{6,})")


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:06d}"


def replaced_name(folder: Path) -> Path:
    """Return the folder to which a checkpoint moves while another one of the same step replaces it."""
    return folder.with_name(f".replaced-{folder.name}")


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint's folder name; None for any other name."""
    matched = _NAME.fullmatch(folder.name)
    return int(matched[1]) if matched else None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of all checkpoints, whole or not, the newest first.

    A checkpoint that was about to be replaced follows the one that replaces it.
    """
    folders = [(step_of(folder), folder) for folder in (run_dir / "checkpoints").glob("*") if folder.is_dir()]
    found = [(step, folder.name.startswith("."), folder) for step, folder in folders if step is not None]
    return [folder for _, _, folder in sorted(found, key=lambda entry: (-entry[0], entry[1]))]


def find_newest(run_dir: Path, *, may_lose_steps: bool) -> tuple[Path | None, list[str]]:
    """Return the newest whole checkpoint, or None if the run has none at all, and warnings about what is not in order.

    Every file of the checkpoint is read and compared with its checksum.

    Args:
        run_dir: folder of the run.
        may_lose_steps: whether to go back to an older checkpoint if the newest one is damaged or gone.
    Raises:
        ConfigError: no checkpoint is whole though there was one, or the newest is not and may_lose_steps is false.
    """
    folders, (pointed, pointer_fault) = list_checkpoints(run_dir), _read_pointer(run_dir)
    damaged, newest = [], None
    for folder in folders:
        damage = _damage_of(folder)
        if damage is None:
            newest = folder
            break
        damaged.append(f"{folder.name}: {damage}")
    steps = {step_of(folder) for folder in folders}
    if pointed is not None and pointed not in steps:
        damaged.append(f"{checkpoint_name(pointed)}, which the file latest names, is not there")
    if newest is None:
        found = "; ".join(damaged) or pointer_fault
        check(not found, f"{run_dir}: no checkpoint is whole ({found}): restore one, or {REMEDY}")
        return None, []
    step = read_state(newest)["step"]
    lost = max(s for s in (*steps, pointed, step) if s is not None) - step
    warnings = []
    if damaged:
        found = f"{run_dir}: {'; '.join(damaged)}"
        check(
            may_lose_steps or not lost,
            f"{found}. run.resume = must does not go back to step {step}, which loses {lost} steps: restore the files, "
            "or set run.resume = auto",
        )
        warnings.append(f"{found}. The run goes on from step {step}; {lost} steps are lost and done again")
    elif pointer_fault or (pointed is not None and pointed < step):
        fault = pointer_fault or f"the file latest names {checkpoint_name(pointed or 0)}"
        warnings.append(
            f"{run_dir}: {fault}, but {newest.name} is whole and the newest: the run goes on from it; move its folder "
            "away to go back further"
        )
    return newest, warnings


def read_state(folder: Path) -> dict[str, Any]:
    """Return step, world_size, the run's identity and the state that was passed to `Saver.start`.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    try:
        state = json.loads((folder / STATE).read_text())
        int(state["step"])
        return state
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / STATE}: missing or damaged ({error}); restore it") from error


def _damage_of(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if nothing is."""
    damage = find_damage(folder)
    if damage is None and read_state(folder)["step"] != step_of(folder):
        return f"holds step {read_state(folder)['step']}, so its folder was renamed"
    return damage


def _read_pointer(run_dir: Path) -> tuple[int | None, str]:
    """Return the step that the file `latest` names, None without one, and what is wrong with the file."""
    try:
        text = (run_dir / "latest").read_text(errors="replace").strip()
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"the file latest cannot be read ({error.strerror})"
    step = step_of(Path(text)) if text == Path(text).name else None
    if step is None or text.startswith("."):
        return None, f"the file latest holds {text[:40]!r} instead of a checkpoint's name"
    return step, ""
