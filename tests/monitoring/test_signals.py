"""SIGTERM and SIGINT end a process in one sentence, whatever its main thread does; a second signal ends it at once."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.programs import PATHS

HEAD = """
import ctypes, os, signal, sys, time
from hybrid_rl.monitoring import signals

def closing():
    print("closed", flush=True)

signals.handle_signals()
"""
READY = "print('ready', flush=True)\n"


class Program:
    """A program that has printed `ready`."""

    def __init__(self, text: str, *, head: str = HEAD) -> None:
        command = [sys.executable, "-c", head + textwrap.dedent(text)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=PATHS)
        assert self.process.stdout and self.process.stdout.readline() == "ready\n"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, list[str]]:
        """Return exit code, output after `ready`, and the lines of stderr."""
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output, errors.splitlines()


WAIT = f"""
try:
    {READY}
    time.sleep(60)
finally:
    closing()
"""


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_closes_what_is_open_and_ends_in_one_sentence(name, code):
    program = Program(WAIT)
    program.send(signal.Signals[name])
    assert program.end() == (code, "closed\n", [f"error: ended by {name}"])


def test_another_exit_code_can_be_chosen():
    program = Program(f"signals.exit_with(signal.SIGTERM, 75)\n{WAIT}")
    program.send(signal.SIGTERM)
    assert program.end() == (75, "closed\n", ["error: ended by SIGTERM"])


def test_the_launcher_and_the_terminal_may_both_send_the_same_request():
    program = Program(WAIT.replace("closing()", "time.sleep(0.5); closing()"))
    for _ in range(3):
        program.send(signal.SIGINT)
        time.sleep(0.05)
    assert program.end() == (130, "closed\n", ["error: ended by SIGINT"])


def test_a_second_signal_ends_a_process_that_does_not_close():
    program = Program(WAIT.replace("closing()", "time.sleep(60)"))
    program.send(signal.SIGTERM)
    time.sleep(1.2)
    program.send(signal.SIGINT)
    started = time.monotonic()
    code, _, errors = program.end()
    assert (code, errors) == (130, ["error: ended by SIGTERM", "error: ended at once by SIGINT, the second signal"])
    assert time.monotonic() - started < 10


def test_a_main_thread_in_a_library_does_not_keep_a_process_alive():
    """The main thread waits in C, without Python's lock, as in a collective; the time to close passes."""
    text = """
    import threading
    signals.CLOSE_LIMIT_S = 0.5
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)

    def say_when_main_waits():
        time.sleep(0.5)
        print("ready", flush=True)

    threading.Thread(target=say_when_main_waits, daemon=True).start()
    lock(mutex)
    """
    program = Program(text)
    program.send(signal.SIGTERM)
    code, _, errors = program.end()
    assert code == 143
    assert errors == ["error: ended by SIGTERM", "error: ended by SIGTERM: closing takes longer than 0.5 s"]


DEFER = """
deferral = signals.Deferral(grace_s={grace_s}, describe=lambda: "a checkpoint follows")
signals.defer(deferral)
try:
    print("ready", flush=True)
    while not signals.is_end_requested():
        time.sleep(0.01)
    {then}
finally:
    closing()
"""


def test_a_deferred_signal_is_a_request_and_the_run_goes_on():
    program = Program(DEFER.format(grace_s=50, then="print('saved', flush=True); sys.exit(75)"))
    program.send(signal.SIGTERM)
    assert program.end() == (75, "saved\nclosed\n", ["SIGTERM: a checkpoint follows"])


def test_only_sigterm_is_deferred():
    program = Program(DEFER.format(grace_s=50, then=""))
    program.send(signal.SIGINT)
    assert program.end() == (130, "closed\n", ["error: ended by SIGINT"])


def test_a_checkpoint_that_takes_too_long_is_given_up_when_the_time_is_over():
    program = Program(DEFER.format(grace_s=0.5, then="time.sleep(60)"))
    program.send(signal.SIGTERM)
    code, output, errors = program.end()
    sentence = "error: ended by SIGTERM: checkpoint.grace_s = 0.5 s are over and no new checkpoint is complete"
    assert (code, output, errors) == (143, "", ["SIGTERM: a checkpoint follows", sentence])


def test_a_run_with_a_checkpoint_has_time_to_close_and_keeps_its_code():
    then = "signals.CLOSE_LIMIT_S = 0.5; signals.allow_close(75); time.sleep(60)"
    program = Program(DEFER.format(grace_s=50, then=then))
    program.send(signal.SIGTERM)
    code, _, errors = program.end()
    assert (code, errors[-1]) == (75, "error: ended by SIGTERM: closing takes longer than 0.5 s")


def test_a_request_of_another_rank_counts_like_a_signal():
    text = DEFER.format(grace_s=50, then="sys.exit(75)")
    program = Program(text.replace("while not", "signals.request_end()\n    while not"))
    assert program.end() == (75, "closed\n", ["SIGTERM: a checkpoint follows"])


def test_a_signal_that_was_swallowed_still_gives_its_exit_code():
    text = f"""
try:
    {READY}
    time.sleep(60)
except BaseException:
    pass
signals.raise_if_received()
"""
    program = Program(text)
    program.send(signal.SIGTERM)
    assert program.end() == (143, "", ["error: ended by SIGTERM"])


def test_a_forked_process_handles_signals_as_python_does():
    """Its signals do not end the process that forked it."""
    text = """
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    os.kill(pid, signal.SIGTERM)
    print("ready", flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    time.sleep(0.3)
    """
    assert Program(text).end() == (0, "-15\n", [])


def test_a_signal_to_a_process_that_is_just_being_forked_ends_that_process_alone():
    """Python drops a signal that arrives before its fork handlers run, and until then both processes share a pipe."""
    text = """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    print("ready", flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    time.sleep(0.3)
    print(signals.received(), signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
    """
    early = "import os, signal\nos.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
    assert Program(text, head=early + HEAD).end() == (0, "-15\nNone set()\n", [])
