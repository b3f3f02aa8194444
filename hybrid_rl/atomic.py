"""Files that a reader, or a crash, finds whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace a file so that a reader, or a crash at any moment, sees the old content or the new; it is on the disk."""
    if isinstance(content, str):
        # Half a surrogate pair, which sampled bytes can decode to, is no UTF-8; its backslash escape is the same JSON.
        content = content.encode(errors="backslashreplace")
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
