"""Checks of the folders that a run writes to."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hybrid_rl.config import ConfigError, check


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def check_writable(path: Path, field: str) -> None:
    """Check that files can be created in a folder, by creating and deleting one; the folder itself is not created.

    Args:
        path: folder, which need not exist.
        field: setting that names it with its value, for messages.

    Raises:
        ConfigError: they cannot.
    """
    folder = nearest_folder(path)
    check(folder.is_dir(), f"{field}: {folder} is a file, not a folder; give another path")
    try:
        with tempfile.NamedTemporaryFile(prefix=".hybrid_rl_check_", dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{field}: no file can be created in {folder} ({reason}); give a writable folder") from error


def check_space(path: Path, needs: Mapping[str, int], *, reused_bytes: int = 0) -> None:
    """Check that the disk of a folder has room.

    Args:
        path: folder, which need not exist.
        needs: use -> bytes of the files that a run will write.
        reused_bytes: bytes of files that the run will delete.

    Raises:
        ConfigError: it has not; the message lists the uses.
    """
    folder = nearest_folder(path)
    free, needed = shutil.disk_usage(folder).free + reused_bytes, sum(needs.values())
    uses = ", ".join(f"{size:,} for {use}" for use, size in needs.items() if size)
    check(
        needed <= free,
        f"the run writes {needed:,} bytes to {path} ({uses}), but {free:,} are free: free some, lower "
        "checkpoint.keep_last, or set run.dir to another disk",
    )


def folder_bytes(path: Path) -> int:
    """Return the size of all files below a folder; 0 if it does not exist."""
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def check_temporary_folder() -> None:
    """Check that TMPDIR, if set, is the folder that Python takes for temporary files, and is writable.

    Raises:
        ConfigError: it is not; Python would silently take another folder.
    """
    wanted = os.environ.get("TMPDIR")
    if wanted:
        check_writable(Path(wanted), f"TMPDIR = {wanted}")
        check(Path(wanted).is_dir(), f"TMPDIR = {wanted}: no such folder; create it, or unset TMPDIR")
        return
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"there is no writable folder for temporary files: set TMPDIR ({error.strerror})") from error
