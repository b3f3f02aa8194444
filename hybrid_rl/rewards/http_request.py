"""One HTTP request to a reward service, with limits on its time and on the size of the answer."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from aiohttp import ClientSession

T = TypeVar("T")

MAX_ANSWER_BYTES = 1 << 24
"""Largest number of bytes that are read of an answer."""
TICK_S = 0.5
"""Seconds after which a waiting thread looks for signals and for errors that another thread has raised in it."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a service has answered."""

    status: int
    headers: Mapping[str, str]
    """The names ignore case."""
    body: bytes
    """The first MAX_ANSWER_BYTES, as they came over the network."""
    is_cut: bool
    """Whether the service sends more bytes than that, which are not read."""

    hide: Callable[[str], str]
    """Replaces the secrets of the request in a text, as a service may repeat what it was sent."""

    @property
    def text(self) -> str:
        """The body as text for messages, without secrets."""
        return self.hide(self.body.decode(errors="replace"))


class NoAnswerError(Exception):
    """A service gave no whole answer; the message is one line."""


def open_session(headers: Mapping[str, str]) -> "ClientSession":
    """Return a session, in a coroutine, that sends these headers; it reads proxies and ~/.netrc as the user has them.

    Answers are not decompressed, as a small one could fill the memory, and none is asked for.
    """
    import aiohttp

    return aiohttp.ClientSession(
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **headers},
        auto_decompress=False,
        connector=aiohttp.TCPConnector(force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=True,
    )


async def post(
    session: "ClientSession", url: str, body: bytes, *, timeout_s: float, hide: Callable[[str], str]
) -> Answer:
    """Return the answer to a request; a redirect is an answer and is not followed.

    Args:
        timeout_s: time limit of the whole request, from the search for the host to the last byte of the answer.
        hide: replaces the secrets of the request in a text.
    Raises:
        TimeoutError: the limit has passed.
        NoAnswerError: there is no connection, or it broke.
    """
    import aiohttp

    try:
        async with asyncio.timeout(timeout_s), session.post(url, data=body, allow_redirects=False) as response:
            content = bytearray()
            async for part in response.content.iter_any():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    break
            return Answer(
                status=response.status,
                headers=response.headers,
                body=bytes(content[:MAX_ANSWER_BYTES]),
                is_cut=len(content) > MAX_ANSWER_BYTES,
                hide=hide,
            )
    except (aiohttp.ClientError, ValueError) as error:  # a ValueError for headers that contradict ~/.netrc
        raise NoAnswerError(hide(f"{type(error).__name__}: {' '.join(str(error).split())}")) from error


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, which runs in a thread of its own.

    The calling thread wakes up regularly, so that a signal or the loss of another rank ends the wait; the coroutine is
    then cancelled.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    done: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(loop, task, done), name="reward_requests", daemon=True)
    thread.start()
    try:
        while not done.done():
            wait([done], timeout=TICK_S)
        return done.result()
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(task.cancel)
        thread.join(TICK_S)


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], done: Future[T]) -> None:
    try:
        done.set_result(loop.run_until_complete(task))
    except BaseException as error:
        done.set_exception(error)
    finally:
        loop.close()
