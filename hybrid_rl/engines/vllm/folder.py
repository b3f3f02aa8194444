"""The temporary folder of an engine, which holds its sockets, and by which a later run removes what a dead run left."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hybrid_rl.engines.vllm.shared_memory import remove_shared_memory

_PREFIX = "hybrid_rl_engine_"
_LOCK, _BLOCKS, _END = "lock", "shared_memory", "end"
"""Files of the folder: one that the trainer locks while it lives, the names of the blocks of shared memory, and one
that exists once the trainer asks the engine to end."""
_MAX_PARENT = 44
"""Characters of the folder's parent. A Unix socket's path has at most 107, of which vLLM's name takes 37 and the
folder's own name 26."""


def socket_folder() -> Path:
    """Return the parent folder: the temporary folder, or /tmp where its path is too long for a Unix socket."""
    folder = tempfile.gettempdir()
    return Path(folder if len(folder) <= _MAX_PARENT else "/tmp")


class EngineFolder:
    """A folder that exists as long as the engine; its lock tells other runs that the engine's trainer lives."""

    def __init__(self) -> None:
        """Remove what dead runs of this user have left, and create the folder."""
        remove_dead()
        self._blocks: set[str] = set()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=socket_folder()))
            lock = _locked(self.path)
            if lock is not None:
                self._lock = lock
                return

    def record(self, blocks: Iterable[str]) -> None:
        """Record further blocks of shared memory of the engine, which are removed with the folder."""
        if not self._blocks.issuperset(blocks):
            self._blocks.update(blocks)
            (self.path / _BLOCKS).write_text("\n".join(sorted(self._blocks)))

    def request_end(self) -> None:
        """Let the engine's processes obey SIGTERM, see lifetime.ignore_signals_of_others."""
        with suppress(OSError):
            (self.path / _END).touch()

    def remove(self) -> None:
        """Remove the folder, and the blocks of shared memory that are left."""
        remove_folder(self.path, is_tracked=True)
        os.close(self._lock)


def is_end_requested(path: Path) -> bool:
    """Return whether the trainer has asked the engine to end, or has removed the engine's folder."""
    return (path / _END).exists() or not path.exists()


def remove_folder(path: Path, *, is_tracked: bool) -> None:
    """Remove the folder of an engine that has ended, and the blocks of shared memory that it names.

    Args:
        is_tracked: see remove_shared_memory.
    """
    with suppress(OSError):
        remove_shared_memory((path / _BLOCKS).read_text().splitlines(), is_tracked=is_tracked)
    shutil.rmtree(path, ignore_errors=True)


def remove_dead() -> None:
    """Remove the folders of this user's engines whose trainers have ended, which nobody locks."""
    for path in socket_folder().glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid() and (path / _LOCK).exists():
                lock = _locked(path)
                if lock is not None:
                    remove_folder(path, is_tracked=False)
                    os.close(lock)


def _locked(path: Path) -> int | None:
    """Return a descriptor that locks a folder; None if another process has locked or removed it."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (path / _LOCK).exists():
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None
