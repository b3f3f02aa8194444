"""The program of a worker process of `pool.py`: it receives one response at a time and sends one result per function.

It first sends None when its functions are loaded; afterwards a float is a score and a string the reason for a failure.
"""

import contextlib
import faulthandler
import math
import os
import signal
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from hybrid_rl.rewards.rules import Scorer, load_scorer


def serve(connection: Connection) -> None:
    """Score the responses that arrive until the other end of the connection closes."""
    names, timeout_s = connection.recv()
    try:
        scorers = [load_scorer(name) for name in names]
    except BaseException as error:
        connection.send(_describe(error))
        return
    connection.send(None)

    while True:
        fields, response = connection.recv()
        # The pool kills this process at timeout_s. If the pool has died, this timer does, also while the GIL is held.
        faulthandler.dump_traceback_later(timeout_s + 5, exit=True)
        for scorer in scorers:
            connection.send(_score(scorer, SimpleNamespace(**fields), response))
        faulthandler.cancel_dump_traceback_later()


def _score(scorer: Scorer, prompt: Any, response: str) -> float | str:
    try:
        value: Any = scorer(prompt, response)
        if hasattr(value, "item"):  # a scalar of NumPy or torch
            value = value.item()
        if not isinstance(value, int | float):
            return f"returned {type(value).__name__} {str(value)[:80]!r}, not a number"
        return float(value) if math.isfinite(value) else f"returned {value}"
    except BaseException as error:  # includes SystemExit
        return _describe(error)
    finally:
        # An alarm that this function has set must not fire in the next one.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(descriptor))
