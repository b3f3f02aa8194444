"""The processes of this machine, from /proc: their state, their descendants, and how to kill them. Imports no torch."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

KILL_TIMEOUT_S = 5.0
"""Time limit for processes that were killed to be gone; only one that waits for a device takes longer."""


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """State of a process."""

    letter: str
    """R running, S sleeping, D waiting for a device, T stopped, t traced, Z ended."""
    started: int
    """Time of its start, by which a later process with the same id differs."""
    pid: int = 0
    parent: int = 0
    """Id of the parent process."""
    cpu_s: float = 0.0
    """Seconds of CPU time, without its children's."""

    @property
    def has_ended(self) -> bool:
        """Whether the process only waits for its parent to read its exit code."""
        return self.letter in "ZX"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.letter in "Tt"


def read_state(pid: int) -> ProcessState | None:
    """Return the state of a process; None if there is none with that id."""
    try:
        text = _read(pid, "stat").decode(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may contain spaces and parentheses
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return ProcessState(letter=fields[0], started=int(fields[19]), pid=pid, parent=int(fields[1]), cpu_s=cpu_s)


def all_states() -> list[ProcessState]:
    """Return the states of all processes of this machine."""
    return [state for pid in _pids() if (state := read_state(pid))]


def families(roots: Sequence[int]) -> list[list[ProcessState]]:
    """Return for each root the processes that run among it and its descendants, the root first."""
    states = all_states()
    children: dict[int, list[ProcessState]] = defaultdict(list)
    for state in states:
        children[state.parent].append(state)
    return [_running_from([state for state in states if state.pid == root], children) for root in roots]


def _running_from(found: list[ProcessState], children: dict[int, list[ProcessState]]) -> list[ProcessState]:
    for state in found:  # also what is added meanwhile
        found += children[state.pid]
    return [state for state in found if not state.has_ended]


def descendants(root: int) -> list[int]:
    """Return the ids of the processes that run among the descendants of a process."""
    return [state.pid for state in families([root])[0] if state.pid != root]


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of processes in bytes; a page that several of them share counts for each."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            total += int(_read(pid, "statm").split()[1])
    return total * os.sysconf("SC_PAGE_SIZE")


def kill_descendants(root: int) -> None:
    """Kill all descendants of a process, until there are none.

    A process whose parent was killed stays a descendant only if `root` is a subreaper.
    """
    _kill_until_gone(lambda: descendants(root))


def kill_marked(variable: str, value: str) -> None:
    """Kill all processes of this user whose environment had the variable with this value when they started."""
    entry = f"{variable}={value}".encode()

    def marked() -> Iterator[int]:
        for pid in _pids():
            with suppress(OSError):
                if entry in _read(pid, "environ").split(b"\0"):
                    yield pid

    _kill_until_gone(lambda: list(marked()))


def machine_id() -> str:
    """Return a text that two processes share if each can see the other one by its id."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _kill_until_gone(find: Callable[[], list[int]]) -> None:
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (found := find()) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
