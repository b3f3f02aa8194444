"""The processes of an engine, seen from the trainer: which ones there are, how they ended, and how to end them."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess

from hybrid_rl.engines.vllm.shared_memory import mapped_shared_memory
from hybrid_rl.processes import ProcessState, families, read_state

_POLL_S = 0.05
_SIGNALS = set(signal.Signals)
_KILL_LIMIT_S = 10.0
"""Time in which the kernel ends a process that was killed, unless the process waits for a disk or a driver."""


def how_it_ended(exit_code: int | None) -> str:
    """Return the end of a process in words, after its subject."""
    if exit_code is None:
        return "has ended"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}" + (", its own error is above" if exit_code else "")
    name = signal.Signals(-exit_code).name if -exit_code in _SIGNALS else f"signal {-exit_code}"
    hint = "; a system without free memory does that, see dmesg" if exit_code == -signal.SIGKILL else ""
    return f"was killed by {name} (exit code {exit_code}{hint})"


class EngineProcesses:
    """The core process of an engine and its worker processes, of which the trainer is not the parent.

    With one GPU the core process is the worker.
    """

    def __init__(self) -> None:
        """Start to watch for the core process, which the trainer starts between this call and `watch_workers`."""
        self._has_started = False
        self._others = set(multiprocessing.active_children())
        self._cores: list[BaseProcess] = []
        self._workers: dict[int, int] = {}  # id of the process -> time of its start
        self._report = os.memfd_create("hybrid_rl_ended_workers")

    @property
    def report_path(self) -> str:
        """File to which the core process writes how its workers ended, see lifetime.report_ended_workers."""
        return f"/proc/{os.getpid()}/fd/{self._report}"

    @property
    def cores(self) -> list[BaseProcess]:
        """The core process; none before it is started."""
        if self._has_started:  # another core process belongs to an engine that this process has started later
            return self._cores
        started = [p for p in multiprocessing.active_children() if p.name.startswith("EngineCore")]
        self._cores += [p for p in started if p not in self._others and p not in self._cores]
        return self._cores

    def watch_workers(self, pids: Sequence[int]) -> None:
        """Watch the worker processes with these ids, too; the engine has started, and gets no more processes."""
        cores = [core.pid for core in self.cores]
        self._has_started = True
        states = [read_state(pid) for pid in pids if pid not in cores]
        self._workers = {state.pid: state.started for state in states if state}

    def ended(self) -> list[tuple[int, int | None]]:
        """Return id and exit code of the processes that have ended, first the ones that a signal has killed."""
        codes: dict[int, int | None] = {
            core.pid or 0: core.exitcode for core in self.cores if core.exitcode is not None
        }
        gone = [pid for pid, started in self._workers.items() if not _runs(pid, started)]
        if gone:
            reported = self._reported()
            codes.update({pid: reported.get(pid) for pid in gone})
        return sorted(codes.items(), key=lambda item: (item[1] is None, item[1] or 0))

    def _reported(self) -> dict[int, int]:
        """Return the exit codes of workers that the core process has written so far."""
        text = os.pread(self._report, 1 << 16, 0).decode()
        return {int(pid): int(code) for pid, code in re.findall(r"^(\d+) (-?\d+)$", text, re.MULTILINE)}

    def running(self) -> list[ProcessState]:
        """Return the processes that run, with all that they have started, the core process first."""
        workers = [pid for pid, started in self._workers.items() if _runs(pid, started)]
        cores = [core.pid or 0 for core in self.cores if core.exitcode is None]
        found = {state.pid: state for family in families([*cores, *workers]) for state in family}
        return list(found.values())

    def shared_memory(self) -> set[str]:
        """Return the names of the blocks of shared memory that the processes use among themselves."""
        names = [mapped_shared_memory(state.pid) for state in self.running()]
        return set().union(*names) - mapped_shared_memory(os.getpid())

    def end(self, limit_s: float) -> bool:
        """End all processes: ask the core process, and kill what still runs after limit_s or is stopped.

        Returns:
            whether a process had to be killed.
        """
        running = self.running()
        for core in self.cores:
            if core.exitcode is None and limit_s > 0:
                core.terminate()
        deadline, is_killed = time.monotonic() + limit_s, False
        while running := _still(running):
            is_late = time.monotonic() > deadline
            if time.monotonic() > deadline + _KILL_LIMIT_S:
                break
            for state in running:
                if is_late or state.is_stopped:
                    is_killed = True
                    with suppress(ProcessLookupError):
                        os.kill(state.pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        for core in self.cores:
            core.join(_KILL_LIMIT_S)  # /proc shows the end of the main thread, which other threads may outlive
        return is_killed

    def close(self) -> None:
        """Close the file of the exit codes."""
        os.close(self._report)


def _runs(pid: int, started: int) -> bool:
    state = read_state(pid)
    return state is not None and state.started == started and not state.has_ended


def _still(running: Sequence[ProcessState]) -> list[ProcessState]:
    """Return the new states of the processes that still run."""
    pairs = [(old, read_state(old.pid)) for old in running]
    return [new for old, new in pairs if new and new.started == old.started and not new.has_ended]
