"""The list of a checkpoint's files with their checksums, which tells a whole checkpoint from a damaged one."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hybrid_rl.atomic import write_atomically

MANIFEST = "manifest.json"
CHUNK_BYTES = 32 << 20
"""Bytes that one thread hashes at a time."""


def num_threads() -> int:
    """Return the number of threads that hash: one per CPU that this process may use, at most 32."""
    return min(32, len(os.sched_getaffinity(0)))


def digest_files(paths: Iterable[Path]) -> dict[Path, str]:
    """Return path -> checksum of each file: the SHA-256 of the SHA-256 digests of its chunks of CHUNK_BYTES.

    Chunks are hashed by several threads, so that a few large files take no longer than many small ones.

    Raises:
        OSError: a file cannot be read.
    """
    chunks = {path: range(0, max(1, path.stat().st_size), CHUNK_BYTES) for path in paths}
    with ThreadPoolExecutor(num_threads()) as pool:
        hashes = {
            path: [pool.submit(_digest_chunk, path, start) for start in starts] for path, starts in chunks.items()
        }
        return {
            path: hashlib.sha256(b"".join(digest.result() for digest in digests)).hexdigest()
            for path, digests in hashes.items()
        }


def _digest_chunk(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(CHUNK_BYTES)).digest()


def write_manifest(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the manifest of a checkpoint.

    Args:
        folder: of the checkpoint.
        files: for every file, name relative to the folder -> `bytes` and `sha256`, as `describe` returns them.
    """
    content = {"files": dict(sorted(files.items()))}
    write_atomically(folder / MANIFEST, json.dumps(content | {"sha256": _own_digest(content)}, indent=1) + "\n")


def describe(folder: Path, paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the entries of a manifest for files in a checkpoint's folder."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in digest_files(paths).items()
    }


def find_damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, in words that name the first such file; None if all are whole.

    Reads every file once.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text())
        files, own = content["files"], content.pop("sha256")
        is_whole = own == _own_digest(content)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        return f"{MANIFEST} is damaged"
    others = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    for name in others:
        if name not in files:
            return f"{name} is not one of its files"
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {entry['bytes']:,}"
    try:
        found = digest_files(folder / name for name in files)
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"
    damaged = [name for name, entry in files.items() if found[folder / name] != entry["sha256"]]
    return f"{damaged[0]} is damaged: its checksum is not the one it was written with" if damaged else None


def _own_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
