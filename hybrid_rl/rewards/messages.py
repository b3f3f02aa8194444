"""Messages between a pool and a worker over a socket: the number of bytes, then the bytes.

No function outlasts the time limit of the socket that it is given, also where the other process stops within a message;
a `MessageStream` waits for nothing.
"""

import contextlib
import socket
import time
from collections.abc import Iterator

_LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 2 ** (8 * _LENGTH_BYTES) - 1
"""Largest number of bytes of a message."""


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send a message.

    Raises:
        TimeoutError: the other process has not taken it within the timeout of the socket.
        OSError: the connection is closed.
    """
    connection.sendall(_framed(message))


def receive_message(connection: socket.socket, *, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return the next message.

    Raises:
        TimeoutError: it has not arrived whole within the timeout of the socket.
        EOFError: the connection is closed.
        ValueError: it is longer than max_bytes.
    """
    timeout_s = connection.gettimeout()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        length = int.from_bytes(_read(connection, _LENGTH_BYTES, deadline), "big")
        if length > max_bytes:
            raise ValueError(f"a message of {length} bytes is longer than {max_bytes}")
        return _read(connection, length, deadline)
    finally:
        connection.settimeout(timeout_s)


def _read(connection: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise EOFError
        found += part
        if deadline is not None and time.monotonic() > deadline and len(found) < num_bytes:
            raise TimeoutError
    return bytes(found)


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


class MessageStream:
    """Messages over a socket whose other process may be slow or stopped: what cannot be sent or read yet is kept."""

    def __init__(self, connection: socket.socket, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """Take over a socket, which no longer blocks.

        Args:
            connection: to the other process.
            max_bytes: largest number of bytes of a received message.
        """
        connection.setblocking(False)
        self._connection, self._max_bytes = connection, max_bytes
        self._incoming, self._outgoing = bytearray(), bytearray()

    @property
    def is_sending(self) -> bool:
        """Whether the other process has not taken all that was posted."""
        return bool(self._outgoing)

    def post(self, message: bytes) -> None:
        """Send a message, as far as the socket takes it; `flush` sends the rest.

        Raises:
            OSError: the connection is closed.
        """
        self._outgoing += _framed(message)
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as the socket takes it.

        Raises:
            OSError: the connection is closed.
        """
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]

    def receive(self) -> Iterator[bytes]:
        """Yield the messages that have arrived whole.

        Raises:
            EOFError: the connection is closed; all messages before were yielded.
            OSError: the connection is broken.
            ValueError: a message is longer than max_bytes.
        """
        while True:
            while (message := self._next()) is not None:
                yield message
            try:
                part = self._connection.recv(1 << 20)
            except BlockingIOError:
                return
            if not part:
                raise EOFError
            self._incoming += part

    def _next(self) -> bytes | None:
        """Return the first message if it has arrived whole, and remove it."""
        end = _LENGTH_BYTES + int.from_bytes(self._incoming[:_LENGTH_BYTES], "big")
        if len(self._incoming) >= _LENGTH_BYTES and end - _LENGTH_BYTES > self._max_bytes:
            raise ValueError(f"a message of {end - _LENGTH_BYTES} bytes is longer than {self._max_bytes}")
        if len(self._incoming) < max(end, _LENGTH_BYTES):
            return None
        message = bytes(self._incoming[_LENGTH_BYTES:end])
        del self._incoming[:end]
        return message
