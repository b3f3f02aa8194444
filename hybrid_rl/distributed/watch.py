"""A thread of each rank that watches the others, and ends this rank if one of them is lost.

A rank is lost if its process has ended, or if its notes on the board stop: it is stopped, frozen, or its machine is
cut off. A rank whose main thread works, or waits for something that has a limit of its own, writes notes all the time.
"""

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hybrid_rl.distributed.board import INTERVAL_S, Board, Note, own_note
from hybrid_rl.errors import RankLostError
from hybrid_rl.processes import ProcessState, machine_id, read_state

PATIENCE_S = 3.0
"""Seconds from the end of another rank to the end of this one, in which this rank may end for a reason of its own."""
BLOCKED_S = 5.0
"""Seconds for the run's thread to notice the error; inside C++ code, such as a collective, it does not."""
CLOSE_S = 20.0
"""Seconds for the run's thread to close the engine and the scorers once it has noticed."""
NOTICE_S = 5.0
"""Seconds after an error of a collective in which the end of the other rank shows."""
COLLECTIVE_ERRORS = ("gloo/", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What the message of a RuntimeError holds that a collective raises when another rank is gone."""

_watch: "Watch | None" = None


def start(board: Board, *, rank: int, size: int, stall_timeout_s: float) -> None:
    """Watch the other ranks of this process; the calling thread gets the error if one is lost."""
    global _watch
    _watch = Watch(board, rank=rank, size=size, stall_timeout_s=stall_timeout_s)


def stop() -> None:
    """Stop to watch, before this rank ends as it should."""
    global _watch
    if _watch:
        _watch.stop()
    _watch = None


def show_work(work: str) -> None:
    """Tell the other ranks what this one does."""
    if _watch:
        _watch.work = work


def begin_to_end() -> None:
    """Let a rank that is lost no longer raise an error in the run's thread, which ends because of another error.

    The process then has CLOSE_S to end.
    """
    if _watch:
        _watch.begin_to_end()


@contextmanager
def end_for_lost_rank() -> Iterator[None]:
    """Raise RankLostError in place of the error of a collective whose other rank is lost.

    An error of another kind passes.
    """
    try:
        yield
    except RankLostError as error:
        raise RankLostError(str(error)) from None  # a class that other processes know
    except Exception as error:
        lost = _watch.wait_for_loss() if _watch and _is_of_collective(error) else None
        if lost:
            raise lost from error
        raise


def _is_of_collective(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, is of a collective or of the store."""
    while error is not None:
        is_distributed = isinstance(error, dist.DistError) or any(text in str(error) for text in COLLECTIVE_ERRORS)
        if isinstance(error, RuntimeError) and is_distributed:
            return True
        error = error.__cause__ or error.__context__
    return False


class Watch:
    """Writes the notes of this rank, and reads the others'."""

    def __init__(self, board: Board, *, rank: int, size: int, stall_timeout_s: float) -> None:
        """Start the thread.

        Args:
            board: notes of all ranks.
            rank: this rank.
            size: number of ranks.
            stall_timeout_s: seconds without a new note after which a rank is lost.
        """
        self.work = "start"
        self._board = board
        self._rank = rank
        self._peers = [Peer(other, here=machine_id()) for other in range(size) if other != rank]
        self._stall_timeout_s = stall_timeout_s
        self._run_thread = threading.get_ident()
        self._count = 0
        self._stopped = threading.Event()
        self._lost = threading.Event()
        self._sentence = ""
        self._is_noticed = threading.Event()
        self._write_note()
        threading.Thread(target=self._watch, name="rank_watch", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end; a rank that is lost from now on is nothing to this one."""
        self._stopped.set()

    def begin_to_end(self) -> None:
        """See begin_to_end of this module."""
        self._is_noticed.set()

    def wait_for_loss(self) -> RankLostError | None:
        """Return the error of the lost rank, after a wait until the thread has noticed it; None if none is lost."""
        self._is_noticed.set()
        return RankLostError(self._sentence) if self._lost.wait(NOTICE_S) else None

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(INTERVAL_S):
            # A process that was stopped itself, with all others, has not waited for them in that time.
            waited_s = min(time.monotonic() - last, 2 * INTERVAL_S)
            last = time.monotonic()
            self._write_note()
            sentence = self._find_loss(waited_s)
            if sentence:
                self._end_rank(sentence)
                return

    def _write_note(self) -> None:
        self._count += 1
        self._board.write(self._rank, own_note(os.getpid(), count=self._count, work=self.work))

    def _find_loss(self, waited_s: float) -> str | None:
        """Return the sentence about a lost rank; None if there is none."""
        for peer in self._peers:
            loss = peer.loss(self._board, waited_s=waited_s, stall_timeout_s=self._stall_timeout_s)
            if loss:
                return f"{loss}; rank {self._rank} waits for it in {self.work}"
        failure = self._board.failure()
        return f"{failure}; rank {self._rank} cannot reach the others in {self.work}" if failure else None

    def _end_rank(self, sentence: str) -> None:
        """Raise the error in the run's thread, and end the process if that takes too long."""
        self._sentence = sentence
        self._lost.set()
        if self._stopped.wait(PATIENCE_S):
            return
        if not self._is_noticed.is_set():
            self._raise_in_run()
        limit_s = CLOSE_S if self._is_noticed.wait(BLOCKED_S) else 0.0
        if self._stopped.wait(limit_s):
            return
        self._board.report(self._rank, [sentence], RankLostError.exit_code)
        os._exit(RankLostError.exit_code)

    def _raise_in_run(self) -> None:
        """Raise the error in the run's thread, as soon as this thread runs Python code."""
        watch = self

        class NoticedLossError(RankLostError):
            """The error, which is made where it is raised."""

            def __init__(self) -> None:
                watch._is_noticed.set()
                super().__init__(watch._sentence)

        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._run_thread), ctypes.py_object(NoticedLossError))


class Peer:
    """Another rank, as this rank knows it."""

    def __init__(self, rank: int, *, here: str) -> None:
        """Start to watch.

        Args:
            rank: the other rank.
            here: machine of this process, see processes.machine_id.
        """
        self._rank = rank
        self._here = here
        self._note: Note | None = None
        self._idle_s = 0.0

    def loss(self, board: Board, *, waited_s: float, stall_timeout_s: float) -> str | None:
        """Return why the rank is lost, in a clause with its name; None if it is not.

        Args:
            board: notes of all ranks.
            waited_s: seconds since the last call.
            stall_timeout_s: seconds without a new note after which the rank is lost.
        """
        note = board.read(self._rank)
        self._idle_s = self._idle_s + waited_s if note == self._note else 0.0
        self._note = note
        name = f"rank {self._rank}" + (f" (pid {note.pid} on {note.host})" if note else "")
        end = board.end_of(self._rank)
        if end:
            return f"{name} {end}"
        if note is None:  # it has not joined yet: the group has a limit for that
            return None
        state = self._state(note)
        if state is None or state.has_ended:
            return f"{name} has ended"
        if self._idle_s < stall_timeout_s or (note.count == 0 and not state.is_stopped):  # a start may take longer
            return None
        reason = "it is stopped" if state.is_stopped else "its process or its machine hangs"
        return f"{name} has made no progress for run.stall_timeout_s = {stall_timeout_s:g} s: {reason}"

    def _state(self, note: Note) -> ProcessState | None:
        """Return the state of the process of a note; None if it has ended. One of another machine counts as running."""
        if note.machine != self._here:
            return ProcessState(letter="S", started=note.started)
        state = read_state(note.pid)
        return state if state and state.started == note.started else None
