"""The program of a worker process of `pool.py`: it receives one response at a time and sends one result per function.

A message to the pool is JSON, so that the pool runs no code of the user by reading it. While the functions load it is
an object: `{"process_id": number}` at first, `{"loading": name}` before each function, then `{"errors": [message]}`, or
`{}` when all of them are loaded. Afterwards a number is a score, and a string the reason for a failure.

The pool kills this process at its limits, and the process's supervisor kills it when the pool's process ends.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hybrid_rl.config import ConfigError
from hybrid_rl.printable import PrintableStream
from hybrid_rl.rewards.loading import RuleFunction, describe, load_functions
from hybrid_rl.rewards.messages import receive_message, send_message
from hybrid_rl.rewards.returned import score_of
from hybrid_rl.rewards.supervisor import fork_worker
from hybrid_rl.serialization import decode


def serve(connection: socket.socket) -> None:
    """Score the responses that arrive, until an empty message arrives or the other end of the connection closes."""
    _send(connection, {"process_id": os.getpid()})
    names, field = json.loads(receive_message(connection))
    functions = _load(connection, names, field)
    if functions is None:
        return
    _send(connection, {})

    process_id = os.getpid()
    while message := receive_message(connection):
        for function in functions:
            # Decoded for each function, so that none sees what another one has changed in the prompt.
            fields, response = decode(message)
            result = _score(function, SimpleNamespace(**fields), response)
            if os.getpid() != process_id:
                os._exit(0)  # a process that the function has forked, and which returned like the function
            _send(connection, result)


def _load(connection: socket.socket, names: Sequence[str], field: str) -> list[RuleFunction] | None:
    """Return the functions; None if some cannot be used, which the pool has then been sent."""
    try:
        return load_functions(names, field=field, report=lambda name: _send(connection, {"loading": name}))
    except ConfigError as error:
        _send(connection, {"errors": error.messages})
        return None


def _score(function: RuleFunction, prompt: Any, response: str) -> float | str:
    try:
        value = function(prompt, response)
    except BaseException as error:  # includes SystemExit
        return describe(error, function.path)
    finally:
        # An alarm that this function has set must not fire in the next one.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        return score_of(value)
    except ValueError as error:
        return str(error)


def _send(connection: socket.socket, message: dict[str, Any] | float | str) -> None:
    send_message(connection, json.dumps(message).encode())


def main() -> None:
    """Serve the pool.

    The first argument is the file descriptor of this end of the connection, the second the id of the pool's process.
    """
    descriptor, pool_id = map(int, sys.argv[1:])
    os.set_inheritable(descriptor, False)
    fork_worker(descriptor, pool_id)
    # What a function prints goes to stderr at once: the program's stdout may be read by another program, and this
    # process may be killed before a buffer is full. It may be the text of a response, which no terminal must obey.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    stderr = open(sys.stderr.fileno(), "wb", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = PrintableStream(stderr, encoding="utf-8", line_buffering=True)
    os.dup(descriptor)  # stays open until exit handlers have run, so that the pool sees the end of this process
    with contextlib.suppress(EOFError, ConnectionError), socket.socket(fileno=descriptor) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
