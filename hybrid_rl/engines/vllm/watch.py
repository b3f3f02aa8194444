"""Waits of the trainer on its engine, which end when a process of the engine ends or makes no progress."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from hybrid_rl.engines.vllm.processes import EngineProcesses, how_it_ended
from hybrid_rl.errors import EngineLostError

T = TypeVar("T")

_POLL_S = 0.1
_LONGEST_POLL_S = 1.0
"""Most that a poll counts as time without progress: a trainer that was suspended itself has not waited."""
_REPORT_S = 0.5
"""Time in which the other processes of the engine end that one has taken along."""
_DEATH_S = 5.0
"""Time in which the core process ends after vLLM has reported that it fails, and reports how a worker has ended."""


class Call(Generic[T]):
    """A function that runs in a daemon thread: it does not keep the trainer alive when it never returns."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._result: T | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="engine_call", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def has_ended(self, timeout_s: float) -> bool:
        """Return whether the function has returned or raised, after a wait of at most timeout_s."""
        return self._ended.wait(timeout_s)

    def result(self) -> T:
        """Return what the function has returned, or raise what it has raised, once it has ended."""
        if self._error:
            raise self._error
        return self._result  # type: ignore[return-value]


class EngineWatch:
    """Waits for the engine; the one place that decides that it is lost.

    Every wait is for something that the engine does: `doing` completes the sentence "the trainer waits for it to".
    """

    def __init__(self, processes: EngineProcesses, *, stall_timeout_s: float) -> None:
        """Take the processes to watch, and the time without progress after which the engine counts as lost."""
        self._processes = processes
        self.stall_timeout_s = stall_timeout_s
        self._num_signs = 0
        self.is_broken = False
        """Whether a wait has ended early, so that the engine may be in the middle of a call; no other one may start."""

    def sign_of_progress(self) -> None:
        """Start the time without progress of the current wait anew."""
        self._num_signs += 1

    def start(self, work: Callable[[], T], doing: str) -> Call[T]:
        """Return a call of the engine that has started in a thread.

        Raises:
            EngineLostError: a call before it was given up; its thread may still use vLLM's sockets, which take one.
        """
        self._raise_if_broken(doing)
        return Call(work)

    def call(self, work: Callable[[], T], doing: str) -> T:
        """Return the result of a function that calls the engine, and runs in a thread; see start and wait.

        Raises:
            EngineLostError: the engine is lost.
            Exception: what the function raises.
        """
        call = self.start(work, doing)
        self.wait(call.has_ended, doing)
        return self.result(call, doing)

    def result(self, call: Call[T], doing: str) -> T:
        """Return the result of a call that has ended; see call."""
        with self.explaining(doing):
            return call.result()

    @contextmanager
    def explaining(self, doing: str) -> Iterator[None]:
        """Raise EngineLostError for an error of vLLM that a lost engine is the cause of; see call."""
        try:
            yield
        except Exception as error:
            has_failed = type(error).__name__ == "EngineDeadError"  # vLLM's, whose import takes seconds
            deadline = time.monotonic() + (_DEATH_S if has_failed else 0.0)
            while not self._processes.ended() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._raise_if_ended(doing, error)
            if has_failed:
                self.is_broken = True
                raise EngineLostError(
                    f"the rollout engine has failed, its own error is above; the trainer waits for it to {doing}"
                ) from error
            raise

    def wait(
        self,
        is_done: Callable[[float], bool],
        doing: str,
        *,
        progress: Callable[[], Any] | None = None,
        poll_s: float = _POLL_S,
    ) -> None:
        """Wait until is_done(seconds), which waits so long itself, returns True.

        Args:
            progress: returns something that differs from its last result if the engine makes progress; by default the
                number of calls of sign_of_progress.
            poll_s: how often the processes are looked at.

        Raises:
            EngineLostError: a process of the engine has ended, or there was no progress for stall_timeout_s; or an
                earlier wait has ended early.
        """
        look = self.looking(doing, progress=progress)
        is_complete = False
        try:
            while not is_done(poll_s):
                look()
            is_complete = True
        finally:
            self.is_broken |= not is_complete

    def looking(self, doing: str, *, progress: Callable[[], Any] | None = None) -> Callable[[], None]:
        """Return a function that looks at the engine once, for a wait that the caller goes on with; see wait.

        Raises:
            EngineLostError: by this and by every look.
        """
        self._raise_if_broken(doing)
        progress = progress or (lambda: self._num_signs)
        idle_s, last_time, last_progress = 0.0, time.monotonic(), progress()

        def look() -> None:
            nonlocal idle_s, last_time, last_progress
            self._raise_if_ended(doing)
            now, made = time.monotonic(), progress()
            idle_s = 0.0 if made != last_progress else idle_s + min(now - last_time, _LONGEST_POLL_S)
            last_time, last_progress = now, made
            if idle_s >= self.stall_timeout_s:
                self.is_broken = True
                raise EngineLostError(f"{self._who_stalls()}; the trainer waits for it to {doing}")

        return look

    def _raise_if_broken(self, doing: str) -> None:
        if self.is_broken:
            raise EngineLostError(
                f"the rollout engine was given up in an earlier call; the trainer waits for it to {doing}"
            )

    def _raise_if_ended(self, doing: str, cause: Exception | None = None) -> None:
        """Raise EngineLostError if a process of the engine has ended."""
        if not self._processes.ended():
            return
        self.is_broken = True
        deadline = time.monotonic() + _DEATH_S
        time.sleep(_REPORT_S)
        while any(code is None for _, code in self._processes.ended()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        pid, code = self._processes.ended()[0]
        raise EngineLostError(
            f"process {pid} of the rollout engine {how_it_ended(code)}; the trainer waits for it to {doing}"
        ) from cause

    def _who_stalls(self) -> str:
        """Return which process is stopped or does not respond, as the start of a sentence."""
        running = self._processes.running()
        stopped = [state for state in running if state.is_stopped]
        pid = (stopped or running)[0].pid if running else "unknown"
        is_what = "is stopped (SIGSTOP or a debugger)" if stopped else "does not respond"
        return (
            f"process {pid} of the rollout engine {is_what} and has made no progress for "
            f"{self.stall_timeout_s:g} s (run.stall_timeout_s)"
        )
