"""A worker process of `pool.py`, seen from the pool, and its task."""

import contextlib
import json
import multiprocessing.connection
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_rl.config import ConfigError
from hybrid_rl.errors import RewardLostError
from hybrid_rl.rewards.environment import scorer_environment
from hybrid_rl.rewards.given import GIVEN
from hybrid_rl.rewards.messages import receive_message, send_message
from hybrid_rl.rewards.returned import Returned, unpack
from hybrid_rl.rewards.signatures import LoadedFunction
from hybrid_rl.rewards.supervised import END_TIMEOUT_S, START_TIMEOUT_S, WATCH_S, SupervisedProcess
from hybrid_rl.serialization import encode

if TYPE_CHECKING:
    from hybrid_rl.batch import Rollout

_MAX_MESSAGE_BYTES = 1 << 24

Result = Returned | str
"""What a function gives a response, or the reason for its failure."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process does at a time: some functions score some responses."""

    rows: Sequence[int]
    """Numbers of the responses, in the order of `ScorerPool.score`."""
    functions: Sequence[int]
    """Numbers of the functions, in the order of the settings."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What all workers of a pool have in common."""

    names: Sequence[str]
    """Names of the functions, see `loading.split_name`."""
    field: str
    """Setting that holds the names, for messages."""
    timeout_s: float
    """Time limit of a task for each of its responses."""
    memory_limit_bytes: int | None = None
    """Largest resident memory of a worker and the processes that it started; None sets no limit."""
    environment_variables: Sequence[str] = ()
    """Variables of this process that the workers get besides the allowed ones."""
    answer_column: str | None = None
    """Column of the rows that became the answer of the prompt."""


class WorkerProcess:
    """One worker process and its task."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Start the process; it is busy until its functions are loaded.

        Raises:
            RewardLostError: the process cannot be started.
        """
        self._settings = settings
        try:
            self._process = SupervisedProcess(
                "hybrid_rl.rewards.worker", scorer_environment(os.environ, settings.environment_variables)
            )
        except OSError as error:
            raise RewardLostError(f"{settings.field}: a scorer process cannot be started: {error}") from error
        self._is_ready = False
        self._loading = settings.names[0]  # the function that is being loaded
        self.functions: list[LoadedFunction] = []
        """The functions, in the order of the settings, once they are loaded."""
        self.task: Task | None = None
        """What the process does; None while it is idle."""
        self.results: list[Result] = []
        """Results of the last task that have arrived: those of its first function for all responses come first."""
        self.is_lost = False
        """Whether the process ended, or was killed at a limit, during the last task."""
        self.deadline = time.monotonic() + START_TIMEOUT_S
        """Time (time.monotonic) at which the start of the process or the task counts as failed."""
        given = {name: GIVEN[name].content for name in settings.names if name in GIVEN}
        content = {"names": list(settings.names), "field": settings.field, "given": given}
        self._send(encode(content | {"answer_column": settings.answer_column}))

    @property
    def process_id(self) -> int:
        """Id of the process that runs the functions; of its supervisor until that process has started."""
        return self._process.process_id

    @property
    def is_idle(self) -> bool:
        """Whether the process waits for a response."""
        return self._is_ready and self.task is None

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and, if it is idle, has kept its connection open and sent nothing."""
        if self._process.is_killed or (self.is_idle and self._process.has_message):
            return False
        return not self._process.has_ended

    def wait_until_ready(self) -> None:
        """Wait until the functions are loaded.

        Raises:
            ConfigError: they cannot be used, or did not load within START_TIMEOUT_S; the process has then ended.
        """
        try:
            while not self._is_ready:
                self.wait([self])
                self.receive()
        except RewardLostError as error:
            raise ConfigError(str(error)) from error

    @staticmethod
    def wait(workers: "Sequence[WorkerProcess]") -> None:
        """Wait until one of the workers has sent something, or has to be looked at."""
        timeout_s = min(WATCH_S, *(worker.deadline - time.monotonic() for worker in workers))
        connections = [worker._process.connection for worker in workers]
        multiprocessing.connection.wait(connections, timeout=max(0.0, timeout_s))
        limited = [worker._process for worker in workers if worker._settings.memory_limit_bytes]
        SupervisedProcess.look_at_memory(limited)

    def submit(self, task: Task, rollouts: Sequence["Rollout"]) -> None:
        """Send a task to the idle process; its results arrive in `results`.

        Args:
            rollouts: all responses, of which the task has some.
        """
        self.task, self.results, self.is_lost = task, [], False
        self.deadline = time.monotonic() + self._settings.timeout_s * len(task.rows)
        prompts = list({id(rollouts[row].prompt): rollouts[row].prompt for row in task.rows}.values())
        number_of = {id(prompt): number for number, prompt in enumerate(prompts)}
        rows = [(number_of[id(r.prompt)], r.text, r.response_ids) for r in (rollouts[row] for row in task.rows)]
        self._send(encode((list(task.functions), [vars(prompt) for prompt in prompts], rows)))

    def receive(self) -> None:
        """Read the results that have arrived, and kill the process if it has passed a limit.

        `task` becomes None when all its results are there, also if the process ended.

        Raises:
            ConfigError: the functions cannot be used.
            RewardLostError: the process ended, or passed a limit, before its functions were loaded.
        """
        has_ended = not self.is_alive  # asked first: all that it has sent can then be read
        try:
            while not self.is_idle and self._process.has_message:
                self._accept(json.loads(receive_message(self._timed_connection(), max_bytes=_MAX_MESSAGE_BYTES)))
        except TimeoutError:  # the deadline passed within a message
            pass
        except (EOFError, OSError):  # a process that writes to the connection itself closes it, too
            has_ended = True
        except ConfigError:
            raise
        except ValueError:
            self._lose("sent something that is no result")
        if self.is_idle:
            return
        if has_ended:
            self._lose(self._process.how_it_ended())
        elif time.monotonic() >= self.deadline:
            self._lose(self._how_it_was_late() + self._process.stopped_note)
        elif self._settings.memory_limit_bytes and self._process.memory_bytes > self._settings.memory_limit_bytes:
            self._lose(f"held more than reward.memory_limit_bytes = {self._settings.memory_limit_bytes}")

    def ask_to_end(self) -> None:
        """Let an idle process end by itself; `kill` follows."""
        if self.is_idle:
            self.deadline = time.monotonic() + END_TIMEOUT_S
            self._send(b"")

    def kill(self, *, grace_s: float = 0.0) -> None:
        """End the process, and all processes that it has started.

        Args:
            grace_s: time that a process gets which was asked to end.
        """
        self._process.kill(grace_s=grace_s if self.is_idle else 0.0)

    def _timed_connection(self) -> socket.socket:
        """Return the connection, whose calls take no longer than the deadline."""
        self._process.connection.settimeout(max(self.deadline - time.monotonic(), 1e-3))
        return self._process.connection

    def _send(self, message: bytes) -> None:
        """Send a message by the deadline; a process that does not take it is noticed by `receive`."""
        with contextlib.suppress(OSError):
            send_message(self._timed_connection(), message)

    def _accept(self, message: object) -> None:
        if not self._is_ready:
            if not isinstance(message, dict):
                raise ValueError
            if "errors" in message:
                self.kill()
                raise ConfigError(*message["errors"])
            self._process.process_id = message.get("process_id", self.process_id)
            self._loading = message.get("loading", self._loading)
            self._is_ready = "functions" in message
            try:
                self.functions = [LoadedFunction(**fields) for fields in message.get("functions", [])]
            except TypeError as error:
                raise ValueError from error
            return
        assert self.task is not None
        self.results.append(message if isinstance(message, str) else unpack(message))
        if len(self.results) == len(self.task.functions) * len(self.task.rows):
            self.task = None

    def _how_it_was_late(self) -> str:
        if not self._is_ready or self.task is None:
            return f"took longer than {START_TIMEOUT_S:g} s"
        number, limit = len(self.task.rows), f"took longer than reward.timeout_s = {self._settings.timeout_s}"
        return limit if number == 1 else f"{limit} for each of {number} responses"

    def _lose(self, event: str) -> None:
        """Kill the process and record what has happened to it as the result of the function that was running."""
        reason = f"the scorer process {self.process_id} {event}"
        self.kill()
        if not self._is_ready:
            raise RewardLostError(f"{self._settings.field}: importing '{self._loading}' fails: {reason}")
        assert self.task is not None
        num_rows, num_functions = len(self.task.rows), len(self.task.functions)
        num_running = num_rows - len(self.results) % num_rows  # results of the function that was running
        num_missing = num_functions * num_rows - len(self.results)
        self.results += [reason] * num_running + ["not run"] * (num_missing - num_running)
        self.task, self.is_lost = None, True
