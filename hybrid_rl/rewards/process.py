"""A worker process of `pool.py`, seen from the pool: a new interpreter that runs `worker.py`.

It is no fork: it holds neither torch nor the GPU, and does not import the main program.
"""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybrid_rl.config import ConfigError

if TYPE_CHECKING:
    from hybrid_rl.batch import Rollout

START_TIMEOUT_S = 60.0
"""Time limit for a worker to import its functions; the time limit of a response starts afterwards."""
END_TIMEOUT_S = 2.0
"""Time limit for idle workers to end by themselves, with the exit handlers of the user's code."""
_MAX_MESSAGE_BYTES = 1 << 24

Results = list[float | str]
"""One entry per function, in order, for one response: its score, or the reason for its failure."""


class WorkerProcess:
    """One worker process and the response that it is scoring."""

    def __init__(self, names: Sequence[str], *, field: str, timeout_s: float) -> None:
        """Start the process; it is busy until its functions are loaded.

        Args:
            names: of the functions, see `loading.split_name`.
            field: setting that holds the names, for messages.
            timeout_s: time limit of all functions together for one response.
        """
        self.connection, worker_end = multiprocessing.Pipe()
        with worker_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hybrid_rl.rewards.worker", str(worker_end.fileno())],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                # killpg then also ends processes that a function started, and Ctrl-C does not reach the worker.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self.connection.send((list(names), field, START_TIMEOUT_S, timeout_s))
        self._num_functions, self._field, self._timeout_s = len(names), field, timeout_s
        self._is_ready = False
        self._loading = names[0]  # the function that is being loaded
        self.task: int | None = None
        """Index of the response that is being scored; None while there is none."""
        self.results: Results = []
        """Results of the last response that was submitted, as far as they have arrived."""
        self.deadline = time.monotonic() + START_TIMEOUT_S
        """Time (time.monotonic) at which the start of the process or the response counts as failed."""

    @property
    def process_id(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        """Whether the process waits for a response."""
        return self._is_ready and self.task is None

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait until the functions are loaded.

        Raises:
            ConfigError: they cannot be used, or did not load within START_TIMEOUT_S; the process has then ended.
        """
        while not self._is_ready:
            self.wait([self])
            self.receive()

    @staticmethod
    def wait(workers: "Sequence[WorkerProcess]") -> None:
        """Wait until one of the workers has sent something, or the first deadline passes."""
        timeout_s = max(0.0, min(worker.deadline for worker in workers) - time.monotonic())
        multiprocessing.connection.wait([worker.connection for worker in workers], timeout=timeout_s)

    def submit(self, task: int, rollout: "Rollout") -> None:
        """Send a response to the idle process; its results arrive in `results`."""
        self.task, self.results = task, []
        self.deadline = time.monotonic() + self._timeout_s
        with contextlib.suppress(ConnectionError):  # the process has just died, which `receive` notices
            self.connection.send_bytes(pickle.dumps((vars(rollout.prompt), rollout.text)))

    def receive(self) -> None:
        """Read the results that have arrived, and kill the process if its deadline has passed.

        `task` becomes None when the response has all its results, also if the process ended.

        Raises:
            ConfigError: the process has ended before its functions were loaded.
        """
        try:
            while not self.is_idle and self.connection.poll():
                self._accept(json.loads(self.connection.recv_bytes(_MAX_MESSAGE_BYTES)))
        except (EOFError, OSError):  # a process that writes to the connection itself closes it, too
            self.kill()
            self._end(f"the process ended with exit code {self._process.returncode}")
        except ConfigError:
            raise
        except ValueError:
            self.kill()
            self._end("the process sent something that is no result")
        if not self.is_idle and time.monotonic() >= self.deadline:
            self.kill()
            limit = f"reward.timeout_s = {self._timeout_s}" if self._is_ready else f"{START_TIMEOUT_S:g} s"
            self._end(f"it took longer than {limit}")

    def ask_to_end(self) -> None:
        """Let an idle process end by itself; `kill` follows."""
        if self.is_idle:
            with contextlib.suppress(OSError):
                self.connection.send_bytes(b"")

    def kill(self, *, grace_s: float = 0.0) -> None:
        """End the process, and those that it has started.

        Args:
            grace_s: time that a process gets which was asked to end.
        """
        if grace_s > 0 and self.is_idle:
            with contextlib.suppress(OSError):
                self.connection.poll(grace_s)  # true at the end of the process, which sends nothing while it is idle
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def _accept(self, message: object) -> None:
        if not self._is_ready:
            if not isinstance(message, dict):
                raise ValueError
            if "errors" in message:
                self.kill()
                raise ConfigError(*message["errors"])
            self._loading = message.get("loading", self._loading)
            self._is_ready = not message
            return
        if not isinstance(message, float | str):
            raise ValueError
        self.results.append(message)
        if len(self.results) == self._num_functions:
            self.task = None

    def _end(self, reason: str) -> None:
        if not self._is_ready:
            raise ConfigError(f"{self._field}: importing '{self._loading}' fails: {reason}")
        num_missing = self._num_functions - len(self.results)
        self.results += [reason] + ["not run"] * (num_missing - 1)
        self.task = None
