"""A worker process of `pool.py`, seen from the pool: a new interpreter that runs `worker.py` under its supervisor."""

import contextlib
import json
import math
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.loading import FIELD
from hybrid_rl.environments.protocol import Reset, Step
from hybrid_rl.errors import RunError
from hybrid_rl.processes import KILL_TIMEOUT_S, kill_descendants, kill_marked
from hybrid_rl.rewards.environment import scorer_environment
from hybrid_rl.rewards.messages import receive_message, send_message
from hybrid_rl.serialization import encode

START_TIMEOUT_S = 60.0
"""Time limit for a process to import the environment; the time limit of a call starts afterwards."""
ASYNC_GRACE_S = 2.0
"""Time after the limit of an asynchronous call at which its process is killed, which should have ended the call."""
MARK = "HYBRID_RL_ENVIRONMENT"
"""Environment variable whose value only the processes of one worker have."""
_MAX_MESSAGE_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """What all processes of a pool have in common."""

    name: str
    """`path.py:ClassName`, or a name of `builtin.BUILT_IN`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every environment."""
    timeout_s: float
    """Time limit of a call."""
    environment_variables: Sequence[str] = ()
    """Variables of this process that the workers get besides the allowed ones."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of an environment."""

    number: int
    """Number of the call in the pool; -1 for an end, which is not answered."""
    kind: Literal["reset", "step", "end"]
    key: int
    """Key of the conversation."""
    argument: Any = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a call, or of a conversation whose process is lost."""

    key: int
    """Key of the conversation."""
    result: Reset | Step | None = None
    """Reset of a reset, Step of a step; None after a failure."""
    failure: str | None = None
    """Reason why there is no result."""
    is_lost: bool = False
    """Whether the environment is gone with its process and has not failed itself, so that it can start again."""


class EnvironmentProcess:
    """One worker process, its conversations and the calls that it is to answer."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        """Start the process, which takes calls at once and answers them when it has loaded the environment.

        Raises:
            RunError: the process cannot be started.
        """
        self._settings = settings
        self._mark = uuid.uuid4().hex
        self._process, self.connection = self._start()
        self.process_id = self._process.pid
        """Id of the process that runs the environments; of its supervisor until that process has started."""
        self.keys: set[int] = set()
        """Keys of its conversations."""
        self.is_ready = False
        """Whether it has loaded the environment."""
        self._is_async = False
        self._waiting = deque[Call]()
        self._running: dict[int, tuple[Call, float]] = {}  # number -> call and its deadline
        self._unread = set[int]()  # numbers of running calls whose conversation has ended
        self._start_deadline = time.monotonic() + START_TIMEOUT_S
        content = {"name": settings.name, "arguments": dict(settings.arguments), "timeout_s": settings.timeout_s}
        self._send(encode(content))

    def _start(self) -> tuple[subprocess.Popen, socket.socket]:
        connection, worker_end = socket.socketpair()
        environment = scorer_environment(os.environ, self._settings.environment_variables)
        program = [sys.executable, "-P", "-m", "hybrid_rl.environments.worker"]
        try:
            with worker_end:
                process = subprocess.Popen(
                    [*program, str(worker_end.fileno()), str(os.getpid())],
                    pass_fds=[worker_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # so that Ctrl-C does not reach the worker
                    env={**environment, MARK: self._mark},
                )
        except OSError as error:
            connection.close()
            raise RunError(f"environment: a process cannot be started: {error}") from error
        return process, connection

    @property
    def is_killed(self) -> bool:
        """Whether the process is gone and has been reported as lost, or was killed by the pool."""
        return self.connection.fileno() < 0

    @property
    def deadline(self) -> float:
        """Time (time.monotonic) at which the process exceeds a limit."""
        if not self.is_ready:
            return self._start_deadline
        return min((deadline for _, deadline in self._running.values()), default=math.inf)

    def submit(self, call: Call) -> None:
        """Take a call; an environment that is not asynchronous is called when the process has answered all before."""
        if call.kind == "end":
            self.keys.discard(call.key)
            self._unread |= {number for number, (running, _) in self._running.items() if running.key == call.key}
            self._waiting = deque(waiting for waiting in self._waiting if waiting.key != call.key)
        else:
            self.keys.add(call.key)
        self._waiting.append(call)
        self._send_calls()

    def _send_calls(self) -> None:
        while self.is_ready and self._waiting and (self._is_async or not self._running):
            call = self._waiting.popleft()
            if call.kind != "end":
                grace_s = ASYNC_GRACE_S if self._is_async else 0.0
                self._running[call.number] = call, time.monotonic() + self._settings.timeout_s + grace_s
            self._send(encode((call.number, call.kind, call.key, call.argument)))

    def receive(self) -> list[Answer]:
        """Return the answers that have arrived; kill the process if it has passed a limit, and report its end.

        Raises:
            ConfigError: the environment cannot be used, or the process ended before it was loaded.
        """
        answers = list[Answer]()
        has_ended = self._process.poll() is not None  # asked first: all that it has sent can then be read
        try:
            while not self.is_killed and multiprocessing.connection.wait([self.connection], timeout=0):
                self.connection.settimeout(max(min(self.deadline - time.monotonic(), START_TIMEOUT_S), 1e-3))
                message = json.loads(receive_message(self.connection, max_bytes=_MAX_MESSAGE_BYTES))
                answers += self._accept(message)
        except TimeoutError:  # a limit passed within a message
            pass
        except (EOFError, OSError):
            has_ended = True
        if has_ended and not self.is_killed:
            return answers + self._lose(self._how_it_ended())
        if time.monotonic() >= self.deadline:
            return answers + self._lose_late()
        self._send_calls()
        return answers

    def _accept(self, message: dict[str, Any]) -> list[Answer]:
        if "errors" in message:
            self.kill()
            raise ConfigError(*message["errors"])
        self.process_id = message.get("process_id", self.process_id)
        if "is_async" in message:
            self.is_ready, self._is_async = True, message["is_async"]
        if "call" not in message:
            return []
        call, _ = self._running.pop(message["call"])
        if call.number in self._unread:
            self._unread.remove(call.number)
            return []
        if "failure" in message:
            return [Answer(key=call.key, failure=message["failure"])]
        found = message["result"]
        return [Answer(key=call.key, result=Reset(**found) if call.kind == "reset" else Step(**found))]

    def _lose_late(self) -> list[Answer]:
        """Kill the process, whose calls that exceed the limit have failed and whose other conversations are lost."""
        if not self.is_ready:
            return self._lose(f"took longer than {START_TIMEOUT_S:g} s")
        now = time.monotonic()
        is_late = {n: call.key for n, (call, deadline) in self._running.items() if deadline <= now}
        late = {key for number, key in is_late.items() if number not in self._unread}
        self.keys -= late
        failure = f"took longer than environment.timeout_s = {self._settings.timeout_s:g}"
        failed = [Answer(key=key, failure=failure) for key in sorted(late)]
        return failed + self._lose("was killed, because another conversation's call " + failure)

    def _lose(self, event: str) -> list[Answer]:
        """Kill the process and return an answer for each of its conversations."""
        reason = f"the environment process {self.process_id} {event}"
        self.kill()
        if not self.is_ready:
            raise ConfigError(f"{FIELD} = {self._settings.name}: loading it fails: {reason}")
        lost = [Answer(key=key, failure=reason, is_lost=True) for key in sorted(self.keys)]
        self.keys.clear()
        return lost

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """End the process, and all processes that it has started."""
        if self.is_killed:
            return
        if self._process.poll() is None:
            kill_descendants(self._process.pid)
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_TIMEOUT_S)
        else:  # a supervisor that was killed has left what its worker started
            kill_marked(MARK, self._mark)
        self.connection.close()

    def _send(self, message: bytes) -> None:
        """Send a message; a process that does not take it is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(max(min(self.deadline - time.monotonic(), START_TIMEOUT_S), 1e-3))
            send_message(self.connection, message)
