"""The parent process of a worker: it leaves no process behind when the worker ends, or when the pool's process does.

The user's code may start processes, also in sessions of their own. The supervisor is a subreaper, so that all of them
stay its descendants when their own parents end. It runs no code of the user, and a worker that holds the GIL or was
stopped cannot delay it.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hybrid_rl.printable import PrintableStream
from hybrid_rl.processes import kill_descendants

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCH_S = 1.0
_ADDED_OOM_SCORE = 500  # counts as half of the machine's memory
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WATCHED = (signal.SIGCHLD, *_ENDING)


def run_worker(serve: Callable[[socket.socket], None]) -> None:
    """Serve a pool in a fork of this process, until the connection closes; the main program of a worker.

    The first argument of the program is the file descriptor of this end of the connection, the second the id of the
    pool's process.
    """
    descriptor, pool_id = map(int, sys.argv[1:])
    os.set_inheritable(descriptor, False)
    _fork_worker(descriptor, pool_id)
    # What the user's code prints goes to stderr at once: the program's stdout may be read by another program, and this
    # process may be killed before a buffer is full. It may be the text of a response, which no terminal must obey.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    stderr = open(sys.stderr.fileno(), "wb", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = PrintableStream(stderr, encoding="utf-8", line_buffering=True)
    os.dup(descriptor)  # stays open until exit handlers have run, so that the pool sees the end of this process
    with contextlib.suppress(EOFError, ConnectionError), socket.socket(fileno=descriptor) as connection:
        serve(connection)


def _fork_worker(connection: int, pool_id: int) -> None:
    """Fork, and return in the child, which becomes the worker; this process supervises it and never returns.

    The supervisor ends as the worker does, with its exit code or by its signal, so that the pool can name it.

    Args:
        connection: file descriptor of the worker's end of its connection, which the supervisor does not keep open.
        pool_id: id of the pool's process, the parent of this one.
    """
    supervisor_id = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no exit status is kept
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    worker_id = os.fork()
    if worker_id:
        os.close(connection)
        _supervise(worker_id, pool_id)
    os.setsid()  # so that signals to the worker's process group do not reach the supervisor
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_id:
        os._exit(1)
    _die_before_the_trainer()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _die_before_the_trainer() -> None:
    """Let the kernel kill this process and its children first where the memory of the machine is full."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(1000, int(path.read_text()) + _ADDED_OOM_SCORE)))


def _supervise(worker_id: int, pool_id: int) -> NoReturn:
    status = _wait(worker_id, pool_id)
    kill_descendants(os.getpid())
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _wait(worker_id: int, pool_id: int) -> int:
    """Return the wait status of the worker when it has ended; 0 when the pool's process has, or asks for the end."""
    while True:
        while True:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if process_id == worker_id:
                return status
            if process_id == 0:
                break
        if os.getppid() != pool_id:
            return 0
        received = signal.sigtimedwait(_WATCHED, _WATCH_S)
        if received is not None and received.si_signo in _ENDING:
            return 0


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) fails")
