"""State of a process of this machine, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path


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
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may contain spaces and parentheses
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return ProcessState(letter=fields[0], started=int(fields[19]), pid=pid, parent=int(fields[1]), cpu_s=cpu_s)


def machine_id() -> str:
    """Return a text that two processes share if each can see the other one by its id."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
