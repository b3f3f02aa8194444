"""What a fault is, and how a run that meets one must end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STALL_TIMEOUT_S = 20
"""run.stall_timeout_s of all runs."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The run ends with one sentence, leaves nothing, and the same command then trains what an undisturbed run does."""

    code: int
    """Exit code of the command; minus the number of the signal that kills it."""
    sentence: str
    """Regular expression that occurs in the one line that begins with `error: `; an empty one expects no such line."""
    within_s: float = 30.0
    """Seconds from the fault to the end."""


@dataclass(frozen=True, kw_only=True)
class GoesOn:
    """The run does all its steps, and leaves what an undisturbed run leaves."""

    is_same: bool = True
    """Whether metrics, rollouts and weights are the same."""
    warning: str = ""
    """Regular expression that occurs in the output."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault of a process."""

    run: str
    """Kind of run, a key of runs.KINDS."""
    subject: str
    """Process that meets the fault, a key of processes.SUBJECTS."""
    phase: str
    """Phase of step 2, or start, or checkpoint."""
    fault: str
    """A key of processes.FAULTS."""
    expected: Ends | GoesOn
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of this case, by their dotted names."""
    is_in_test_slow: bool = False
    """Whether `make test-slow` runs the case; `make faults` runs all."""

    @property
    def name(self) -> str:
        """Name that no other case has."""
        changed = "".join(f", {name} = {value}" for name, value in self.settings.items())
        return f"{self.run}: {self.fault} to {self.subject} in {self.phase}{changed}"

    @property
    def row(self) -> dict[str, str]:
        """Columns of the CSV that describe the case."""
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items())
        described = {"run": self.run, "subject": self.subject, "phase": self.phase}
        return {**described, "fault": self.fault, "settings": settings}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run with a fault ended."""

    seconds: float
    """From the fault to the end."""
    code: int
    output: str
    leftovers: list[str]
    """Processes, files of /dev/shm, entries of TMPDIR and listening ports 15 s after the end."""
    open_ports: list[str]
    """Addresses, other than loopback, at which a process of the run listened."""
    differences: list[str]
    """What differs from an undisturbed run: after the end for GoesOn, after one more run for Ends."""

    @property
    def sentences(self) -> list[str]:
        """Lines with errors, without their beginning."""
        lines = self.output.splitlines()
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
