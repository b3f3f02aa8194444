"""A scorer process: receives one response at a time, sends back one result per function. Started by pool.py.

It sends None once its scorers are loaded, then a float for a score and a string for a failure.
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
    """Score what arrives until the other end closes."""
    names, timeout_s = connection.recv()
    try:
        scorers = [load_scorer(name) for name in names]
    except BaseException as error:
        connection.send(_describe(error))
        return
    connection.send(None)

    while True:
        fields, response = connection.recv()
        # The pool kills at timeout_s. This ends what hangs after the pool itself has died, the GIL held or not.
        faulthandler.dump_traceback_later(timeout_s + 5, exit=True)
        for scorer in scorers:
            connection.send(_score(scorer, SimpleNamespace(**fields), response))
        faulthandler.cancel_dump_traceback_later()


def _score(scorer: Scorer, prompt: Any, response: str) -> float | str:
    try:
        value: Any = scorer(prompt, response)
        if hasattr(value, "item"):  # a scalar of numpy or torch
            value = value.item()
        if not isinstance(value, int | float):
            return f"returned {type(value).__name__} {str(value)[:80]!r}, not a number"
        return float(value) if math.isfinite(value) else f"returned {value}"
    except BaseException as error:  # exit() too
        return _describe(error)
    finally:
        # A scorer's alarm must not go off in the next one.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(descriptor))
