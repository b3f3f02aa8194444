"""The lock of a run's folder, which keeps a second run out of it."""

import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from pathlib import Path
from typing import TextIO

from hybrid_rl.config import ConfigError, check

LOCK_FILE = "lock"
PATIENCE_S = 10.0
"""Seconds to wait for a lock: a process that was killed releases it only when its memory is freed."""

logger = logging.getLogger(__name__)


class RunLock:
    """An exclusive lock on a run's folder, held until `unlock` or the end of this process, however it ends.

    The kernel holds the lock for an open file. Processes that this one starts do not keep the file open: a program
    that is started closes it, because Python opens files close-on-exec, and a fork closes it before anything else.
    """

    def __init__(self, run_dir: Path, *, patience_s: float = PATIENCE_S) -> None:
        """Create the folder if needed, and lock it.

        Raises:
            ConfigError: the folder cannot be written, or another run holds the lock; the message has its pid and host.
        """
        path = run_dir / LOCK_FILE
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            check(os.access(run_dir, os.W_OK | os.X_OK), f"{_field(run_dir)}: this user may not write there")
            self._file = path.open("a+")
        except OSError as error:
            raise ConfigError(f"{_field(run_dir)}: cannot be written ({error.strerror}: {error.filename})") from error
        try:
            _lock(self._file, run_dir, patience_s)
        except BaseException:
            self._file.close()
            raise
        _HELD.add(self)
        self._file.truncate(0)
        print(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), file=self._file, flush=True)

    def unlock(self) -> None:
        """Let another run take the folder; does nothing if it is released."""
        self._file.close()


def check_unlocked(run_dir: Path) -> None:
    """Check that no run holds the lock of a folder, which need not exist; creates nothing.

    Raises:
        ConfigError: another run holds it.
    """
    path = run_dir / LOCK_FILE
    if path.is_file():
        with path.open("r+") as file:
            _lock(file, run_dir, 0.0)


def _lock(file: TextIO, run_dir: Path, patience_s: float) -> None:
    """Lock an open file, and wait for its holder for some seconds."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{_field(run_dir)}: another run uses this folder, {_holder(file)}; wait for it, stop it, or set "
                    "another run.name"
                ) from error
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            logger.warning(
                "%s: its file system has no locks (%s), so nothing keeps a second run out of it", run_dir, error
            )
            return


def _field(run_dir: Path) -> str:
    return f"run.dir, run.name = {run_dir}"


def _holder(file: TextIO) -> str:
    try:
        file.seek(0)
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "whose process is not known yet"


_HELD: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


def _close_all() -> None:
    """Close the locks' files in a forked child; the parent's locks stay, because its files stay open."""
    for lock in list(_HELD):
        lock.unlock()


os.register_at_fork(after_in_child=_close_all)
