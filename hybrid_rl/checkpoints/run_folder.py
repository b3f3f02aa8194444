"""The folder of a run: its lock, its identity, and what an earlier run or a killed one left in it."""

import dataclasses
import datetime
import json
import logging
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hybrid_rl.atomic import free_name, set_aside, write_atomically
from hybrid_rl.checkpoints.history import add_start, settings_changes
from hybrid_rl.checkpoints.lock import LOCK_FILE, RunLock
from hybrid_rl.checkpoints.model_content import ModelContents
from hybrid_rl.checkpoints.resume_settings import plain_settings, reward_files
from hybrid_rl.checkpoints.start import EXPORTS, RECORD, Start, decide_start, read_record
from hybrid_rl.config import Config
from hybrid_rl.distributed import World

T = TypeVar("T")

STAYS = {LOCK_FILE, "ray"}
"""What an earlier run does not take along: the lock, and the folder that the Ray driver writes to."""

logger = logging.getLogger(__name__)


class RunFolder:
    """A run's folder, locked from its making to `close`; the run is known from `accept` on."""

    def __init__(self, config: Config, world: World) -> None:
        """Lock the folder; a collective.

        Raises:
            ConfigError: the folder cannot be written, or another run uses it; raised on every rank.
        """
        self._config = config
        self._world = world
        self._lock: RunLock | None = None
        self._start: Start | None = None
        self._hashing: ModelContents | None = None
        self._reward_files: dict[str, str] = {}
        world.run_on_main(self._take_lock)

    def _take_lock(self) -> None:
        self._lock = RunLock(self._config.run_dir)

    def accept(self, start: Start) -> Start:
        """Move aside what is of another run, and return the start with the final path of its checkpoint; a collective.

        Args:
            start: what `decide_together` returned.
        """
        self._start = start = self._world.run_on_main(lambda: tidy(self._config.run_dir, start), Start)
        if self._world.is_main:
            self._reward_files = reward_files(self._config)
        if self._world.is_main and start.models is None:
            self._hashing = ModelContents(self._config)
        return start

    def identity(self) -> dict[str, Any]:
        """Return the run's id, settings, models and hashes of reward files for its files; {} on ranks other than 0.

        Waits until the models are hashed.
        """
        if not self._world.is_main:
            return {}
        models = {role: {k: model[k] for k in ("path", "content")} for role, model in self._models().items()}
        settings = plain_settings(self._config)
        return {"id": self.run_id, "settings": settings, "models": models, "reward_files": self._reward_files}

    @property
    def run_id(self) -> str:
        """See Start.run_id."""
        assert self._start is not None
        return self._start.run_id

    def write_record(self, *, step: int, environment: Mapping[str, Any]) -> None:
        """Write run.json, and add this start to history.jsonl, on rank 0: from now on the folder is this run's.

        Args:
            step: finished steps that the run continues from.
            environment: device, number of ranks and versions.
        """
        if self._world.is_main:
            run_dir, identity = self._config.run_dir, self.identity()
            written = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            changes = settings_changes((read_record(run_dir) or identity)["settings"], identity["settings"])
            host = socket.gethostname()
            add_start(run_dir, {"time": written, "step": step, "host": host, **environment, "changes": changes})
            record = {**identity, "models": self._models(), "written": written}
            write_atomically(run_dir / RECORD, json.dumps(record, indent=1) + "\n")

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.unlock()

    def _models(self) -> Mapping[str, Any]:
        assert self._start is not None
        return self._hashing.wait() if self._hashing else self._start.models or {}


def decide_together(config: Config, world: World) -> Start:
    """Return what decide_start returns on rank 0, on every rank; a collective that changes nothing.

    Raises:
        ConfigError: see decide_start; raised on every rank.
    """
    return world.run_on_main(lambda: decide_start(config), Start)


def tidy(run_dir: Path, start: Start) -> Start:
    """Leave only files of this run in its folder, say so, and return the start with the final paths."""
    for warning in start.warnings:
        logger.warning("%s", warning)
    if start.is_moved_aside:
        logger.warning("%s holds an earlier run, which is moved to %s", run_dir, _move_aside(run_dir))
    for replaced in [*run_dir.glob(".replaced-*"), *(run_dir / EXPORTS).glob(".replaced-*")]:
        original = replaced.with_name(replaced.name.removeprefix(".replaced-"))
        if original.exists():
            shutil.rmtree(replaced)
        else:  # the run was killed between the two renames
            os.rename(replaced, original)
    for partial in (run_dir / EXPORTS).glob(".partial-*"):
        shutil.rmtree(partial)
    _tidy_best(run_dir, start)
    start = _tidy_checkpoints(start)
    if start.checkpoint is not None:  # the run may have been killed before it replaced the pointer
        write_atomically(run_dir / "latest", start.checkpoint.name)
    return start


def _move_aside(run_dir: Path) -> Path:
    """Move what an earlier run left to a new folder next to its own, run.json last, and return the new folder."""
    target = free_name(run_dir)
    target.mkdir()
    for path in sorted(run_dir.iterdir(), key=lambda path: path.name == RECORD):
        if path.name not in STAYS:
            os.rename(path, target / path.name)
    return target


def _tidy_best(run_dir: Path, start: Start) -> None:
    """Move best/ aside unless it is a whole actor of this run whose accuracy later ones can be compared with."""
    best = run_dir / "best"
    if not best.exists():
        return
    try:
        note = json.loads((best / "best.json").read_text())
        fault = "is of another run" if note["run_id"] != start.run_id else ""
        float(note["accuracy"])
    except (OSError, ValueError, KeyError, TypeError):
        fault = "has no readable best.json"
    if not fault and not any(best.glob("*.safetensors")):
        fault = "holds no weights"
    if not fault and start.is_other_evaluation:
        fault = "was found with another evaluation"
    if fault:
        logger.warning("%s %s: it is moved to %s, and the best actor is sought anew", best, fault, set_aside(best))


def _tidy_checkpoints(start: Start) -> Start:
    """Give a checkpoint back the name that it had before another one was about to replace it."""
    if start.checkpoint is None:
        return start
    final = {start.checkpoint: start.checkpoint}
    for replaced in start.checkpoint.parent.glob(".replaced-step_*"):
        original = replaced.with_name(replaced.name.removeprefix(".replaced-"))
        if original.exists() and replaced != start.checkpoint:
            shutil.rmtree(replaced)
            continue
        if original.exists():  # it is damaged, and a warning says so
            set_aside(original)
        os.rename(replaced, original)
        final[replaced] = original
    return dataclasses.replace(start, checkpoint=final[start.checkpoint])
