"""Blocks of multiprocessing.shared_memory, by which vLLM's processes exchange messages."""

import re
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory


def mapped_shared_memory() -> set[str]:
    """Return the names of the multiprocessing.shared_memory blocks that this process maps."""
    with open("/proc/self/maps") as maps:
        return set(re.findall(r"/dev/shm/(psm_\w+)$", maps.read(), re.MULTILINE))


def remove_shared_memory(names: Iterable[str]) -> None:
    """Remove the blocks that processes left behind when they ended; skip the names that no longer exist."""
    for name in names:
        try:
            block = SharedMemory(name)
        except FileNotFoundError:
            continue
        block.close()
        block.unlink()
