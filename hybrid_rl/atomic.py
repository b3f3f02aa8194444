"""Files that are replaced atomically, and renames that survive a power failure."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hybrid_rl.errors import FileWriteError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what fails while the body writes a file or a folder into one sentence that names it.

    Raises:
        FileWriteError: the body raised an OSError, or an error of safetensors, which has no class of its own for a full
            disk.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FileWriteError(
            f"{path} cannot be written ({reason}): free space on its disk or set run.dir to another one, and start the "
            "same command again, which continues the run"
        ) from error


def write_atomically(path: Path, content: bytes | str, *, is_flushed: bool = True) -> None:
    """Replace a file, which only the user can read; a reader, or a crash at any moment, finds the old or new content.

    Args:
        path: file to create or replace; its folder exists.
        content: text is encoded as UTF-8.
        is_flushed: whether the content is on the disk when this returns, so that it also survives a power failure.

    Raises:
        FileWriteError: the file cannot be written; the old one is unchanged.
    """
    if isinstance(content, str):
        # Sampled bytes can decode to half a surrogate pair, which UTF-8 cannot encode; JSON reads its escape the same.
        content = content.encode(errors="backslashreplace")
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            partial.unlink(missing_ok=True)  # of a process that was killed, perhaps with another mode
            with open(partial, "wb", opener=_open_private) as file:
                file.write(content)
                file.flush()
                if is_flushed:
                    os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        if is_flushed:
            flush_folder(path.parent)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def append(path: Path, content: bytes) -> None:
    """Append to a file, which only the user can read, and flush it; where that fails, it has its former length.

    Raises:
        FileWriteError: the file cannot be written.
    """
    with writing(path), open(path, "ab", buffering=0, opener=_open_private) as file:
        length = file.tell()
        try:
            remaining = memoryview(content)
            while remaining:
                remaining = remaining[file.write(remaining) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(length)
            raise


def make_folder(folder: Path) -> None:
    """Create a folder with its parents, each of which is on the disk when this returns."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, so that files created, renamed or deleted in it stay so."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush a folder with all files and folders in it to disk."""
    for root, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(root, name) for name in names), Path(root)):
            flush_folder(path)


def set_aside(path: Path) -> Path:
    """Rename a file or folder to what free_name returns, and return the new path."""
    target = free_name(path)
    os.rename(path, target)
    return target


def free_name(path: Path) -> Path:
    """Return `<path>.old-<n>` with the lowest n from 1 on that no file or folder has."""
    number = 1
    while (target := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return target
