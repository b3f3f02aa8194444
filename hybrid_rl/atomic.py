"""Files that are replaced atomically, and renames that survive a power failure."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file and flush it to disk; a reader, or a crash at any moment, finds the old or the new content.

    Args:
        path: file to create or replace; its folder exists.
        content: text is encoded as UTF-8.
    """
    if isinstance(content, str):
        # Sampled bytes can decode to half a surrogate pair, which UTF-8 cannot encode; JSON reads its escape the same.
        content = content.encode(errors="backslashreplace")
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, so that files created, renamed or deleted in it stay so."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
