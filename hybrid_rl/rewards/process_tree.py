"""Processes and their descendants, read from /proc."""

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

KILL_TIMEOUT_S = 5.0
"""Time limit for processes that were killed to be gone; only one that waits for a device takes longer."""


def descendants(*roots: int) -> list[list[int]]:
    """Return for each root the ids of all living processes that descend from it; zombies do not count."""
    children: dict[int, list[int]] = defaultdict(list)
    zombies = set()
    for process_id in _process_ids():
        with contextlib.suppress(OSError, ValueError):
            state, parent = _state_and_parent(process_id)
            children[parent].append(process_id)
            if state in "ZX":
                zombies.add(process_id)
    return [[process_id for process_id in _below(root, children) if process_id not in zombies] for root in roots]


def is_stopped(process_id: int) -> bool:
    """Return whether a process is stopped, by a signal or by a debugger."""
    try:
        return _state_and_parent(process_id)[0] in "Tt"
    except (OSError, ValueError):
        return False


def resident_bytes(process_ids: Iterable[int]) -> int:
    """Return the resident memory of processes in bytes; a page that several of them share counts for each."""
    total = 0
    for process_id in process_ids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(_read(process_id, "statm").split()[1])
    return total * os.sysconf("SC_PAGE_SIZE")


def kill_descendants(root: int) -> None:
    """Kill all descendants of a process, until there are none.

    A process whose parent was killed stays a descendant only if `root` is a subreaper.
    """
    _kill_until_gone(lambda: descendants(root)[0])


def kill_marked(variable: str, value: str) -> None:
    """Kill all processes of this user whose environment had the variable with this value when they started."""
    entry = f"{variable}={value}".encode()

    def marked() -> Iterator[int]:
        for process_id in _process_ids():
            with contextlib.suppress(OSError):
                if entry in _read(process_id, "environ").split(b"\0"):
                    yield process_id

    _kill_until_gone(lambda: list(marked()))


def _kill_until_gone(find: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (found := find()) and time.monotonic() < deadline:
        for process_id in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process_id, signal.SIGKILL)
        time.sleep(0.01)


def _below(root: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    waiting = [root]
    while waiting:
        found = children.get(waiting.pop(), [])
        waiting += found
        yield from found


def _state_and_parent(process_id: int) -> tuple[str, int]:
    # "id (name) state parent ..."; the name may hold blanks and brackets.
    fields = _read(process_id, "stat").rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[1])


def _process_ids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _read(process_id: int, name: str) -> bytes:
    with open(f"/proc/{process_id}/{name}", "rb") as file:
        return file.read()
