"""Folders for files that are being built, which no killed process leaves for good."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".building-"


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder that is deleted afterwards, and delete the ones that killed processes have left.

    A process locks its folder, and the kernel unlocks it however the process ends. Only one process at a time creates
    folders and looks for unlocked ones.
    """
    with contextlib.ExitStack() as stack:
        with _locked(parent, waits=True):
            for left in parent.glob(f"{PREFIX}*"):
                with _locked(left) as is_dead:
                    if is_dead:
                        shutil.rmtree(left, ignore_errors=True)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)))
            stack.enter_context(_locked(scratch))
        yield scratch


@contextmanager
def _locked(folder: Path, *, waits: bool = False) -> Iterator[bool]:
    """Lock a folder in the body, and yield whether it is locked: not if another process has, or without locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        is_locked = True
    except OSError:
        is_locked = False
    try:
        yield is_locked
    finally:
        os.close(descriptor)
