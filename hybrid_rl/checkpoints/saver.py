"""Checkpoints that are either whole or absent, and the export of the actor as a Hugging Face folder."""

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


class Saved(Protocol):
    """What a checkpoint keeps in a folder of its own. Every rank calls both."""

    def snapshot(self) -> Snapshot:
        """Return this rank's share, copied to the host."""
        ...

    def load(self, folder: Path) -> None:
        """Read what the ranks' snapshots wrote, however many they were."""
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
    """Where a checkpoint waits while another of the same step takes its place."""
    return folder.with_name(f".replaced-{folder.name}")


class Saver:
    """Writes checkpoints from copies on the host, one at a time, while the run goes on."""

    def __init__(self, run_dir: Path, *, keep_last: int, world: World) -> None:
        """Clear away what a killed run left half written; every rank does it, before any saves."""
        self._run_dir = run_dir
        self._keep_last = keep_last
        self._world = world
        self._line = world.duplicate_group()
        self._taken: dict[str, Snapshot] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if world.is_main:
            for partial in (run_dir / "checkpoints").glob(".partial-*"):
                shutil.rmtree(partial)
        world.barrier()

    def take(self, name: str, part: Saved) -> None:
        """Copy a part to the host as it is now; the copies of the checkpoint before are gone by then."""
        self.wait()
        self._taken[name] = part.snapshot()

    def check_space(self, num_bytes: int) -> None:
        """Refuse to begin what the disk cannot hold; num_bytes is this rank's share.

        Raises:
            ConfigError: names what is wanted and what is free.
        """
        found = self._run_dir
        while not found.exists():
            found = found.parent
        wanted, free = sum(self._world.all_gather(num_bytes)), self._world.all_gather(shutil.disk_usage(found).free)[0]
        check(
            wanted <= free,
            f"a checkpoint takes {wanted:,} bytes and {found} has {free:,} free: clear some, lower "
            "checkpoint.keep_last, or set run.dir",
        )

    def start(self, step: int, state: Mapping[str, Any]) -> None:
        """Begin to write the checkpoint of a finished step from what was taken.

        Args:
            state: plain JSON values that are the same on every rank (loader position, versions).
        """
        self.wait()
        parts, self._taken = self._taken, {}
        self.check_space(sum(part.num_bytes for part in parts.values()))
        self._thread = threading.Thread(target=self._write, args=(step, parts, dict(state), _rng_state()))
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            Exception: what went wrong with it, on any rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def surface(self) -> None:
        """Raise what went wrong since, without waiting for what is still being written; see wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def close(self) -> None:
        """Let what is being written end; an error is only logged, for the run ends anyway."""
        try:
            self.wait()
        except BaseException:
            logger.exception("the last checkpoint was not written")

    def _write(
        self, step: int, parts: Mapping[str, Snapshot], state: Mapping[str, Any], rng: Mapping[str, Any]
    ) -> None:
        try:
            write(self._run_dir, step, parts, state, rng, keep_last=self._keep_last, world=self._line)
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
    """Write the checkpoint of a step; a crash at any moment leaves the one before it in force.

    Everything goes into a temporary folder, which is renamed when all ranks are done; then `latest` is replaced, and
    only then old checkpoints are deleted.

    Raises:
        OSError: a rank could not write its share; says which one and why.
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
        _put_in_force(run_dir, partial, folder, keep_last)
    world.barrier()


def _put_in_force(run_dir: Path, partial: Path, folder: Path, keep_last: int) -> None:
    """Rename a whole checkpoint, point to it, delete old ones."""
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
    """Return the step, the number of ranks, and the state that was given to save."""
    return json.loads((folder / "state.json").read_text())


def load_rng(folder: Path, world: World) -> None:
    """Set this rank's random generators as they were; a rank that was not there then takes those of another one."""
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
