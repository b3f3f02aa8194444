"""A worker process under its supervisor, seen from the pool that has started it.

It is a new interpreter and no fork: it holds neither torch nor the GPU, and does not import the main program. Its first
process is the `supervisor.py` of the worker, which leaves nothing behind.
"""

import contextlib
import multiprocessing.connection
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence

from hybrid_rl.processes import KILL_TIMEOUT_S, families, kill_descendants, kill_marked, read_state, resident_bytes

START_TIMEOUT_S = 60.0
"""Time limit for a worker to import the user's code; the time limit of a call starts afterwards."""
END_TIMEOUT_S = 2.0
"""Time limit for idle workers to end by themselves, with the exit handlers of the user's code."""
WATCH_S = 0.25
"""Seconds between two looks at the life and the memory of a process."""
MARK = "HYBRID_RL_WORKER"
"""Environment variable whose value only the processes of one worker have."""


class SupervisedProcess:
    """One worker process, its connection and its memory."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            module: its program, which calls `supervisor.run_worker`.
            environment: its environment variables.
        Raises:
            OSError: the process cannot be started.
        """
        self._mark = uuid.uuid4().hex
        self._process, self.connection = _start(module, {**environment, MARK: self._mark})
        self.process_id = self._process.pid
        """Id of the process that runs the user's code; of its supervisor until the worker has sent its own."""
        self.memory_bytes = 0
        """Resident memory of the worker and the processes that it started, at the last look."""
        self._next_look = 0.0  # time at which the memory is measured again
        _kill_what_outlives(self._process.pid, self._mark)

    @property
    def has_ended(self) -> bool:
        """Whether the supervisor has ended, as it does after the worker."""
        return self._process.poll() is not None

    @property
    def is_killed(self) -> bool:
        """Whether `kill` was called."""
        return self.connection.fileno() < 0

    @property
    def has_message(self) -> bool:
        """Whether the connection has something to read, which may be its end."""
        return not self.is_killed and bool(multiprocessing.connection.wait([self.connection], timeout=0))

    @property
    def stopped_note(self) -> str:
        """Words for a message if the worker is stopped, so that it cannot answer; else nothing."""
        state = read_state(self.process_id)
        return " and is stopped (SIGSTOP or a debugger)" if state is not None and state.is_stopped else ""

    @staticmethod
    def look_at_memory(processes: "Sequence[SupervisedProcess]") -> None:
        """Measure the memory of processes whose last look is WATCH_S ago, in one pass over the machine's processes."""
        now = time.monotonic()
        due = [process for process in processes if process._next_look <= now]
        if not due:
            return
        for process, family in zip(due, families([process._process.pid for process in due]), strict=True):
            pids = [state.pid for state in family if state.pid != process._process.pid]
            process.memory_bytes, process._next_look = resident_bytes(pids), now + WATCH_S

    def how_it_ended(self) -> str:
        """Return words for the end of the process, which is awaited for a short time."""
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self, *, grace_s: float = 0.0) -> None:
        """End the process, and all processes that it has started.

        Args:
            grace_s: time that a process gets which was asked to end, and sends nothing more.
        """
        if self.is_killed:
            return
        if grace_s > 0:
            multiprocessing.connection.wait([self.connection], timeout=grace_s)  # readable at the end of the process
        if self._process.poll() is None:
            kill_descendants(self._process.pid)
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_TIMEOUT_S)
        else:  # a supervisor that was killed has left what its worker started
            kill_marked(MARK, self._mark)
        self.connection.close()


def _start(module: str, environment: Mapping[str, str]) -> tuple[subprocess.Popen, socket.socket]:
    connection, worker_end = socket.socketpair()
    try:
        with worker_end:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(worker_end.fileno()), str(os.getpid())],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C does not reach the worker
                env=environment,
            )
    except OSError:
        connection.close()
        raise
    return process, connection


def _kill_what_outlives(supervisor_id: int, mark: str) -> None:
    """Let a thread kill what a worker has started where its supervisor is killed, which leaves processes."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it; then the next use of the worker notices
        descriptor = os.pidfd_open(supervisor_id)

        def watch() -> None:
            select.select([descriptor], [], [])  # readable once the process has ended
            os.close(descriptor)
            kill_marked(MARK, mark)

        threading.Thread(target=watch, name="kill_what_outlives", daemon=True).start()
