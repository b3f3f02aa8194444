"""Blocks of shared memory by which vLLM's processes exchange messages and, on a CPU, tensors."""

import re
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

_NAME = r"(?:psm|vllm_dist)_[\w.:\[\]-]+"
"""Names of multiprocessing.shared_memory, and of vLLM's tensors on a CPU."""


def mapped_shared_memory(pid: int) -> set[str]:
    """Return the names of the blocks that a process maps; none if it has ended."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return set(re.findall(rf"/dev/shm/({_NAME})$", text, re.MULTILINE))


def remove_shared_memory(names: Iterable[str], *, is_tracked: bool) -> None:
    """Remove the blocks that processes left behind when they ended; skip other names, and names that do not exist.

    Args:
        is_tracked: whether a process of this run has made the blocks, so that Python's resource tracker, which all
            processes of a run share, must learn that they are gone.
    """
    for name in names:
        if not re.fullmatch(_NAME, name):
            continue
        with suppress(OSError):  # several processes may remove a block, of which one succeeds
            Path("/dev/shm", name).unlink()
            if is_tracked and name.startswith("psm_"):
                resource_tracker.unregister(f"/{name}", "shared_memory")
