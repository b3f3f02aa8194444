"""The launcher of a node's ranks: small real processes that are killed, stopped or fail while others wait for them.

The processes are forked from one that has imported PyTorch; each is a rank with the real process group and watch.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hybrid_rl.config import CheckpointConfig, Config, ConfigError, RunConfig, check
from hybrid_rl.distributed import end_for_lost_rank, join_world, leave_world
from hybrid_rl.errors import EngineLostError
from hybrid_rl.monitoring import signals
from launch.ranks import launch_ranks
from tests.programs import PATHS, ForkServer, ProgramResult

NUM_RANKS = 3
CONFIG = Config(run=RunConfig(stall_timeout_s=2.0), checkpoint=CheckpointConfig(on_sigterm=False))


def on_rank_1(act: Callable[[], None]) -> None:
    """Act on rank 1 while the others wait for it in a collective; then do it together, and leave."""
    world = join_world(stall_timeout_s=CONFIG.run.stall_timeout_s)
    with end_for_lost_rank():
        world.barrier()
        if world.rank == 1:
            act()
        world.barrier()
        leave_world()


def kill(_: Config) -> None:
    on_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stop(_: Config) -> None:
    on_rank_1(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def work_long(_: Config) -> None:
    on_rank_1(lambda: time.sleep(3 * CONFIG.run.stall_timeout_s))


def fail_in_code(_: Config) -> None:
    def divide() -> None:
        raise ZeroDivisionError("by zero")

    on_rank_1(divide)


def lose_engine(_: Config) -> None:
    def lose() -> None:
        raise EngineLostError("the engine is lost")

    on_rank_1(lose)


def kill_before_joining(_: Config) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    on_rank_1(lambda: None)


def refuse(_: Config) -> None:
    """Fail on every rank with the same finding, and on rank 2 with another one."""
    rank = int(os.environ["RANK"])
    check(rank != 2, "run.dir = /x: is missing on this rank")
    raise ConfigError("prompts.path = x: no such file")


def start_slowly(_: Config) -> None:
    """Wait without having joined the other ranks."""
    Path(sys.argv[2], f"waits{os.environ['RANK']}").touch()
    time.sleep(600)


def wait(_: Config) -> None:
    """Wait until a signal ends the rank, as a run that handles signals does."""
    signals.handle_signals(is_quiet=True)
    join_world().barrier()
    Path(sys.argv[2], f"waits{os.environ['RANK']}").touch()
    time.sleep(600)


def hang(_: Config) -> None:
    """Wait in a collective, where Python's handlers of signals do not run."""
    signals.handle_signals(is_quiet=True)
    world = join_world()
    world.barrier()
    Path(sys.argv[2], f"waits{world.rank}").touch()
    if world.rank == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        time.sleep(600)
    world.barrier()


def preempted(config: Config) -> None:
    """End with code 75 on a signal."""
    signals.handle_signals(is_quiet=True)
    signals.exit_with(signal.SIGTERM, 75)
    wait(config)


def list_ports(_: Config) -> None:
    """Print where each rank listens."""

    def show() -> None:
        for connection in psutil.Process().net_connections():
            if connection.status == psutil.CONN_LISTEN:
                print(f"listens at {connection.laddr.ip}", flush=True)

    on_rank_1(show)


def main() -> None:
    """Launch three ranks that call a function of this file."""
    tempfile.tempdir = None  # the process from which this one is forked has read TMPDIR before
    signals.handle_signals()
    run = globals()[sys.argv[1]]
    config = replace(CONFIG, checkpoint=replace(CONFIG.checkpoint, on_sigterm=run is preempted))
    launch_ranks(config, NUM_RANKS, run, multiprocessing.get_context("fork"))


class Launcher:
    """A launcher that a test has started."""

    def __init__(self, server: ForkServer, run: Callable[[Config], None], folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._started_at = time.monotonic()
        environment = {**os.environ, **PATHS, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        server.start(__file__, run.__name__, str(folder), environment=environment)

    def ranks_that_wait(self) -> list[psutil.Process]:
        """Return the processes of all ranks once each waits."""
        while len(list(self._folder.glob("waits*"))) < NUM_RANKS:
            assert time.monotonic() < self._started_at + 100
            time.sleep(0.02)
        return self._server.program().children()

    def signal(self, number: int) -> None:
        self._server.program().send_signal(number)

    def killed(self) -> None:
        """Wait for its end, which leaves a folder."""
        assert self._server.wait(100).code == -signal.SIGKILL

    def ended(self) -> ProgramResult:
        """Return how it ended; nothing is left in the temporary folder."""
        result = self._server.wait(100)
        assert list(self._folder.glob("hybrid_rl*")) == []
        return result


@pytest.fixture
def launch(fork_servers: list[ForkServer], tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    """Return a function that starts a launcher whose ranks call a function of this file."""
    yield lambda run: Launcher(fork_servers[0], run, tmp_path)


def test_a_killed_rank_ends_all_with_its_name_and_signal(launch):
    started = time.monotonic()
    ended = launch(kill).ended()
    assert ended.code == 6
    (line,) = ended.output.splitlines()
    assert line.startswith("error: rank 1 (pid ") and line.endswith(") was killed by SIGKILL")
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_a_stopped_rank_ends_all_and_the_others_name_it(launch):
    ended = launch(stop).ended()
    assert ended.code == 6
    (line,) = ended.output.splitlines()
    assert line.startswith("error: rank 1 (pid ")
    assert " has made no progress for run.stall_timeout_s = 2 s: it is stopped; rank " in line


@pytest.mark.slow
def test_a_rank_that_works_longer_than_the_limit_is_waited_for(launch):
    assert launch(work_long).ended().output == ""


@pytest.mark.slow
def test_a_rank_that_is_killed_before_it_joins_ends_all(launch):
    ended = launch(kill_before_joining).ended()
    assert ended.code == 6
    (line,) = ended.output.splitlines()
    assert line.startswith("error: rank 1 (pid ") and line.endswith(") was killed by SIGKILL")


def test_a_rank_that_fails_shows_its_own_trace_alone(launch):
    ended = launch(fail_in_code).ended()
    assert ended.code == 1
    assert ended.output.count("Traceback") == 1 and "ZeroDivisionError: by zero" in ended.output
    last = ended.output.splitlines()[-1]
    assert last.startswith("error: rank 1 (pid ") and last.endswith(") ended with exit code 1; its own error is above")


def test_the_error_of_one_rank_is_the_only_sentence_and_gives_the_exit_code(launch):
    ended = launch(lose_engine).ended()
    assert (ended.code, ended.output) == (3, "error: the engine is lost\n")


def test_findings_of_all_ranks_are_printed_once_each(launch):
    ended = launch(refuse).ended()
    assert ended.code == 2
    assert sorted(ended.output.splitlines()) == [
        "error: prompts.path = x: no such file",
        "error: run.dir = /x: is missing on this rank",
    ]


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_ends_all_ranks_in_one_sentence(launch, number, code):
    launcher = launch(wait)
    ranks = launcher.ranks_that_wait()
    launcher.signal(number)
    ended = launcher.ended()
    assert (ended.code, ended.output) == (code, f"error: ended by {signal.Signals(number).name}\n")
    assert not any(rank.is_running() for rank in ranks)


def test_preempted_ranks_give_the_launcher_their_exit_code(launch):
    launcher = launch(preempted)
    launcher.ranks_that_wait()
    launcher.signal(signal.SIGTERM)
    ended = launcher.ended()
    assert ended.code == 75
    assert ended.output.startswith("SIGTERM: the run ends with a checkpoint within checkpoint.grace_s = ")


def test_a_second_signal_ends_ranks_that_do_not_answer_at_once(launch):
    launcher = launch(hang)
    ranks = launcher.ranks_that_wait()
    launcher.signal(signal.SIGTERM)
    time.sleep(signals.SAME_REQUEST_S + 0.5)
    second = time.monotonic()
    launcher.signal(signal.SIGTERM)
    assert launcher.ended().code == 143
    assert time.monotonic() - second < 5
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive


def test_ranks_that_start_end_at_once_when_their_launcher_is_killed(launch):
    launcher = launch(start_slowly)
    ranks = launcher.ranks_that_wait()
    launcher.signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=15)
    assert not alive
    ended = launcher.ended()
    assert ended.code == -signal.SIGKILL
    assert "rank 0 starts and waits for nobody" in ended.output


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_end_and_remove_its_folder(launch, tmp_path):
    launcher = launch(wait)
    ranks = launcher.ranks_that_wait()
    launcher.signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=25)
    assert not alive
    assert launcher.ended().code == -signal.SIGKILL


@pytest.mark.slow
def test_the_next_launch_removes_the_folder_of_processes_that_were_all_killed(launch, tmp_path):
    launcher = launch(wait)
    ranks = launcher.ranks_that_wait()
    for rank in ranks:
        rank.suspend()
    launcher.signal(signal.SIGKILL)
    for rank in ranks:
        rank.kill()
    launcher.killed()
    (left,) = tmp_path.glob("hybrid_rl*")
    launch(lose_engine).ended()  # in the same temporary folder, of which nothing is left
    assert not left.exists()


def test_ranks_of_a_node_listen_on_loopback_alone(launch):
    ended = launch(list_ports).ended()
    assert ended.code == 0, ended.output
    assert set(ended.output.splitlines()) == {"listens at 127.0.0.1"}


if __name__ == "__main__":
    main()
