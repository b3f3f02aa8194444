"""Which process of a run meets a fault, at which moment, and what the fault is."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.faults.services import Site, heartbeat

PHASE = re.compile(r"step (\d+): (sync|rollout|score|update_critic|update_actor)$", re.M)
STEP = 2
"""Step whose phases meet the faults."""
FAULTS: dict[str, list[tuple[signal.Signals, float]]] = {
    "SIGKILL": [(signal.SIGKILL, 0.0)],
    "SIGTERM": [(signal.SIGTERM, 0.0)],
    "SIGINT": [(signal.SIGINT, 0.0)],
    "SIGSTOP": [(signal.SIGSTOP, 0.0)],
    "SIGSTOP for 2 s": [(signal.SIGSTOP, 2.0), (signal.SIGCONT, 0.0)],
}
"""Name -> signals, each with the seconds that follow it."""


class MissedError(Exception):
    """The run has passed the moment of the fault before it was met."""


class EndedError(Exception):
    """The run has ended before the fault was met."""


class LiveRun:
    """A run that goes on, seen through its files."""

    def __init__(self, run_dir: Path, program: psutil.Process, site: Site) -> None:
        """Take the folder of the run, the process of its command, and the site that it uses."""
        self.run_dir, self.program, self.site = run_dir, program, site

    def wait_for(
        self, is_reached: Callable[[], bool], what: str, *, limit_s: float = 600.0, interval_s: float = 0.001
    ) -> None:
        """Wait until something holds, and look every `interval_s` seconds.

        Raises:
            EndedError: the command ends first.
            TimeoutError: the time is over.
        """
        deadline = time.monotonic() + limit_s
        while not is_reached():
            if not self.is_running():
                raise EndedError(f"the run ended before: {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not seen in {limit_s:g} s: {what}")
            time.sleep(interval_s)

    def is_running(self) -> bool:
        """Return whether the command has not ended."""
        try:
            return self.program.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def rank_pid(self, rank: int = 0) -> int:
        """Return the process id of a rank, once it has written its heartbeat."""
        self.wait_for(lambda: "pid" in heartbeat(self.run_dir, rank), f"heartbeat of rank {rank}")
        return heartbeat(self.run_dir, rank)["pid"]

    def place(self) -> tuple[int, str]:
        """Return step and phase that rank 0 is in; step 0 before its first phase."""
        try:
            found = PHASE.findall((self.run_dir / "log.txt").read_text())
        except FileNotFoundError:
            return 0, "none"
        return (int(found[-1][0]), found[-1][1]) if found else (0, "start")

    def is_saving(self) -> bool:
        """Return whether the checkpoint of STEP is being written."""
        return (self.run_dir / "checkpoints" / f".partial-step_{STEP:06d}").exists()

    @contextmanager
    def held_in(self, phase: str) -> Iterator[None]:
        """Wait until rank 0 is in a phase, and stop it there while the body runs, so that the phase does not end.

        Raises:
            MissedError: the phase ended before rank 0 was stopped.
        """
        reached = {"start": lambda: self.place() == (0, "start"), "checkpoint": self.is_saving}.get(
            phase, lambda: self.place() == (STEP, phase)
        )
        rank = self.rank_pid()
        self.wait_for(reached, f"phase {phase}")
        os.kill(rank, signal.SIGSTOP)
        try:
            if not reached():
                raise MissedError(f"phase {phase} is over")
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGCONT)


def rank_0(run: LiveRun) -> int:
    """Return the process of rank 0."""
    return run.rank_pid()


def rank_1(run: LiveRun) -> int:
    """Return the process of rank 1."""
    return run.rank_pid(1)


def launcher(run: LiveRun) -> int:
    """Return the process of the command; a run of one rank is rank 0 itself."""
    return run.program.pid


def busy_scorer(run: LiveRun) -> int:
    """Return the process of a scorer that works on a response."""
    run.wait_for(lambda: bool(run.site.scoring_pids()), "a scorer that works")
    return run.site.scoring_pids()[0]


def scorers_parent(run: LiveRun) -> int:
    """Return the parent of a scorer that works on a response."""
    return psutil.Process(busy_scorer(run)).ppid()


def idle_scorer(run: LiveRun) -> int:
    """Return the process of a scorer that waits for responses."""
    return run.site.last_scorer()


def service(run: LiveRun) -> int:
    """Return the process of the reward service."""
    return run.site.service_pid


def busy_service(run: LiveRun) -> int:
    """Return the process of the reward service, which works on a request."""
    run.wait_for(run.site.is_serving, "a request to the reward service")
    return run.site.service_pid


def engine_core(run: LiveRun) -> int:
    """Return the core process of vLLM."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = _descendants(run, "VLLM::EngineCor")
        return bool(found)

    run.wait_for(is_there, "the engine's core process", interval_s=0.1)
    return found[0]


def engine_worker(run: LiveRun) -> int:
    """Return the second worker process of vLLM."""
    return max(_descendants(run, "VLLM::Worker"))


def _descendants(run: LiveRun, name: str) -> list[int]:
    """Return the ids of the processes below rank 0 whose names begin with some letters."""
    found = []
    for process in psutil.Process(run.rank_pid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith(name):
                found.append(process.pid)
    return found


SUBJECTS: dict[str, Callable[[LiveRun], int]] = {
    "the trainer": rank_0,
    "rank 0": rank_0,
    "rank 1": rank_1,
    "the launcher": launcher,
    "a busy scorer": busy_scorer,
    "a busy scorer's parent": scorers_parent,
    "an idle scorer": idle_scorer,
    "the reward service": service,
    "the busy reward service": busy_service,
    "the engine's core": engine_core,
    "the engine's second worker": engine_worker,
}
"""Name -> function that waits for the process, and returns its id."""
BUSY = {"a busy scorer", "a busy scorer's parent", "the busy reward service"}
"""Subjects that say themselves when they work, while the trainer goes on."""
STARTED_BY_RANK_0 = {"the engine's core", "the engine's second worker"}
"""Subjects that do not start while rank 0 is stopped."""


def send(fault: str, pid: int) -> None:
    """Send the signals of a fault to a process."""
    for number, pause_s in FAULTS[fault]:
        os.kill(pid, number)
        time.sleep(pause_s)
