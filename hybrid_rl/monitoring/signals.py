"""SIGTERM and SIGINT end a process in one sentence: at once, or after a checkpoint; a second signal does not wait.

A thread watches for signals as well, because Python's own handlers wait while the main thread is inside C++ code, such
as a collective whose other rank does not answer.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

HANDLED = (signal.SIGTERM, signal.SIGINT)
CLOSE_LIMIT_S = 30.0
"""How long a process that ends may take to close the engine, the scorers and the checkpoint in progress."""
SAME_REQUEST_S = 1.0
"""Signals this soon after the first one are the same request: a terminal signals every process of a command, and so
does its launcher."""


@dataclass(frozen=True, kw_only=True)
class Deferral:
    """What SIGTERM does while a run can still write a checkpoint."""

    grace_s: float
    """How long the process lives after the signal."""
    describe: Callable[[], str]
    """Returns what the run does before it ends, for the message."""


@dataclass(kw_only=True)
class _State:
    """What this process knows of the signals that it has received."""

    is_quiet: bool
    reader: int
    """End of the pipe into which Python writes the number of every signal at once."""
    writer: int
    codes: dict[int, int] = field(default_factory=lambda: {number: 128 + number for number in HANDLED})
    received: int | None = None
    received_at: float = 0.0
    deadline: float | None = None
    deferral: Deferral | None = None
    is_deferred: bool = False
    is_raised: bool = False
    last_act: Callable[[], None] | None = None


_state: _State | None = None


def handle_signals(*, is_quiet: bool = False) -> None:
    """Handle SIGTERM and SIGINT in this process from now on; called in its main thread.

    The first signal raises SystemExit in the main thread, unless it is deferred. A second one, or a main thread that
    has not ended CLOSE_LIMIT_S later, ends the process at once. Processes that are forked from this one have Python's
    own handlers again.

    Args:
        is_quiet: whether another process of the command prints the sentence.
    """
    global _state
    if _state is not None:
        _state.is_quiet = is_quiet
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _state = _State(is_quiet=is_quiet, reader=reader, writer=writer)
    for number in HANDLED:
        signal.signal(number, _raise_exit)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(_state,), name="signals", daemon=True).start()


def accept_requests() -> None:
    """Let `request_end` work in a process whose signals another program handles, from any thread of it."""
    global _state
    if _state is None:
        reader, writer = os.pipe()
        _state = _State(is_quiet=True, reader=reader, writer=writer)
        threading.Thread(target=_watch, args=(_state,), name="signals", daemon=True).start()


def received() -> int | None:
    """Return the number of the signal that ends this process; None where none was received, or it is deferred."""
    return None if _state is None or _state.is_deferred else _state.received


def exit_with(number: signal.Signals, code: int) -> None:
    """Choose the exit code after a signal that is not deferred; without `handle_signals` this has no effect."""
    if _state is not None:
        _state.codes[number] = code


def defer(deferral: Deferral | None) -> None:
    """Let SIGTERM be a request that `is_end_requested` returns; None ends this."""
    if _state is not None:
        _state.deferral = deferral


def is_end_requested() -> bool:
    """Return whether a deferred SIGTERM was received, or `request_end` was called."""
    return _state is not None and _state.is_deferred


def request_end() -> None:
    """Do what SIGTERM does while it is deferred, because another rank has received it."""
    if _state is not None and _state.deferral and _state.received is None:
        os.write(_state.writer, bytes([signal.SIGTERM]))
        _wait_until_received(_state)


def allow_close(code: int) -> None:
    """Give the process CLOSE_LIMIT_S from now on to end, after which it ends with this code."""
    if _state is not None and _state.received is not None:
        _state.deadline = time.monotonic() + CLOSE_LIMIT_S
        _state.deferral = None
        _state.codes[_state.received] = code
        os.write(_state.writer, b"\0")  # so that the thread waits for the new deadline


def before_end_at_once(act: Callable[[], None]) -> None:
    """Call a function, in another thread, before this process ends at once; without `handle_signals` no effect."""
    if _state is not None:
        _state.last_act = act


def raise_if_received() -> None:
    """Raise SystemExit where a signal was received that the code which it interrupted has not passed on."""
    if _state is not None and _state.received is not None and not _state.is_deferred:
        raise SystemExit(_state.codes[_state.received])


def _raise_exit(number: int, _: FrameType | None) -> None:
    state = _state
    if state is None:
        return
    _wait_until_received(state)
    if not state.is_raised and not state.is_deferred:
        state.is_raised = True
        raise SystemExit(state.codes[number])


def _watch(state: _State) -> None:
    """Receive signals for as long as the process lives, and end it at the deadline."""
    while True:
        left = None if state.deadline is None else max(0.0, state.deadline - time.monotonic())
        if select.select([state.reader], [], [], left)[0]:
            for number in os.read(state.reader, 64):
                if number in HANDLED:
                    _receive(state, number)
        elif state.deadline is not None and time.monotonic() >= state.deadline:
            _end_at_deadline(state)


def _wait_until_received(state: _State) -> None:
    """Let the watching thread receive a signal before the main thread goes on; no lock, which it could hold itself."""
    while state.received is None:
        time.sleep(0.001)


def _receive(state: _State, number: int) -> None:
    if state.received is not None:
        if time.monotonic() > state.received_at + SAME_REQUEST_S:
            _end(state, 128 + number, f"ended at once by {signal.Signals(number).name}, the second signal")
        return
    name = signal.Signals(number).name
    state.received_at = time.monotonic()
    if number == signal.SIGTERM and state.deferral is not None:
        state.is_deferred = True
        state.deadline = state.received_at + state.deferral.grace_s
        _print(state, f"{name}: {state.deferral.describe()}")
    else:
        state.deadline = state.received_at + CLOSE_LIMIT_S
        _print(state, f"error: ended by {name}")
    state.received = number  # last: the main thread waits for it


def _end_at_deadline(state: _State) -> None:
    assert state.received is not None
    name, deferral = signal.Signals(state.received).name, state.deferral
    if deferral is not None:
        reason = f"checkpoint.grace_s = {deferral.grace_s:g} s are over and no new checkpoint is complete"
        _end(state, 128 + state.received, f"ended by {name}: {reason}")
    _end(state, state.codes[state.received], f"ended by {name}: closing takes longer than {CLOSE_LIMIT_S:g} s")


def _end(state: _State, code: int, sentence: str) -> None:
    _print(state, f"error: {sentence}")
    try:
        if state.last_act:
            state.last_act()
    finally:
        os._exit(code)


def _print(state: _State, text: str) -> None:
    """Print to stderr without Python's buffer, which the main thread may hold."""
    if not state.is_quiet:
        with contextlib.suppress(OSError):  # the process ends all the same where nobody reads its output
            os.write(2, f"{text}\n".encode())


class _Forking(threading.local):
    """The signal mask of a thread that forks, as it was before."""

    mask: set[int] | None = None


_forking = _Forking()


def _block() -> None:
    """Block the handled signals in a thread that is about to fork.

    Until `_forget` has run, a signal to the new process would write to the pipe that it shares with this process, which
    would end instead of it.
    """
    if _state is not None:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


def _unblock() -> None:
    mask, _forking.mask = _forking.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget() -> None:
    """Handle signals as Python does, in a process that was forked from one that handles them otherwise."""
    global _state
    if _state is not None:
        _state = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_forget)
