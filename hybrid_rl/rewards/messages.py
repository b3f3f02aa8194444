"""Messages between the pool and a worker over a socket: the number of bytes, then the bytes.

No call outlasts the time limit of the socket that it is given, also where the other process stops within a message.
"""

import socket
import time

_LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 2 ** (8 * _LENGTH_BYTES) - 1
"""Largest number of bytes of a message."""


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send a message.

    Raises:
        TimeoutError: the other process has not taken it within the timeout of the socket.
        OSError: the connection is closed.
    """
    connection.sendall(len(message).to_bytes(_LENGTH_BYTES, "big") + message)


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
