"""Checkpoints, each complete or absent, written by a thread while the run goes on."""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hybrid_rl.atomic import flush_folder, make_folder, write_atomically, writing
from hybrid_rl.checkpoints.find import (
    STATE,
    checkpoint_name,
    list_checkpoints,
    read_state,
    replaced_name,
    step_of,
)
from hybrid_rl.checkpoints.manifest import describe, write_manifest
from hybrid_rl.checkpoints.random_state import restore_random_state, take_random_state
from hybrid_rl.checkpoints.snapshot import SavedTensors, Snapshot
from hybrid_rl.config import check
from hybrid_rl.distributed import World
from hybrid_rl.errors import FileWriteError

RANDOM_STATE = "random_state"
"""Name of the part of a checkpoint that holds the state of the random generators."""

SPACE_REMEDY = "free some, lower checkpoint.keep_last, or set run.dir to another disk"

logger = logging.getLogger(__name__)


class CheckpointPart(Protocol):
    """A part of a checkpoint, such as the actor. Both methods are collectives."""

    def snapshot(self) -> Snapshot:
        """Return a host copy of this rank's state."""
        ...

    def load(self, folder: Path) -> None:
        """Load the state from the files that any number of ranks wrote."""
        ...


class Saver:
    """Writes checkpoints from snapshots on the host, one at a time, in a thread."""

    def __init__(
        self, run_dir: Path, *, keep_last: int, world: World, last_step: int = 0, export_bytes: int = 0
    ) -> None:
        """Delete checkpoints that a killed run left incomplete; a collective.

        Args:
            run_dir: folder of the run; checkpoints go into `checkpoints/`.
            keep_last: number of checkpoints to keep.
            world: all ranks.
            last_step: step of the checkpoint that the run continues from.
            export_bytes: size of the exports that follow the last step.
        """
        self.last_step = last_step
        """Step of the newest checkpoint that is complete; 0 without any."""
        self._last_seconds = 0.0
        self._run_dir = run_dir
        self._keep_last = keep_last
        self._export_bytes = export_bytes
        self._world = world
        self._thread_world = world.duplicate_group()  # its collectives do not mix with those of the run
        self._snapshots: dict[str, Snapshot] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if world.is_main:
            for partial in (run_dir / "checkpoints").glob(".partial-*"):
                shutil.rmtree(partial)
        world.barrier()

    def snapshot(self, name: str, part: CheckpointPart) -> None:
        """Copy a part of the next checkpoint to the host; first wait, so that one set of copies exists at a time."""
        self.wait()
        self._snapshots[name] = part.snapshot()

    def check_space(self, num_bytes: int) -> None:
        """Check that the disk has room for all checkpoints that exist at once, and for the exports; a collective.

        One more than keep_last exists while an old one is not deleted yet. Those that are there already count.

        Args:
            num_bytes: size of the files of one checkpoint that this rank writes.
        Raises:
            ConfigError: the disk has less free space than all ranks need.
        """
        number = max(1, self._keep_last + 1 - len(list_checkpoints(self._run_dir)))
        checkpoint, free = self._sizes(num_bytes)
        check(
            number * checkpoint + self._export_bytes <= free,
            f"{number} checkpoints of {checkpoint:,} bytes and exports of {self._export_bytes:,} are to be written and "
            f"{self._run_dir} has {free:,} free: {SPACE_REMEDY}",
        )

    def _sizes(self, num_bytes: int) -> tuple[int, int]:
        """Return the size of a checkpoint over all ranks, and the free space of the disk as rank 0 sees it."""
        found = self._run_dir.absolute()
        while not found.exists():
            found = found.parent
        return sum(self._world.all_gather(num_bytes)), self._world.all_gather(shutil.disk_usage(found).free)[0]

    def start(self, step: int, state: Mapping[str, Any], *, random_state: Snapshot | None = None) -> None:
        """Start to write the checkpoint of a finished step from the snapshots; a collective.

        Args:
            step: the finished step.
            state: JSON values that are the same on every rank, such as the position of the data loader.
            random_state: the generators as the step left them; None takes their present state.
        Raises:
            FileWriteError: the disk has no room.
        """
        self.wait()
        random_state = random_state or take_random_state(self._world.rank)
        parts, self._snapshots = self._snapshots | {RANDOM_STATE: random_state}, {}
        wanted, free = self._sizes(sum(part.num_bytes for part in parts.values()))
        if wanted > free:
            raise FileWriteError(
                f"the checkpoint of step {step} takes {wanted:,} bytes and {self._run_dir} has {free:,} free: "
                f"{SPACE_REMEDY}, and start the same command again"
            )
        if wanted + self._export_bytes > free and self._world.is_main:
            logger.warning(
                "%s has %s bytes free, too few for the checkpoint of step %d and the export after the last step",
                *(self._run_dir, f"{free:,}", step),
            )
        self._thread = threading.Thread(target=self._write, args=(step, parts, dict(state)))
        self._thread.start()

    def last_seconds(self) -> float:
        """Return how long the last checkpoint took to be written; 0 before there is one."""
        return self._last_seconds

    def wait(self) -> None:
        """Wait until the checkpoint in progress, if any, is written.

        Raises:
            FileWriteError: it could not be written, on any rank; raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def raise_if_failed(self) -> None:
        """Raise the error of a checkpoint that could not be written, without waiting for one in progress; see wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def close(self) -> None:
        """Wait for the checkpoint in progress.

        Raises:
            FileWriteError: see wait.
        """
        self.wait()

    def _write(self, step: int, parts: Mapping[str, Snapshot], state: Mapping[str, Any]) -> None:
        started = time.monotonic()
        try:
            write(self._run_dir, step, parts, state, keep_last=self._keep_last, world=self._thread_world)
            self.last_step, self._last_seconds = step, time.monotonic() - started
        except BaseException as error:
            self._error = error


def write(
    run_dir: Path, step: int, parts: Mapping[str, Snapshot], state: Mapping[str, Any], *, keep_last: int, world: World
) -> None:
    """Write the checkpoint of a step; a collective. After a crash at any moment, a whole checkpoint is there.

    All ranks write into a temporary folder, in which the manifest with the checksums comes last. It is renamed when
    all of it is on the disk; then the file `latest` is replaced, and then old checkpoints are deleted.

    Args:
        run_dir: folder of the run.
        step: the finished step.
        parts: name -> snapshot of this rank; each part gets a folder.
        state: JSON values, the same on every rank.
        keep_last: number of checkpoints to keep.
        world: all ranks.
    Raises:
        FileWriteError: some rank could not write its files; the message names them.
    """
    folder = run_dir / "checkpoints" / checkpoint_name(step)
    partial = folder.with_name(f".partial-{folder.name}")
    entries: dict[str, Any] = {}

    def write_parts() -> None:
        with writing(partial):
            make_folder(partial)
        paths = [part.write(partial / name, world.rank) for name, part in parts.items()]
        entries.update(describe(partial, paths))

    def complete() -> None:
        state_file = partial / STATE
        write_atomically(state_file, json.dumps({"step": step, "world_size": world.size, **state}))
        write_manifest(partial, files | describe(partial, [state_file]))
        with writing(folder):
            for path in (*partial.iterdir(), partial):
                if path.is_dir():
                    flush_folder(path)
            _publish(run_dir, partial, folder, keep_last)

    failures = _on_all_ranks(world, write_parts)
    files = {name: entry for part in world.all_gather(entries) for name, entry in part.items()}
    failures = failures or _on_all_ranks(world, complete if world.is_main else lambda: None)
    if failures:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise FileWriteError(f"the checkpoint of step {step} is not complete: {'; '.join(failures)}")


def _on_all_ranks(world: World, work: Callable[[], None]) -> list[str]:
    """Do the work of this rank, and return what failed on any, on every rank."""
    failure = None
    try:
        work()
    except FileWriteError as error:
        failure = str(error)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return [f"rank {rank}: {text}" for rank, text in enumerate(world.all_gather(failure)) if text]


def _publish(run_dir: Path, partial: Path, folder: Path, keep_last: int) -> None:
    """Make a complete checkpoint the latest one, and delete old ones; newer ones stay."""
    if folder.exists():
        shutil.rmtree(replaced_name(folder), ignore_errors=True)
        os.replace(folder, replaced_name(folder))
    os.replace(partial, folder)
    flush_folder(folder.parent)
    write_atomically(run_dir / "latest", folder.name)
    shutil.rmtree(replaced_name(folder), ignore_errors=True)
    step = step_of(folder) or 0
    older = {number: old for old in folder.parent.glob("step_*") if (number := step_of(old)) is not None}
    steps = sorted(number for number in older if number < step)
    for number in steps[: max(0, len(steps) - keep_last + 1)]:
        shutil.rmtree(older[number])


def load_random_state(folder: Path, world: World) -> None:
    """Restore the random generators of this rank; a rank that did not exist then takes those of another rank."""
    restore_random_state(SavedTensors(folder / RANDOM_STATE), world.rank % read_state(folder)["world_size"])
