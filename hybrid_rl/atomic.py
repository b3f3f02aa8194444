"""Files that are replaced atomically."""

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
