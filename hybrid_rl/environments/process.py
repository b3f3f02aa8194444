"""A worker process of `pool.py`, seen from the pool: its conversations and their calls."""

import contextlib
import json
import logging
import math
import multiprocessing.connection
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.loading import FIELD
from hybrid_rl.environments.protocol import Reset, Step
from hybrid_rl.errors import RunError
from hybrid_rl.rewards.environment import scorer_environment
from hybrid_rl.rewards.given import GIVEN
from hybrid_rl.rewards.messages import MessageStream
from hybrid_rl.rewards.supervised import START_TIMEOUT_S, WATCH_S, SupervisedProcess
from hybrid_rl.serialization import encode

logger = logging.getLogger(__name__)

ASYNC_GRACE_S = 2.0
"""Time after the limit of an asynchronous call at which its process is killed, which should have ended the call."""
SEND_S = 0.02
"""Time after which a message that the process has not taken whole is tried again."""
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
    memory_limit_bytes: int | None = None
    """Largest resident memory of a worker and the processes that it started; None sets no limit."""
    environment_variables: Sequence[str] = ()
    """Variables of this process that the workers get besides the allowed ones."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of an environment."""

    number: int
    """Number of the call in the pool."""
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
    seconds: float = 0.0
    """Time that the call took in the environment; 0 where it was lost."""


class EnvironmentProcess:
    """One worker process, its conversations and the calls that it is to answer."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        """Start the process, which takes calls at once and answers them when it has loaded the environment.

        Raises:
            RunError: the process cannot be started.
        """
        self._settings = settings
        environment = scorer_environment(os.environ, settings.environment_variables)
        try:
            self._process = SupervisedProcess("hybrid_rl.environments.worker", environment)
        except OSError as error:
            raise RunError(f"environment: a process cannot be started: {error}") from error
        self._stream = MessageStream(self._process.connection, max_bytes=_MAX_MESSAGE_BYTES)
        self.keys: set[int] = set()
        """Keys of its conversations."""
        self._is_ready = False  # whether it has loaded the environment
        self._is_async = False
        self._waiting = deque[Call]()
        self._running: dict[int, tuple[Call, float]] = {}  # number -> call and its deadline
        self._unread = set[int]()  # numbers of calls whose conversation has ended
        self._blocked_by: int | None = None  # number of the asynchronous call that does not give way to others
        self._start_deadline = time.monotonic() + START_TIMEOUT_S
        self._has_warned = False
        self._end_reason = ""  # why the process was killed
        content = {"name": settings.name, "arguments": dict(settings.arguments), "timeout_s": settings.timeout_s}
        given = {name: found.content for name, found in GIVEN.items() if found.argument != "reward_functions"}
        self._post(encode(content | {"given": given}))

    @property
    def process_id(self) -> int:
        """Id of the process that runs the environments; of its supervisor until that process has started."""
        return self._process.process_id

    @property
    def connection(self) -> socket.socket:
        """Connection that is readable when `receive` has something to do."""
        return self._process.connection

    @property
    def is_killed(self) -> bool:
        """Whether the process is gone and has been reported as lost, or was killed by the pool."""
        return self._process.is_killed

    @property
    def next_look(self) -> float:
        """Time (time.monotonic) at which `receive` has something to do, even if the connection is not readable."""
        now = time.monotonic()
        sending = now + SEND_S if self._stream.is_sending else math.inf
        memory = now + WATCH_S if self._settings.memory_limit_bytes else math.inf
        return min(self._deadline, sending, memory)

    @property
    def _deadline(self) -> float:
        """Time (time.monotonic) at which the process exceeds a limit."""
        if not self._is_ready:
            return self._start_deadline
        return min((deadline for _, deadline in self._running.values()), default=math.inf)

    def wait_until_ready(self) -> None:
        """Wait until the environment is loaded.

        Raises:
            ConfigError: it cannot be used, or the process has ended before.
        """
        while not self._is_ready:
            timeout_s = max(0.0, self.next_look - time.monotonic())
            multiprocessing.connection.wait([self.connection], timeout=timeout_s)
            self.receive()
            if self.is_killed:
                raise ConfigError(f"{FIELD} = {self._settings.name}: loading it fails: {self._end_reason}")

    def submit(self, call: Call) -> None:
        """Take a call; an environment that is not asynchronous is called when the process has answered all before."""
        if call.kind == "end":
            self.keys.discard(call.key)
            self._unread |= {number for number, (running, _) in self._running.items() if running.key == call.key}
            self._unread.add(call.number)
            self._waiting = deque(waiting for waiting in self._waiting if waiting.key != call.key)
        else:
            self.keys.add(call.key)
        self._waiting.append(call)
        self._send_calls()

    def _send_calls(self) -> None:
        while self._is_ready and self._waiting and (self._is_async or not self._running):
            call = self._waiting.popleft()
            grace_s = ASYNC_GRACE_S if self._is_async else 0.0
            self._running[call.number] = call, time.monotonic() + self._settings.timeout_s + grace_s
            self._post(encode((call.number, call.kind, call.key, call.argument)))

    @staticmethod
    def look_at_memory(processes: "Sequence[EnvironmentProcess]") -> None:
        """Measure the memory of the processes that have a limit, unless it was measured a short time ago."""
        SupervisedProcess.look_at_memory([p._process for p in processes if p._settings.memory_limit_bytes])

    def receive(self) -> list[Answer]:
        """Return the answers that have arrived; kill the process if it has passed a limit, and report its end.

        Raises:
            ConfigError: the environment cannot be used.
        """
        answers = list[Answer]()
        has_ended = self._process.has_ended  # asked first: all that it has sent can then be read
        try:
            for message in self._stream.receive():
                answers += self._accept(json.loads(message))
        except (EOFError, OSError):
            has_ended = True
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            return answers + self._lose("sent something that is no answer")
        if has_ended:
            return answers + self._lose(self._process.how_it_ended())
        if time.monotonic() >= self._deadline:
            return answers + self._lose_late()
        limit = self._settings.memory_limit_bytes
        if limit and self._process.memory_bytes > limit:
            return answers + self._lose(f"held more than environment.memory_limit_bytes = {limit}")
        self._send_calls()
        with contextlib.suppress(OSError):  # the next call notices
            self._stream.flush()
        return answers

    def _accept(self, message: dict[str, Any]) -> list[Answer]:
        if "errors" in message:
            self.kill()
            raise ConfigError(*message["errors"])
        self._process.process_id = message.get("process_id", self.process_id)
        if "is_async" in message:
            self._is_ready, self._is_async = True, message["is_async"]
        self._blocked_by = message.get("blocked_by", self._blocked_by)
        if "call" not in message:
            return []
        call, _ = self._running.pop(message["call"])
        failure, seconds = message.get("failure"), message["seconds"]
        if call.number in self._unread:
            self._unread.remove(call.number)
            self._warn_of_close(call, failure)
            return []
        if failure is not None:
            return [Answer(key=call.key, failure=failure, seconds=seconds)]
        made: Any = Reset if call.kind == "reset" else Step
        return [Answer(key=call.key, result=made(**message["result"]), seconds=seconds)]

    def _warn_of_close(self, call: Call, failure: str | None) -> None:
        if call.kind == "end" and failure is not None and not self._has_warned:
            logger.warning("close() of an environment fails, in process %d: %s", self.process_id, failure)
            self._has_warned = True

    def _lose_late(self) -> list[Answer]:
        """Kill the process, whose calls that exceed the limit have failed and whose other conversations are lost."""
        if not self._is_ready:
            return self._lose(f"took longer than {START_TIMEOUT_S:g} s" + self._process.stopped_note)
        now, stopped = time.monotonic(), self._process.stopped_note
        failure = f"took longer than environment.timeout_s = {self._settings.timeout_s:g}"
        if stopped:
            return self._lose(failure + stopped)
        late = [call for call, deadline in sorted(self._running.values(), key=itemgetter(1)) if deadline <= now]
        blocking = self._running.get(-1 if self._blocked_by is None else self._blocked_by)
        late = late if blocking is None else [blocking[0]]
        if late[0].number in self._unread:  # nobody waits for it, and it has made the others wait
            name = "close()" if late[0].kind == "end" else f"{late[0].kind}()"
            return self._lose(f"was killed, because {name} of an ended conversation {failure}")
        if self._is_async:
            failure += " and kept the event loop of its process to itself"
        failed = sorted({call.key for call in late if call.number not in self._unread})
        self.keys -= set(failed)
        answers = [Answer(key=key, failure=failure) for key in failed]
        return answers + self._lose("was killed, because another conversation's call " + failure)

    def _lose(self, event: str) -> list[Answer]:
        """Kill the process and return an answer for each of its conversations."""
        self._end_reason = f"the environment process {self.process_id} {event}"
        self.kill()
        lost = [Answer(key=key, failure=self._end_reason, is_lost=True) for key in sorted(self.keys)]
        self.keys.clear()
        return lost

    def ask_to_end(self) -> None:
        """Let the process close its environments and end by itself; `kill` follows."""
        if self._is_ready and not self.is_killed:
            self._post(b"")

    def kill(self, *, grace_s: float = 0.0) -> None:
        """End the process, and all processes that it has started.

        Args:
            grace_s: time that a process gets which was asked to end.
        """
        end = time.monotonic() + grace_s
        with contextlib.suppress(EOFError, OSError, ValueError):
            while self._is_ready and not self.is_killed and (timeout_s := end - time.monotonic()) > 0:
                multiprocessing.connection.wait([self.connection], timeout=timeout_s)
                for _ in self._stream.receive():
                    pass
        self._process.kill()

    def _post(self, message: bytes) -> None:
        """Send a message; a process that does not take it is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self._stream.post(message)
