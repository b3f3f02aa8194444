"""Runs one rank in this process, or one process per rank on this node, and reports how they ended.

The ranks of a node meet in a folder that only the user can open, so that no port listens for them. The launcher is
their parent: it passes on signals, ends the others when a rank has failed, and prints each error once.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.distributed.board import FolderBoard, own_note, print_errors
from hybrid_rl.distributed.joining import FOLDER_VARIABLE
from hybrid_rl.errors import PreemptedError, RankLostError, RunError
from hybrid_rl.machine.visible_devices import VARIABLE, name_of_rank
from hybrid_rl.monitoring import signals
from hybrid_rl.monitoring.start import Start, process_start_ns
from hybrid_rl.printable import escape_messages, keep_output, print_trace
from hybrid_rl.processes import read_state

END_LIMIT_S = 26.0
"""Seconds for the other ranks to end after one has failed, or for all after a signal."""
POLL_S = 0.2
PREFIX = "hybrid_rl_ranks_"
"""Beginning of the names of the folders in the temporary folder."""
SPAWN = multiprocessing.get_context("spawn")


def run_rank(config: Config, *, handles_signals: bool = True) -> dict[str, float]:
    """Train as the rank that torch's environment variables name, and return the last evaluation.

    The process sees the GPU of this rank alone.

    Args:
        config: settings of the run.
        handles_signals: whether SIGTERM and SIGINT end the process in one sentence; otherwise the program has handlers.

    Raises:
        ConfigError: a setting or an input file cannot work.
        RunError: the run cannot go on.
    """
    is_alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1
    if not is_alone:
        os.environ[VARIABLE] = name_of_rank(os.environ, int(os.environ["LOCAL_RANK"]))
    if handles_signals:
        signals.handle_signals(is_quiet=not is_alone)
    if config.checkpoint.on_sigterm:
        signals.exit_with(signal.SIGTERM, PreemptedError.exit_code)
    with Start() as start:
        with start.stage("imports and settings", since_ns=process_start_ns() if handles_signals else None):
            from transformers.utils.logging import disable_progress_bar

            from hybrid_rl.distributed import end_for_lost_rank, leave_world
            from hybrid_rl.trainer import train

            disable_progress_bar()
        with end_for_lost_rank():
            evaluation = train(config, start)
            leave_world()
    signals.raise_if_received()
    return evaluation


def launch_ranks(
    config: Config, num_ranks: int, run: Callable[[Config], object] = run_rank, context: BaseContext = SPAWN
) -> None:
    """Run one process per rank on this node, and wait for all.

    Args:
        config: settings of the run.
        num_ranks: at least 2.
        run: what each process does.
        context: starts the processes.

    Raises:
        SystemExit: a rank has failed, or a signal has ended the run; after one sentence on stderr.
    """
    # The threads of all ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    if config.checkpoint.on_sigterm:
        signals.defer(deferral(config.checkpoint.grace_s))
    remove_dead_folders()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        board = FolderBoard(Path(folder))
        board.write_launcher()
        ranks = Ranks(board)
        signals.before_end_at_once(partial(_end_at_once, ranks, folder))
        try:
            works = [partial(_run_process, config, rank, num_ranks, folder, run) for rank in range(num_ranks)]
            ranks.start(works, context)
            ranks.wait()
        finally:
            ranks.end()
        ranks.raise_failure()


def remove_dead_folders() -> None:
    """Delete the folders of launchers of this machine that were killed together with all their ranks."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if FolderBoard(folder).is_dead():
            shutil.rmtree(folder, ignore_errors=True)


def _end_at_once(ranks: "Ranks", folder: str) -> None:
    """Kill all ranks, whose engines and scorers notice it, and delete their folder."""
    ranks.kill()
    shutil.rmtree(folder, ignore_errors=True)


def deferral(grace_s: float) -> signals.Deferral:
    """Return what SIGTERM does in a process that starts ranks: it goes to them, and they end with a checkpoint."""
    text = f"the run ends with a checkpoint within checkpoint.grace_s = {grace_s:g} s"
    return signals.Deferral(grace_s=grace_s + signals.CLOSE_LIMIT_S + END_LIMIT_S, describe=lambda: text)


def _run_process(config: Config, rank: int, num_ranks: int, folder: str, run: Callable[[Config], object]) -> None:
    """Run a rank in this process, and leave the sentences of its error to the launcher."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ[FOLDER_VARIABLE] = folder
    escape_messages()
    keep_output()
    board = FolderBoard(Path(folder))
    _end_with_launcher(board, rank)
    try:
        run(config)
    except ConfigError as error:
        board.report(rank, error.messages, 2)
        sys.exit(2)
    except RunError as error:
        board.report(rank, [str(error)], error.exit_code)
        sys.exit(error.exit_code)
    except Exception as error:
        print_trace(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        board.remove_abandoned()


def _end_with_launcher(board: FolderBoard, rank: int) -> None:
    """End this rank if the launcher ends before the rank has joined the others, whose watch looks after it then."""
    launcher = multiprocessing.parent_process()
    assert launcher

    def watch() -> None:
        connection.wait([launcher.sentinel])
        note = board.read(rank)
        if note is None or note.count == 0:  # written by the launcher
            sentence = f"the launcher (pid {launcher.pid}) has ended; rank {rank} starts and waits for nobody"
            board.report(rank, [sentence], RankLostError.exit_code)
            os._exit(RankLostError.exit_code)

    threading.Thread(target=watch, name="end_with_launcher", daemon=True).start()


class Ranks:
    """The processes of all ranks."""

    def __init__(self, board: FolderBoard) -> None:
        """Prepare.

        Args:
            board: notes of the ranks.
        """
        self._board = board
        self._processes: list[BaseProcess] = []
        self._failed: list[int] = []  # in the order in which they ended

    def start(self, works: Sequence[Callable[[], None]], context: BaseContext = SPAWN) -> None:
        """Start a process for each function."""
        for rank, work in enumerate(works):
            process = context.Process(target=work, name=f"rank {rank}")  # type: ignore[attr-defined]
            process.start()
            self._board.write(rank, own_note(process.pid or 0, count=0, work="start"))
            self._processes.append(process)

    def wait(self) -> None:
        """Wait until all ranks have ended; after the first failure, at most END_LIMIT_S."""
        deadline, is_asked = float("inf"), False
        while running := self._running():
            connection.wait([process.sentinel for process in running], timeout=POLL_S)
            self._note_ends()
            if self._failed:
                deadline = min(deadline, time.monotonic() + END_LIMIT_S)
                self._kill_late(is_late=time.monotonic() > deadline)
            if signals.is_end_requested() and not is_asked:
                is_asked = True
                self._terminate()

    def end(self) -> None:
        """End the ranks that still run: ask them, and kill them after END_LIMIT_S."""
        self._terminate()
        deadline = time.monotonic() + END_LIMIT_S
        while running := self._running():
            self._kill_late(is_late=time.monotonic() > deadline)
            connection.wait([process.sentinel for process in running], timeout=POLL_S)
        self._note_ends()

    def kill(self) -> None:
        """Kill all ranks that still run."""
        for process in self._running():
            process.kill()

    def raise_failure(self) -> None:
        """Print the errors of the ranks that have failed, each once, and raise SystemExit with the first one's code.

        What ranks say that have only lost another one counts if there is nothing else.
        """
        if not self._failed:
            return
        failures = [self._failure(rank) for rank in self._failed]
        own = [failure for failure in failures if failure[1] != RankLostError.exit_code] or failures[:1]
        print_errors(list(dict.fromkeys(message for messages, _ in own for message in messages)))
        sys.exit(own[0][1])

    def _failure(self, rank: int) -> tuple[list[str], int]:
        """Return the sentences about a rank that has failed, and the exit code for it."""
        process = self._processes[rank]
        reported, code = self._board.reported(rank), process.exitcode or 0
        if reported and code == reported[1]:
            return reported
        above = "; its own error is above" if code == 1 else ""
        sentence = f"rank {rank} (pid {process.pid}) {how_it_ended(code)}{above}"
        return [sentence], code if code > 0 else RankLostError.exit_code

    def _running(self) -> list[BaseProcess]:
        return [process for process in self._processes if process.exitcode is None]

    def _note_ends(self) -> None:
        """Write how ranks have ended for the other ranks, and remember the ones that have failed."""
        for rank, process in enumerate(self._processes):
            if process.exitcode and rank not in self._failed:
                self._failed.append(rank)
                self._board.write_end(rank, how_it_ended(process.exitcode))

    def _terminate(self) -> None:
        for process in self._running():
            process.terminate()

    def _kill_late(self, *, is_late: bool) -> None:
        """Kill the ranks that are stopped, and all if it is late."""
        for process in self._running():
            state = read_state(process.pid or 0)
            if is_late or (state and state.is_stopped):
                process.kill()


def how_it_ended(exit_code: int) -> str:
    """Return the end of a process in words, after its subject."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
