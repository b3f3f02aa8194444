"""Environments of many conversations in worker processes, so that one that hangs, exits or crashes cannot end the run.

The pool is polled: calls are started, and `receive` returns the answers that have arrived. It starts no thread, so it
fits into a loop that decodes meanwhile.
"""

import itertools
import logging
import math
import multiprocessing.connection
import os
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from hybrid_rl.environments.loading import check_name
from hybrid_rl.environments.process import Answer, Call, EnvironmentProcess, EnvironmentSettings
from hybrid_rl.environments.protocol import Message
from hybrid_rl.rewards.environment import check_variables
from hybrid_rl.rewards.supervised import END_TIMEOUT_S

logger = logging.getLogger(__name__)


class EnvironmentPool:
    """The environments of all conversations of a rank; a conversation stays in its process until it ends."""

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float,
        num_workers: int,
        memory_limit_bytes: int | None = None,
        environment_variables: Sequence[str] = (),
    ) -> None:
        """Start the first process and wait until it has loaded the environment; `reset` starts others.

        Args:
            name: `path.py:ClassName`, or a name of `builtin.BUILT_IN`.
            arguments: keyword arguments of every environment.
            timeout_s: time limit of a call.
            num_workers: largest number of processes.
            memory_limit_bytes: largest resident memory of a process and the processes that it started.
            environment_variables: variables of this process that the processes get besides the allowed ones.
        Raises:
            ConfigError: the environment cannot be loaded, or a variable is not set.
        """
        check_name(name)
        check_variables(environment_variables, os.environ, field="environment.environment_variables")
        self._settings = EnvironmentSettings(
            name=name,
            arguments=arguments or {},
            timeout_s=timeout_s,
            memory_limit_bytes=memory_limit_bytes,
            environment_variables=environment_variables,
        )
        self._num_workers = num_workers
        self._numbers = itertools.count()
        self._processes = [EnvironmentProcess(self._settings)]
        self._process_of: dict[int, EnvironmentProcess] = {}  # key of a conversation -> its process
        self.num_lost_processes = 0
        """Processes that have ended, or were killed at a limit."""
        self.num_lost_conversations = 0
        """Conversations that have lost their environment with its process; each may start again."""
        self.num_calls = 0
        """Resets and steps that were answered."""
        self.seconds = 0.0
        """Time that these calls took in their environments, all of them together."""
        # A run that fails before or without `close` ends the processes, too.
        weakref.finalize(self, _end, self._processes, os.getpid())
        try:
            self._processes[0].wait_until_ready()
        except BaseException:
            self.close()
            raise

    def reset(self, key: int, row: Mapping[str, Any]) -> None:
        """Start the conversation `key` on a row of the data; its answer has the Reset.

        Args:
            key: names the conversation in answers; a key that is in use starts again with a new environment.
            row: values as hybrid_rl.serialization takes them.
        """
        self.end(key)
        process = self._process_for_next()
        self._process_of[key] = process
        process.submit(Call(number=next(self._numbers), kind="reset", key=key, argument=dict(row)))

    def step(self, key: int, response: str | Message) -> None:
        """Give the conversation a sampled turn; its answer has the Step.

        Args:
            key: of the conversation.
            response: text of the turn; the assistant's message where the conversation has tools.
        Raises:
            KeyError: there is no such conversation, or it was lost.
        """
        call = Call(number=next(self._numbers), kind="step", key=key, argument=response)
        self._process_of[key].submit(call)

    def end(self, key: int) -> None:
        """End a conversation, if there is one, and close its environment; calls of it are not answered any more."""
        process = self._process_of.pop(key, None)
        if process is not None and not process.is_killed:
            process.submit(Call(number=next(self._numbers), kind="end", key=key))

    def receive(self, timeout_s: float = 0.0) -> list[Answer]:
        """Return the answers that have arrived, after waiting for the first one if there is none.

        A conversation whose answer is lost is ended, and one whose call has failed as well.

        Args:
            timeout_s: longest time to wait.
        Raises:
            ConfigError: a further process cannot load the environment.
        """
        end = time.monotonic() + timeout_s
        while True:
            EnvironmentProcess.look_at_memory(self._processes)
            answers = [answer for process in list(self._processes) for answer in self._receive_from(process)]
            for answer in answers:
                if answer.failure is not None:
                    self.end(answer.key)
            remaining_s = end - time.monotonic()
            if answers or remaining_s <= 0 or not self._processes:
                return answers
            until = min(end, self.next_look)
            multiprocessing.connection.wait(self.connections, timeout=max(0.0, until - time.monotonic()))

    @property
    def connections(self) -> list[socket.socket]:
        """Sockets of which one is readable as soon as `receive` has something to do, for a caller that waits itself."""
        return [process.connection for process in self._processes]

    @property
    def next_look(self) -> float:
        """Time (time.monotonic) at which such a caller must call `receive` even if none of them is readable."""
        return min((process.next_look for process in self._processes), default=math.inf)

    @property
    def process_ids(self) -> list[int]:
        """Ids of the worker processes."""
        return [process.process_id for process in self._processes]

    def close(self) -> None:
        """End all conversations and processes; environments have a short time to close."""
        self._process_of.clear()
        _end(self._processes, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> Literal[False]:
        self.close()
        return False

    def _process_for_next(self) -> EnvironmentProcess:
        """Return the process with the fewest conversations; a new one if all have some and there may be more."""
        fewest = min(self._processes, key=lambda process: len(process.keys), default=None)
        if fewest is None or (fewest.keys and len(self._processes) < self._num_workers):
            fewest = EnvironmentProcess(self._settings)
            self._processes.append(fewest)
        return fewest

    def _receive_from(self, process: EnvironmentProcess) -> list[Answer]:
        answers = process.receive()
        num_lost = sum(answer.is_lost for answer in answers)
        self.num_lost_conversations += num_lost
        self.num_calls += len(answers) - num_lost
        self.seconds += sum(answer.seconds for answer in answers)
        if process.is_killed:
            self._processes.remove(process)
            self.num_lost_processes += 1
            reason = next((a.failure for a in answers if a.failure is not None), "it has ended")
            logger.warning("%d conversations have lost their environment: %s", num_lost, reason)
        return answers


def _end(processes: list[EnvironmentProcess], owner_id: int) -> None:
    """End processes and empty the list; a process that was forked from their owner does nothing."""
    if os.getpid() != owner_id:
        return
    for process in processes:
        process.ask_to_end()
    deadline = time.monotonic() + END_TIMEOUT_S
    for process in processes:
        process.kill(grace_s=max(0.0, deadline - time.monotonic()))
    processes.clear()
