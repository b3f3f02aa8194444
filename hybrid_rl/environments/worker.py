"""The program of a worker process of `pool.py`, which holds the environments of several conversations.

The pool's messages are those of hybrid_rl.serialization: first the settings, then one call each, see `Conversations`.
Messages to the pool are JSON, so that the pool runs no code of the user by reading them: `{"process_id": number}`, then
`{"errors": [message]}` or `{"is_async": bool}`, then for each call `{"call": number, "seconds": duration}` with a
`result` or a `failure`. `{"blocked_by": number}` names the asynchronous call that does not give way to others;
null means that there is none any more.

Calls that are not asynchronous run on the main thread, one after the other; asynchronous ones run on an event loop of
their own, at the same time. The pool kills this process where a call of the first kind exceeds its time limit. The end
of a conversation is a call as well, of the environment's `close()`; an empty message ends all of them and the process.
"""

import asyncio
import contextlib
import inspect
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from typing import Any

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.loading import EnvironmentClass, load_environment
from hybrid_rl.environments.protocol import ConversationError, Environment, check_reset, check_step
from hybrid_rl.rewards.given import receive_objects
from hybrid_rl.rewards.loading import describe
from hybrid_rl.rewards.messages import receive_message, send_message
from hybrid_rl.rewards.supervised import END_TIMEOUT_S
from hybrid_rl.rewards.supervisor import run_worker
from hybrid_rl.serialization import decode

BLOCKED_S = 0.5
"""Time for which an asynchronous call may keep the event loop to itself before the worker names it to the pool."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call that runs."""

    number: int
    kind: str
    started: float
    """Time (time.monotonic) of its start."""


class Conversations:
    """The environments of this process, by the keys of their conversations."""

    def __init__(self, made: EnvironmentClass, connection: socket.socket, *, timeout_s: float) -> None:
        """Start without conversations.

        Args:
            connection: to the pool, which gets the answers.
            timeout_s: time limit of an asynchronous call.
        """
        self._made = made
        self._connection = connection
        self._timeout_s = timeout_s
        self._process_id = os.getpid()
        self._open: dict[int, Environment] = {}
        self._sending = threading.Lock()
        self._tasks: dict[asyncio.Task[Any] | None, _Call] = {}  # of asynchronous calls
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, number: int, kind: str, key: int, argument: Any) -> None:
        """Start a call, which is answered when its result is there.

        Args:
            number: of the call, for its answer.
            kind: reset, step or end.
            key: of the conversation.
            argument: the row of a reset, the response of a step.
        """
        call = _Call(number=number, kind=kind, started=time.monotonic())
        if self._made.folder is not None:
            self._made.folder.activate()
        try:
            result = self._started(kind, key, argument)
        except BaseException as error:  # includes SystemExit
            self._fail(call, error)
            return
        if os.getpid() != self._process_id:
            os._exit(0)  # a process that the environment has forked, and which returned like the environment
        if inspect.isawaitable(result):
            asyncio.run_coroutine_threadsafe(self._finish(call, result), self._event_loop())
        else:
            self._answer(call, result)

    def close(self) -> None:
        """End all conversations, and wait a short time for those that end asynchronously."""
        closing = [
            asyncio.run_coroutine_threadsafe(_awaited(result), self._event_loop())
            for key in list(self._open)
            if inspect.isawaitable(result := self._closed(key))
        ]
        wait(closing, timeout=END_TIMEOUT_S)

    def _started(self, kind: str, key: int, argument: Any) -> Any:
        if kind == "end":
            return self._close(key)
        if kind == "reset":
            self._open[key] = self._made()
            return self._open[key].reset(argument)
        return self._open[key].step(argument)

    def _close(self, key: int) -> Any:
        """Return what the environment's `close()` returns; None if it has none, or there is no such conversation."""
        close = getattr(self._open.pop(key, None), "close", None)
        return close() if callable(close) else None

    def _closed(self, key: int) -> Any:
        with contextlib.suppress(Exception):
            return self._close(key)

    async def _finish(self, call: _Call, result: Awaitable[Any]) -> None:
        limit, task = asyncio.timeout(self._timeout_s), asyncio.current_task()
        self._tasks[task] = call
        try:
            async with limit:
                found = await result
        except BaseException as error:
            if limit.expired():
                self._send(call, failure=f"took longer than environment.timeout_s = {self._timeout_s:g}")
            else:
                self._fail(call, error)
            return
        finally:
            del self._tasks[task]
        self._answer(call, found)

    def _answer(self, call: _Call, result: object) -> None:
        if call.kind == "end":
            self._send(call)
            return
        try:
            found = asdict(check_reset(result) if call.kind == "reset" else check_step(result))
        except ValueError as error:
            self._send(call, failure=str(error))
            return
        self._send(call, result=found)

    def _fail(self, call: _Call, error: BaseException) -> None:
        is_whole = isinstance(error, ConversationError)
        self._send(call, failure=str(error) if is_whole else describe(error, self._made.path))

    def _send(self, call: _Call, **content: Any) -> None:
        self._report({"call": call.number, "seconds": time.monotonic() - call.started, **content})

    def _report(self, message: dict[str, Any]) -> None:
        with self._sending:
            send_message(self._connection, json.dumps(message).encode())

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
            threading.Thread(target=self._watch, args=[self._loop], name="watch", daemon=True).start()
        return self._loop

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell the pool which call keeps the event loop to itself, so that it can tell the others apart."""
        while True:
            turn = threading.Event()
            loop.call_soon_threadsafe(turn.set)
            if not turn.wait(BLOCKED_S):
                call = self._tasks.get(asyncio.current_task(loop))
                self._report({"blocked_by": None if call is None else call.number})
                turn.wait()
                self._report({"blocked_by": None})
            time.sleep(BLOCKED_S)


async def _awaited(result: Awaitable[Any]) -> None:
    with contextlib.suppress(Exception):
        await result


def serve(connection: socket.socket) -> None:
    """Answer the calls that arrive, until an empty message arrives or the other end of the connection closes."""

    def send(message: dict[str, Any]) -> None:
        send_message(connection, json.dumps(message).encode())

    send({"process_id": os.getpid()})
    settings = decode(receive_message(connection))
    receive_objects(settings["given"])
    try:
        made = load_environment(settings["name"], settings["arguments"])
    except ConfigError as error:
        send({"errors": error.messages})
        return
    send({"is_async": made.is_async})
    conversations = Conversations(made, connection, timeout_s=settings["timeout_s"])
    while message := receive_message(connection):
        conversations.call(*decode(message))
    conversations.close()


if __name__ == "__main__":
    run_worker(serve)
