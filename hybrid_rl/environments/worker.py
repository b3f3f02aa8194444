"""The program of a worker process of `pool.py`, which holds the environments of several conversations.

The pool's messages are those of hybrid_rl.serialization: first the settings, then one call each, see `Conversations`.
Messages to the pool are JSON, so that the pool runs no code of the user by reading them: `{"process_id": number}`, then
`{"errors": [message]}` or `{"is_async": bool}`, then for each call `{"call": number}` with a `result` or a `failure`.

Calls that are not asynchronous run on the main thread, one after the other; asynchronous ones run on an event loop of
their own, at the same time. The pool kills this process where a call of the first kind exceeds its time limit.
"""

import asyncio
import contextlib
import inspect
import json
import os
import socket
import sys
import threading
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Any

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.loading import EnvironmentClass, load_environment
from hybrid_rl.environments.protocol import ConversationError, Environment, check_reset, check_step
from hybrid_rl.printable import PrintableStream
from hybrid_rl.rewards.loading import describe
from hybrid_rl.rewards.messages import receive_message, send_message
from hybrid_rl.rewards.supervisor import fork_worker
from hybrid_rl.serialization import decode


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
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, number: int, kind: str, key: int, argument: Any) -> None:
        """Start a call, which is answered when its result is there.

        Args:
            number: of the call, for its answer.
            kind: reset, step or end; an end is not answered.
            key: of the conversation.
            argument: the row of a reset, the response of a step.
        """
        if self._made.folder is not None:
            self._made.folder.activate()
        try:
            if kind == "end":
                self._end(key)
                return
            if kind == "reset":
                self._open[key] = self._made()
            environment = self._open[key]
            result = environment.reset(argument) if kind == "reset" else environment.step(argument)
        except BaseException as error:  # includes SystemExit
            self._fail(number, error)
            return
        if os.getpid() != self._process_id:
            os._exit(0)  # a process that the environment has forked, and which returned like the environment
        if inspect.isawaitable(result):
            asyncio.run_coroutine_threadsafe(self._finish(number, kind, result), self._event_loop())
        else:
            self._answer(number, kind, result)

    def _end(self, key: int) -> None:
        close = getattr(self._open.pop(key, None), "close", None)
        result = close() if callable(close) else None
        if inspect.isawaitable(result):
            asyncio.run_coroutine_threadsafe(_awaited(result), self._event_loop())

    async def _finish(self, number: int, kind: str, result: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                found = await result
        except BaseException as error:
            if limit.expired():
                self._send({"call": number, "failure": f"took longer than {self._timeout_s:g} s"})
            else:
                self._fail(number, error)
            return
        self._answer(number, kind, found)

    def _answer(self, number: int, kind: str, result: object) -> None:
        try:
            found = asdict(check_reset(result) if kind == "reset" else check_step(result))
        except ValueError as error:
            self._send({"call": number, "failure": str(error)})
            return
        self._send({"call": number, "result": found})

    def _fail(self, number: int, error: BaseException) -> None:
        if number >= 0:
            is_whole = isinstance(error, ConversationError)
            failure = str(error) if is_whole else describe(error, self._made.path)
            self._send({"call": number, "failure": failure})

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            send_message(self._connection, json.dumps(message).encode())

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
        return self._loop


async def _awaited(result: Awaitable[Any]) -> None:
    with contextlib.suppress(Exception):
        await result


def serve(connection: socket.socket) -> None:
    """Answer the calls that arrive, until an empty message arrives or the other end of the connection closes."""

    def send(message: dict[str, Any]) -> None:
        send_message(connection, json.dumps(message).encode())

    send({"process_id": os.getpid()})
    settings = decode(receive_message(connection))
    try:
        made = load_environment(settings["name"], settings["arguments"])
    except ConfigError as error:
        send({"errors": error.messages})
        return
    send({"is_async": made.is_async})
    conversations = Conversations(made, connection, timeout_s=settings["timeout_s"])
    while message := receive_message(connection):
        conversations.call(*decode(message))


def main() -> None:
    """Serve the pool.

    The first argument is the file descriptor of this end of the connection, the second the id of the pool's process.
    """
    descriptor, pool_id = map(int, sys.argv[1:])
    os.set_inheritable(descriptor, False)
    fork_worker(descriptor, pool_id)
    # What an environment prints goes to stderr at once: the program's stdout may be read by another program.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    stderr = open(sys.stderr.fileno(), "wb", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = PrintableStream(stderr, encoding="utf-8", line_buffering=True)
    with contextlib.suppress(EOFError, ConnectionError), socket.socket(fileno=descriptor) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
