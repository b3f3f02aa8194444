"""An engine process notices SIGTERM whichever thread receives it and whatever its main thread does."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch

from hybrid_rl.config import RolloutConfig
from hybrid_rl.engines.vllm.engine import VllmEngine

# The structure of vLLM's engine process: the handler sets an event, a thread puts an item into the queue, and the main
# thread waits for the queue. Here another thread receives the signal while the main thread waits.
PROCESS = """
import queue, signal, sys, threading, time
from hybrid_rl.engines.vllm.signals import handle_sigterm_in_thread

items, is_signalled = queue.Queue(), threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: is_signalled.set())

def wake_main_thread():
    is_signalled.wait()
    items.put("SIGTERM")

def receive():
    time.sleep(0.2)  # the main thread waits by then
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(float(sys.argv[1]))
    items.put("request")

if sys.argv[2] == "in_thread":
    handle_sigterm_in_thread()
for target in (wake_main_thread, receive):
    threading.Thread(target=target, daemon=True).start()
print(items.get())
"""


def first_item(wait_s: float, way: str) -> str:
    command = [sys.executable, "-c", PROCESS, str(wait_s), way]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def test_python_alone_misses_a_signal_that_another_thread_receives():
    assert first_item(2.0, "in_main_thread") == "request"


def test_a_handler_in_a_thread_notices_a_signal_that_another_thread_receives():
    assert first_item(60.0, "in_thread") == "SIGTERM"


def thread_that_takes(process: BaseProcess, number: signal.Signals) -> int:
    """Return the id of a thread, other than the main one, that does not block the signal."""
    for folder in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
        (line,) = [line for line in (folder / "status").read_text().splitlines() if line.startswith("SigBlk:")]
        if int(folder.name) != process.pid and not int(line.split()[1], 16) >> (number - 1) & 1:
            return int(folder.name)
    raise LookupError("every thread blocks the signal")


def signal_thread(process: BaseProcess, thread: int) -> None:
    """Send SIGTERM to one thread of a process; Python has no function for another process's threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.tgkill(process.pid, thread, int(signal.SIGTERM)) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.slow
def test_engines_end_at_once_on_busy_cores(tiny, monkeypatch):
    """The first engines get the signal from vLLM, the last one in a thread other than the main one.

    An engine that misses the signal is killed after 60 s. Both start and end take longer on a machine with other work,
    so a start, which takes several times as long, is the limit of an end.
    """
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(psutil.cpu_count() or 1)]
    try:
        for is_in_thread in (False, False, False, True):
            config = RolloutConfig(kv_cache_memory_bytes=64 << 20, max_num_seqs=16)
            start = time.monotonic()
            engine = VllmEngine(
                str(tiny / "policy"), config, dtype=torch.float32, max_model_len=32, can_sleep=False, seed=0
            )
            started = time.monotonic()
            (process,) = engine.llm.llm_engine.engine_core.resources.engine_manager.processes
            if is_in_thread:
                thread = thread_that_takes(process, signal.SIGTERM)
                monkeypatch.setattr(process, "terminate", lambda p=process, t=thread: signal_thread(p, t))
            closing = time.monotonic()
            engine.close()
            assert process.exitcode == 0  # not killed
            assert time.monotonic() - closing < started - start
    finally:
        for program in busy:
            program.kill()
            program.wait()
