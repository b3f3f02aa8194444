"""Checkpoints, each complete or absent, written by a thread while the run goes on."""

import json
import logging
import os
import random
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hybrid_rl.atomic import write_atomically
from hybrid_rl.checkpoints.snapshot import Snapshot
from hybrid_rl.config import check
from hybrid_rl.distributed import World

logger = logging.getLogger(__name__)


class CheckpointPart(Protocol):
    """A part of a checkpoint, such as the actor. Both methods are collectives."""

    def snapshot(self) -> Snapshot:
        """Return a host copy of this rank's state."""
        ...

    def load(self, folder: Path) -> None:
        """Load the state from the files that any number of ranks wrote."""
        ...


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:06d}"


def latest(run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    pointer = run_dir / "latest"
    if not pointer.exists():
        return None
    folder = run_dir / "checkpoints" / pointer.read_text().strip()
    found = [f for f in (folder, _replaced(folder)) if f.is_dir()]
    return found[0] if found else None


def _replaced(folder: Path) -> Path:
    """Return the folder to which a checkpoint moves while another one of the same step replaces it."""
    return folder.with_name(f".replaced-{folder.name}")


class Saver:
    """Writes checkpoints from snapshots on the host, one at a time, in a thread."""

    def __init__(self, run_dir: Path, *, keep_last: int, world: World) -> None:
        """Delete checkpoints that a killed run left incomplete; a collective.

        Args:
            run_dir: folder of the run; checkpoints go into `checkpoints/`.
            keep_last: number of checkpoints to keep.
            world: all ranks.
        """
        self._run_dir = run_dir
        self._keep_last = keep_last
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
        """Check that the disk has room for a checkpoint; a collective.

        Args:
            num_bytes: size of the files that this rank writes.
        Raises:
            ConfigError: the disk has less free space than all ranks need.
        """
        found = self._run_dir
        while not found.exists():
            found = found.parent
        wanted, free = sum(self._world.all_gather(num_bytes)), self._world.all_gather(shutil.disk_usage(found).free)[0]
        check(
            wanted <= free,
            f"a checkpoint takes {wanted:,} bytes and {found} has {free:,} free: free some, lower "
            "checkpoint.keep_last, or set run.dir to another disk",
        )

    def start(self, step: int, state: Mapping[str, Any]) -> None:
        """Start to write the checkpoint of a finished step from the snapshots; a collective.

        Args:
            step: the finished step.
            state: JSON values that are the same on every rank, such as the position of the data loader.
        Raises:
            ConfigError: the disk has no room.
        """
        self.wait()
        parts, self._snapshots = self._snapshots, {}
        self.check_space(sum(part.num_bytes for part in parts.values()))
        self._thread = threading.Thread(target=self._write, args=(step, parts, dict(state), _rng_state()))
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint in progress, if any, is written.

        Raises:
            OSError: it could not be written, on any rank; raised once.
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
        """Wait for the checkpoint in progress; its error is logged and not raised, because the run ends anyway."""
        try:
            self.wait()
        except BaseException:
            logger.exception("the last checkpoint was not written")

    def _write(
        self, step: int, parts: Mapping[str, Snapshot], state: Mapping[str, Any], rng: Mapping[str, Any]
    ) -> None:
        try:
            write(self._run_dir, step, parts, state, rng, keep_last=self._keep_last, world=self._thread_world)
        except BaseException as error:
            self._error = error


def write(
    run_dir: Path,
    step: int,
    parts: Mapping[str, Snapshot],
    state: Mapping[str, Any],
    rng: Mapping[str, Any],
    *,
    keep_last: int,
    world: World,
) -> None:
    """Write the checkpoint of a step; a collective. After a crash at any moment, `latest` finds a complete checkpoint.

    All ranks write into a temporary folder, which is renamed when they are done; then the file `latest` is replaced,
    and then old checkpoints are deleted.

    Args:
        run_dir: folder of the run.
        step: the finished step.
        parts: name -> snapshot of this rank; each part gets a folder.
        state: JSON values, the same on every rank.
        rng: state of this rank's random generators.
        keep_last: number of checkpoints to keep.
        world: all ranks.
    Raises:
        OSError: some rank could not write its files; the message names ranks and reasons.
    """
    folder = run_dir / "checkpoints" / checkpoint_name(step)
    partial = folder.with_name(f".partial-{folder.name}")
    failure = None
    try:
        partial.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            part.write(partial / name, world.rank)
        torch.save(rng, partial / f"rng_rank{world.rank}.pt")
    except Exception as error:
        failure = f"rank {world.rank}: {type(error).__name__}: {error}"
    failures = [text for text in world.all_gather(failure) if text]
    if failures:
        raise OSError(f"the checkpoint of step {step} could not be written; " + "; ".join(failures))
    if world.is_main:
        (partial / "state.json").write_text(json.dumps({"step": step, "world_size": world.size, **state}))
        _publish(run_dir, partial, folder, keep_last)
    world.barrier()


def _publish(run_dir: Path, partial: Path, folder: Path, keep_last: int) -> None:
    """Make a complete checkpoint the latest one, and delete old ones."""
    if folder.exists():
        shutil.rmtree(_replaced(folder), ignore_errors=True)
        os.replace(folder, _replaced(folder))
    os.replace(partial, folder)
    write_atomically(run_dir / "latest", folder.name)
    shutil.rmtree(_replaced(folder), ignore_errors=True)
    others = sorted(f for f in (run_dir / "checkpoints").glob("step_*") if f != folder)
    for old in others[: max(0, len(others) - keep_last + 1)]:
        shutil.rmtree(old)


def read_state(folder: Path) -> dict[str, Any]:
    """Return step, world_size and the state that was passed to `Saver.start`."""
    return json.loads((folder / "state.json").read_text())


def load_rng(folder: Path, world: World) -> None:
    """Restore the random generators of this rank; a rank that did not exist then takes those of another rank."""
    saved_rank = world.rank % read_state(folder)["world_size"]
    _set_rng_state(torch.load(folder / f"rng_rank{saved_rank}.pt", weights_only=False))


def _rng_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
