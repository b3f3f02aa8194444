"""A rank that has ended, is stopped or is cut off is named; one that works is left alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_rl.distributed import end_for_lost_rank
from hybrid_rl.distributed.board import FolderBoard, Note, own_note
from hybrid_rl.distributed.watch import Peer
from hybrid_rl.processes import machine_id, read_state


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    """A process that waits."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as started:
        yield started
        started.kill()


@pytest.fixture
def board(tmp_path: Path) -> FolderBoard:
    return FolderBoard(tmp_path)


@pytest.fixture
def peer() -> Peer:
    return Peer(1, here=machine_id())


def loss(peer: Peer, board: FolderBoard, waited_s: float = 0.0) -> str | None:
    return peer.loss(board, waited_s=waited_s, stall_timeout_s=10.0)


def write(board: FolderBoard, process: subprocess.Popen, count: int = 1) -> Note:
    note = own_note(process.pid, count=count, work="rollout of step 3")
    board.write(1, note)
    return note


def test_a_rank_that_writes_notes_is_not_lost(peer, board, process):
    for count in range(1, 5):
        write(board, process, count)
        assert loss(peer, board, waited_s=9.0) is None


def test_a_rank_without_new_notes_is_lost_after_the_limit(peer, board, process):
    write(board, process)
    assert loss(peer, board) is None
    assert loss(peer, board, waited_s=9.0) is None
    assert loss(peer, board, waited_s=1.0) == (
        f"rank 1 (pid {process.pid} on {os.uname().nodename}) has made no progress for run.stall_timeout_s = 10 s: "
        "its process or its machine hangs"
    )


def test_a_stopped_rank_is_named_as_stopped_after_the_limit(peer, board, process):
    write(board, process)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert loss(peer, board) is None
    assert loss(peer, board, waited_s=10.0).endswith(": it is stopped")


def test_a_rank_that_goes_on_before_the_limit_is_left_alone(peer, board, process):
    write(board, process)
    assert loss(peer, board) is None
    assert loss(peer, board, waited_s=9.0) is None
    write(board, process, count=2)
    assert loss(peer, board, waited_s=9.0) is None
    assert loss(peer, board, waited_s=9.0) is None


def test_a_rank_that_starts_may_take_longer_than_the_limit_unless_it_is_stopped(peer, board, process):
    write(board, process, count=0)
    assert loss(peer, board) is None
    assert loss(peer, board, waited_s=100.0) is None
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert loss(peer, board).endswith(": it is stopped")


def test_a_rank_whose_process_has_ended_is_lost_at_once(peer, board, process):
    write(board, process)
    process.kill()
    process.wait()
    assert loss(peer, board) == f"rank 1 (pid {process.pid} on {os.uname().nodename}) has ended"


def test_the_words_of_the_launcher_say_how_a_rank_has_ended(peer, board, process):
    write(board, process)
    board.write_end(1, "was killed by SIGKILL")
    assert loss(peer, board) == f"rank 1 (pid {process.pid} on {os.uname().nodename}) was killed by SIGKILL"


def test_another_process_with_the_id_of_a_rank_is_not_the_rank(peer, board, process):
    state = read_state(process.pid)
    board.write(1, replace(write(board, process), started=state.started - 1))
    assert loss(peer, board).endswith("has ended")


def test_a_process_id_of_another_machine_says_nothing_here(peer, board, process):
    board.write(1, replace(write(board, process), machine="another", pid=2**22 + 1))
    assert loss(peer, board) is None
    assert loss(peer, board, waited_s=10.0).endswith(": its process or its machine hangs")


def test_a_rank_without_a_note_has_not_joined_yet(peer, board):
    assert loss(peer, board, waited_s=100.0) is None


def test_errors_of_another_kind_are_not_taken_for_lost_ranks():
    with pytest.raises(ValueError, match="own"), end_for_lost_rank():
        raise ValueError("own")
