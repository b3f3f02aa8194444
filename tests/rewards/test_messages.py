"""Messages over a socket whose other end is slow."""

import socket
from collections.abc import Iterator

import pytest

from hybrid_rl.rewards.messages import MessageStream, receive_message, send_message


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_a_stream_keeps_what_the_socket_does_not_take(ends):
    near, far = ends
    stream = MessageStream(near)
    message = bytes(range(256)) * 2**14  # 4 MiB, more than the buffer of a socket
    stream.post(message)
    stream.post(b"next")
    assert stream.is_sending
    far.setblocking(False)
    other = MessageStream(far)
    found = list[bytes]()
    while len(found) < 2:
        stream.flush()
        found += other.receive()
    assert found == [message, b"next"] and not stream.is_sending


def test_a_stream_yields_whole_messages_alone(ends):
    near, far = ends
    stream = MessageStream(near)
    send_message(far, b"one")
    send_message(far, b"")
    far.sendall((5).to_bytes(4, "big") + b"th")
    assert list(stream.receive()) == [b"one", b""]
    far.sendall(b"ree")
    assert list(stream.receive()) == [b"three"] and list(stream.receive()) == []
    stream.post(b"four")
    assert receive_message(far) == b"four"


def test_a_stream_yields_all_messages_before_the_end(ends):
    near, far = ends
    stream, found = MessageStream(near), list[bytes]()
    send_message(far, b"last")
    far.close()
    with pytest.raises(EOFError):
        for message in stream.receive():
            found.append(message)
    assert found == [b"last"]


def test_a_stream_refuses_a_message_that_is_too_long(ends):
    near, far = ends
    send_message(far, b"12345")
    with pytest.raises(ValueError, match="a message of 5 bytes is longer than 4"):
        list(MessageStream(near, max_bytes=4).receive())
