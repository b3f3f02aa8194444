"""Waits on an engine end when one of its processes ends or stalls; small processes stand for vLLM's."""

import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hybrid_rl.engines import Request, Sampling
from hybrid_rl.engines.vllm import watch as watch_module
from hybrid_rl.engines.vllm.folder import EngineFolder
from hybrid_rl.engines.vllm.lifetime import (
    CORE_LOGGER,
    FOLDER,
    REPORT,
    ignore_signals_of_others,
    is_no_cancelled_call,
    report_ended_workers,
)
from hybrid_rl.engines.vllm.processes import EngineProcesses, how_it_ended
from hybrid_rl.engines.vllm.stream import open_stream
from hybrid_rl.engines.vllm.watch import EngineWatch
from hybrid_rl.errors import EngineLostError
from hybrid_rl.exchange import describe_error, make_error
from hybrid_rl.processes import read_state

FORK = multiprocessing.get_context("fork")
NEVER = threading.Event().wait


def start_core(work=time.sleep, *arguments) -> tuple[EngineProcesses, multiprocessing.Process]:
    """Start a process with the name of vLLM's core process."""
    processes = EngineProcesses()
    core = FORK.Process(target=work, args=arguments or (600,), name="EngineCore")
    core.start()
    assert processes.cores == [core]
    return processes, core


@pytest.fixture
def engine() -> Iterator[tuple[EngineProcesses, multiprocessing.Process]]:
    processes, core = start_core()
    yield processes, core
    processes.end(0.0)
    processes.close()


def after(seconds: float, work) -> None:
    threading.Timer(seconds, work).start()


@pytest.mark.parametrize(
    "code, words",
    [
        (-9, "was killed by SIGKILL (exit code -9; a system without free memory does that, see dmesg)"),
        (-15, "was killed by SIGTERM (exit code -15)"),
        (-64, "was killed by SIGRTMAX (exit code -64)"),
        (-50, "was killed by signal 50 (exit code -50)"),
        (1, "ended with exit code 1, its own error is above"),
        (0, "ended with exit code 0"),
        (None, "has ended"),
    ],
)
def test_the_end_of_a_process_in_words(code, words):
    assert how_it_ended(code) == words


def test_a_killed_process_ends_the_wait(engine):
    processes, core = engine
    watch = EngineWatch(processes, stall_timeout_s=60.0)
    after(0.3, core.kill)
    start = time.monotonic()
    with pytest.raises(
        EngineLostError, match=rf"process {core.pid} of the rollout engine was killed by SIGKILL"
    ) as info:
        watch.call(NEVER, "generate 8 responses")
    assert time.monotonic() - start < 20
    assert str(info.value).endswith("; the trainer waits for it to generate 8 responses")
    assert watch.is_broken
    copy = make_error(*describe_error(info.value))  # as run_on_main sends it to the other ranks of a group
    assert type(copy) is EngineLostError and str(copy) == str(info.value)


def test_an_engine_that_was_given_up_in_a_call_takes_no_other_one(engine):
    processes, _ = engine
    watch = EngineWatch(processes, stall_timeout_s=0.2)
    with pytest.raises(EngineLostError, match="does not respond"):
        watch.call(NEVER, "generate 8 responses")
    calls = []
    sentence = "^the rollout engine was given up in an earlier call; the trainer waits for it to take a seed$"
    with pytest.raises(EngineLostError, match=sentence):
        watch.call(lambda: calls.append("called"), "take a seed")
    with pytest.raises(EngineLostError, match=sentence):
        watch.wait(lambda seconds: True, "take a seed")
    assert calls == []


def test_a_process_that_ends_in_the_middle_of_a_call_explains_the_error_of_the_call(engine):
    processes, core = engine
    watch = EngineWatch(processes, stall_timeout_s=60.0)

    def work():
        core.kill()
        core.join()
        raise ConnectionResetError("the socket is closed")

    with pytest.raises(EngineLostError, match=r"was killed by SIGKILL") as info:
        watch.call(work, "start")
    assert isinstance(info.value.__cause__, ConnectionResetError)


def test_an_engine_that_starts_later_is_another_engine(engine):
    processes, core = engine
    processes.watch_workers([core.pid])
    others, other = start_core()
    try:
        assert processes.cores == [core] and [state.pid for state in processes.running()] == [core.pid]
        other.kill()
        other.join()
        assert processes.ended() == [] and others.ended() == [(other.pid, -signal.SIGKILL)]
    finally:
        others.end(0.0)
        others.close()


def test_an_error_of_a_living_engine_is_raised_as_it_is(engine):
    watch = EngineWatch(engine[0], stall_timeout_s=60.0)

    def work():
        raise ValueError("prompt is too long")

    with pytest.raises(ValueError, match="prompt is too long"):
        watch.call(work, "generate 1 responses")
    assert watch.call(lambda: 5, "start") == 5
    assert not watch.is_broken


def test_vllm_reports_that_a_living_engine_has_failed(engine, monkeypatch):
    monkeypatch.setattr(watch_module, "_DEATH_S", 0.1)
    watch = EngineWatch(engine[0], stall_timeout_s=60.0)

    def work():
        raise type("EngineDeadError", (Exception,), {})

    with pytest.raises(EngineLostError, match="its own error is above; the trainer waits for it to generate"):
        watch.call(work, "generate 1 responses")
    assert watch.is_broken


def test_a_stopped_process_is_named_after_the_time_without_progress(engine):
    processes, core = engine
    watch = EngineWatch(processes, stall_timeout_s=0.5)
    os.kill(core.pid, signal.SIGSTOP)
    with pytest.raises(EngineLostError) as info:
        watch.call(NEVER, "copy a bucket")
    assert str(info.value) == (
        f"process {core.pid} of the rollout engine is stopped (SIGSTOP or a debugger) and has made no progress for "
        "0.5 s (run.stall_timeout_s); the trainer waits for it to copy a bucket"
    )


def test_a_process_that_hangs_is_named(engine):
    watch = EngineWatch(engine[0], stall_timeout_s=0.3)
    with pytest.raises(EngineLostError, match=rf"process {engine[1].pid} .* does not respond and has made no progress"):
        watch.call(NEVER, "start")


def test_a_slow_engine_that_makes_progress_is_left_alone(engine):
    watch = EngineWatch(engine[0], stall_timeout_s=1.5)

    def work():
        for _ in range(10):
            time.sleep(0.3)
            watch.sign_of_progress()
        return "done"

    assert watch.call(work, "generate 1 responses") == "done"


def test_time_in_which_the_trainer_itself_stands_still_does_not_count(engine, monkeypatch):
    """After a suspend the clock has moved on by hours, but the trainer has not waited for so long."""
    clock = [0.0]
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: clock[0])
    polls = iter([False, False, True])

    def is_done(seconds):
        clock[0] += 3600
        return next(polls)

    EngineWatch(engine[0], stall_timeout_s=300.0).wait(is_done, "start")


def tree(path: str) -> None:
    """Start a child that ignores SIGTERM, as a process does that is in the middle of a kernel."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def test_the_whole_tree_of_an_engine_that_ignores_sigterm_is_killed(tmp_path):
    path = tmp_path / "child"
    processes, core = start_core(tree, str(path))
    while not path.exists() or not path.read_text():
        time.sleep(0.05)
    child = int(path.read_text())
    assert {state.pid for state in processes.running()} == {core.pid, child}
    assert processes.end(0.3)
    assert core.exitcode == -signal.SIGKILL and processes.running() == []
    state = read_state(child)
    assert state is None or state.has_ended
    processes.close()


def test_an_engine_that_ends_when_it_is_asked_to_is_not_killed():
    processes, core = start_core()
    assert not processes.end(30.0)
    assert core.exitcode == -signal.SIGTERM
    processes.close()


def test_a_stopped_engine_is_killed_at_once(engine):
    processes, core = engine
    os.kill(core.pid, signal.SIGSTOP)
    while not read_state(core.pid).is_stopped:  # of two pending signals the kernel delivers SIGTERM first
        time.sleep(0.01)
    start = time.monotonic()
    assert processes.end(60.0)
    assert core.exitcode == -signal.SIGKILL and time.monotonic() - start < 20


def core_with_worker(report: str, path: str) -> None:
    """Start a worker and report its end, like vLLM's core process."""
    os.environ[REPORT] = report
    worker = FORK.Process(target=time.sleep, args=(600,))
    worker.start()
    report_ended_workers()
    with open(path, "w") as file:
        file.write(str(worker.pid))
    time.sleep(600)


def test_the_exit_code_of_a_worker_comes_from_the_core_process(tmp_path):
    """The trainer is not the parent of a worker, so the core process writes how it ended."""
    processes, path = EngineProcesses(), tmp_path / "worker"
    core = FORK.Process(target=core_with_worker, args=(processes.report_path, str(path)), name="EngineCore")
    core.start()
    while not path.exists() or not path.read_text():
        time.sleep(0.05)
    worker = int(path.read_text())
    processes.watch_workers([worker, core.pid])
    after(0.3, lambda: os.kill(worker, signal.SIGKILL))
    with pytest.raises(EngineLostError, match=rf"process {worker} of the rollout engine was killed by SIGKILL"):
        EngineWatch(processes, stall_timeout_s=60.0).call(NEVER, "generate 1 responses")
    processes.end(0.0)
    processes.close()


def test_a_call_that_vllm_cancels_after_the_end_of_a_worker_is_not_logged(caplog):
    logger = logging.getLogger(CORE_LOGGER)
    logger.addFilter(is_no_cancelled_call)
    try:
        for message in ("cancelled", "a tensor is missing"):
            try:
                raise RuntimeError(message)
            except RuntimeError:
                logger.exception("Invocation of %s method failed", "collective_rpc")
        logger.error("plain")
    finally:
        logger.removeFilter(is_no_cancelled_call)
    found = [str(record.exc_info[1]) if record.exc_info else record.message for record in caplog.records]
    assert found == ["a tensor is missing", "plain"]


def core_with_handler(folder: str, path: str) -> None:
    """Write down each signal that reaches vLLM's handler."""
    os.environ[FOLDER] = folder
    file = open(path, "a", buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGTERM, lambda number, frame: file.write("ended\n"))
    ignore_signals_of_others()
    file.write("ready\n")
    while True:
        time.sleep(0.01)


def test_a_core_process_obeys_sigterm_only_when_the_trainer_has_asked_it_to_end(tmp_path):
    """A terminal or a job manager signals every process of a run."""
    folder, path = EngineFolder(), tmp_path / "signals"
    processes, core = start_core(core_with_handler, str(folder.path), str(path))

    def wait_for(text: str) -> None:
        while not path.exists() or path.read_text() != text:
            time.sleep(0.01)

    wait_for("ready\n")
    os.kill(core.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert path.read_text() == "ready\n" and core.is_alive()
    folder.request_end()
    os.kill(core.pid, signal.SIGTERM)
    wait_for("ready\nended\n")
    processes.end(0.0)
    processes.close()
    folder.remove()


class SilentClient:
    """vLLM's client of an engine that takes requests and never answers."""

    def __init__(self) -> None:
        self.outputs_queue: queue.Queue = queue.Queue()
        self.engine_core = self

    def add_request(self, *_: object, **__: object) -> None:
        """Take a request."""


SAMPLING = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=())
REQUEST = Request(number=7, token_ids=[1], max_tokens=4, seed=1)


def test_conversations_end_when_their_engine_is_killed(engine):
    processes, core = engine
    watch = EngineWatch(processes, stall_timeout_s=60.0)
    with (
        pytest.raises(EngineLostError, match=r"was killed by SIGKILL.*waits for it to generate 1 conversations"),
        open_stream(SilentClient(), watch, SAMPLING, "generate 1 conversations", adapter=None) as stream,
    ):
        stream.submit([REQUEST])
        assert stream.receive() == [] and stream.num_running == 1
        core.kill()
        core.join()
        stream.receive()
    assert watch.is_broken


def test_only_an_engine_with_requests_must_make_progress(engine):
    """Environments may take as long as their own limit."""
    watch = EngineWatch(engine[0], stall_timeout_s=0.5)
    with (
        pytest.raises(EngineLostError, match=r"has made no progress for 0\.5 s"),
        open_stream(SilentClient(), watch, SAMPLING, "generate 1 conversations", adapter=None) as stream,
    ):
        for _ in range(10):
            assert stream.receive() == []
            time.sleep(0.1)
        stream.submit([REQUEST])
        while True:
            stream.receive()
            time.sleep(0.1)


def test_conversations_that_are_given_up_leave_an_engine_that_takes_no_call(engine):
    watch = EngineWatch(engine[0], stall_timeout_s=60.0)
    with (
        pytest.raises(LookupError),
        open_stream(SilentClient(), watch, SAMPLING, "generate 1 conversations", adapter=None) as stream,
    ):
        stream.submit([REQUEST])
        raise LookupError
    with pytest.raises(EngineLostError, match="was given up in an earlier call"):
        watch.call(NEVER, "take a seed")
