"""The end of a run under Ray at SIGTERM or Ctrl-C: the command stops its workers, or lets them write a checkpoint."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from hybrid_rl.config import Config
from hybrid_rl.errors import PreemptedError
from hybrid_rl.monitoring import signals

from .ranks import deferral

POLL_S = 0.2
ASK_S = 1.0
"""Seconds between two questions of a worker."""


class EndRequest:
    """An actor that the command tells of SIGTERM, and that the workers ask."""

    def __init__(self) -> None:
        self._is_made = False

    def make(self) -> None:
        """Ask the workers to end with a checkpoint."""
        self._is_made = True

    def is_made(self) -> bool:
        """Return whether the workers are to end."""
        return self._is_made


@contextmanager
def ending_workers(config: Config) -> Iterator[Any]:
    """End the workers at a signal while the body lets Ray train; yield what `follow` takes, None without on_sigterm.

    Ray stops its workers at SIGINT, which it handles itself in the body. SIGTERM becomes the same, or, with
    checkpoint.on_sigterm, a request to the workers.
    """
    request = None
    if config.checkpoint.on_sigterm:
        request = ray.remote(num_cpus=0)(EndRequest).remote()
        signals.defer(deferral(config.checkpoint.grace_s))
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # the thread sees it; an error in here would be lost in Ray
    is_over = threading.Event()
    threading.Thread(target=_pass_on, args=(request, is_over), name="pass_on_signals", daemon=True).start()
    try:
        yield request
    finally:
        is_over.set()
        signal.signal(signal.SIGTERM, before)


def _pass_on(request: Any, is_over: threading.Event) -> None:
    """Pass on the first signal of this process."""
    while not is_over.wait(POLL_S):
        if signals.is_end_requested():
            request.make.remote()
            return
        if signals.received():
            if signals.received() == signal.SIGTERM:
                os.kill(os.getpid(), signal.SIGINT)
            return


def follow(request: Any) -> None:
    """Let this worker end with a checkpoint when the command asks for it.

    Args:
        request: see ending_workers.

    Raises:
        PreemptedError: the command has asked before this worker began to train.
    """
    if request is None:
        return
    if ray.get(request.is_made.remote()):
        raise PreemptedError("preempted by SIGTERM before the first step: the same command continues the run")
    signals.accept_requests()
    threading.Thread(target=_ask, args=(request,), name="ask_for_end", daemon=True).start()


def _ask(request: Any) -> None:
    pause = threading.Event()
    while not ray.get(request.is_made.remote()):
        pause.wait(ASK_S)
    while not signals.is_end_requested():  # until the run can write a checkpoint
        signals.request_end()
        pause.wait(ASK_S)
