"""Ends the engine's processes with the trainer, and reports the ends of workers to it. Runs in vLLM's processes."""

import logging
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from hybrid_rl.engines.vllm.folder import is_end_requested, remove_folder
from hybrid_rl.engines.vllm.shared_memory import mapped_shared_memory, remove_shared_memory

TRAINER_PID, FOLDER, REPORT = "HYBRID_RL_TRAINER_PID", "HYBRID_RL_ENGINE_FOLDER", "HYBRID_RL_ENDED_WORKERS"
"""Environment variables of an engine's processes: id of the trainer, the engine's folder, file of exit codes."""
CORE_LOGGER, _CANCELLED = "vllm.v1.engine.core", "cancelled"
"""Logger of vLLM's core process, and the message of the error with which it cancels calls of its workers."""
_WORKER_DELAY_S = 0.5
"""How much later than the core process its workers end: it would report their end as an error, in many lines."""

_watching: list[int] = []

logger = logging.getLogger(__name__)


def end_with_trainer() -> None:
    """End this process, and with it the engine, when the trainer ends, even by SIGKILL.

    Without it, vLLM would wait for requests forever and occupy the device's memory. A second call changes nothing.
    """
    trainer = int(os.environ.get(TRAINER_PID, os.getpid()))
    if os.getpid() in (trainer, *_watching):
        return
    _watching.append(os.getpid())  # a process that is forked from this one does not watch yet
    try:
        descriptor = os.pidfd_open(trainer)
    except ProcessLookupError:  # it has ended while vLLM was imported
        _end()
        return
    except OSError as error:  # a sandbox may forbid it; then only a killed trainer leaves its engine behind
        logger.warning("cannot watch the trainer process %d: %s", trainer, error)
        return

    def watch() -> None:
        select.select([descriptor], [], [])  # readable once the process has ended
        if os.getppid() != trainer and multiprocessing.parent_process():
            time.sleep(_WORKER_DELAY_S)
        _end()

    threading.Thread(target=watch, name="end_with_trainer", daemon=True).start()


def _end() -> None:
    """Remove what the trainer would have removed, and end this process at once."""
    remove_shared_memory(mapped_shared_memory(os.getpid()), is_tracked=True)
    if FOLDER in os.environ:
        remove_folder(Path(os.environ[FOLDER]), is_tracked=True)
    os._exit(1)


def ignore_signals_in_worker() -> None:
    """Ignore SIGTERM and SIGINT in a worker process, which the core process ends by a pipe or by SIGKILL.

    A terminal or a job manager may signal every process of a run. The trainer decides then what becomes of the engine,
    which it may need for a last checkpoint; and a core process reports a worker that ends in many lines.
    """
    trainer = int(os.environ.get(TRAINER_PID, os.getpid()))
    if trainer not in (os.getpid(), os.getppid()) and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


def ignore_signals_of_others() -> None:
    """Let the core process obey SIGTERM and SIGINT only if the trainer has asked it to end; see above.

    Called in its main thread, after vLLM has set its own handlers.
    """
    if FOLDER in os.environ:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _on_request(signal.getsignal(number)))


def _on_request(handler: Any) -> Callable[[int, FrameType | None], None]:
    """Return a handler that calls the given one if the trainer has asked the engine to end."""

    def handle(number: int, frame: FrameType | None) -> None:
        if callable(handler) and is_end_requested(Path(os.environ[FOLDER])):
            handler(number, frame)

    return handle


def report_ended_workers() -> None:
    """Write the id and the exit code of each worker process that ends to a file of the trainer, as a line.

    Called in the core process, which alone gets the exit codes of its workers.
    """
    workers = {worker.sentinel: worker for worker in multiprocessing.active_children()}
    if not workers or REPORT not in os.environ:
        return
    logging.getLogger(CORE_LOGGER).addFilter(is_no_cancelled_call)
    file = open(os.environ[REPORT], "a", buffering=1)  # noqa: SIM115

    def watch() -> None:
        while workers:
            for sentinel in wait(list(workers)):
                worker = workers.pop(sentinel)  # type: ignore[arg-type]
                file.write(f"{worker.pid} {_exit_code(worker)}\n")

    threading.Thread(target=watch, name="report_ended_workers", daemon=True).start()


def is_no_cancelled_call(record: logging.LogRecord) -> bool:
    """Return whether a record is about anything but a call that vLLM cancels because a worker has ended.

    The trainer reports that worker in one sentence, and vLLM's record is a traceback.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, RuntimeError) and str(error) == _CANCELLED)


def _exit_code(worker: BaseProcess) -> int:
    """Return the exit code of a process that ends; None is not final: another thread may be asking at the moment."""
    while (code := worker.exitcode) is None:
        time.sleep(0.01)
    return code
