"""The program of a worker process of `pool.py`: it receives one response at a time and sends one result per function.

A message to the pool is JSON, so that the pool runs no code of the user by reading it. While the functions load it is
an object: `{"loading": name}` before each function, then `{"errors": [message]}`, or `{}` when all of them are loaded.
Afterwards a number is a score, and a string the reason for a failure.
"""

import contextlib
import faulthandler
import json
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from hybrid_rl.config import ConfigError
from hybrid_rl.rewards.loading import RuleFunction, describe, load_functions
from hybrid_rl.rewards.returned import score_of

# The pool kills this process at its time limits. If the pool has died, a timer does, also while the GIL is held.
_GRACE_S = 5
_STDERR = 2  # the file descriptor, because the user's code may have closed or replaced sys.stderr


def serve(connection: Connection) -> None:
    """Score the responses that arrive, until an empty message arrives or the other end of the connection closes."""
    names, field, start_timeout_s, timeout_s = connection.recv()
    with _time_limit(start_timeout_s):
        functions = _load(connection, names, field)
    if functions is None:
        return
    _send(connection, {})

    process_id = os.getpid()
    while message := connection.recv_bytes():
        with _time_limit(timeout_s):
            for function in functions:
                # Unpickled for each function, so that none sees what another one has changed in the prompt.
                fields, response = pickle.loads(message)
                result = _score(function, SimpleNamespace(**fields), response)
                if os.getpid() != process_id:
                    os._exit(0)  # a process that the function has forked, and which returned like the function
                _send(connection, result)


def _load(connection: Connection, names: Sequence[str], field: str) -> list[RuleFunction] | None:
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


def _send(connection: Connection, message: dict[str, Any] | float | str) -> None:
    connection.send_bytes(json.dumps(message).encode())


@contextlib.contextmanager
def _time_limit(timeout_s: float) -> Any:
    faulthandler.dump_traceback_later(timeout_s + _GRACE_S, exit=True, file=_STDERR)
    yield
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Serve the pool whose end of the connection is the file descriptor in the first argument."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    # What a function prints goes to stderr at once: the program's stdout may be read by another program, and this
    # process may be killed before a buffer is full.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.dup(descriptor)  # stays open until exit handlers have run, so that the pool sees the end of this process
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(descriptor))
    faulthandler.dump_traceback_later(
        _GRACE_S, exit=True, file=_STDERR
    )  # while exit handlers and threads of the user end


if __name__ == "__main__":
    main()
