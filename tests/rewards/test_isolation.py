"""Faults of reward functions that reach beyond a score: processes left behind, memory, stopped processes, tokens."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.errors import RewardLostError
from hybrid_rl.processes import descendants
from hybrid_rl.rewards import ScorerPool
from tests.conftest import make_rollout
from tests.programs import PATHS

LEAVES = """
import json, os, subprocess, sys, time

def forget(prompt, response):
    '''Start a process in a session of its own, whose parent ends at once, and another one as a daemon does.'''
    sleep = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    start = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.run([sys.executable, "-S", "-c", start, sys.executable, "-S", "-c", sleep, "one"], check=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open("two", "w").write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not all(os.path.exists(name) and open(name).read() for name in ("one", "two")):
        time.sleep(0.01)
    return 1.0

def forget_and_hang(prompt, response):
    forget(prompt, response)
    open("hangs", "w").close()
    time.sleep(600)

def half_a_message(prompt, response):
    os.write(int(sys.argv[1]), (100).to_bytes(4, "big") + b"half")
    time.sleep(60)

def hold(prompt, response):
    held = b"x" * int(response)
    time.sleep(60 if int(response) > 1e8 else 0)
    return 1.0

def hold_in_child(prompt, response):
    program = f"import time; held = b'x' * {int(response)}; time.sleep(60)"
    subprocess.run([sys.executable, "-S", "-c", program])
    return 1.0

def stop(prompt, response): os.kill(os.getpid(), 19)
def value(prompt, response): return 1.0
def oom_score(prompt, response): return int(open("/proc/self/oom_score_adj").read())
def variables(prompt, response): json.dump(dict(os.environ), open("environment.json", "w")); return 1.0
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scorers.py").write_text(LEAVES)
    return tmp_path


@pytest.fixture
def started():
    """Return a function to the processes that were started since the test began, as far as they live."""
    before = {*descendants(os.getpid())}
    return lambda: {*descendants(os.getpid())} - before


def make_pool(name, *, timeout_s=60.0, **settings):
    settings = {"num_workers": 1, "on_error": "zero", **settings}
    return ScorerPool([f"scorers.py:{name}"], timeout_s=timeout_s, **settings)


def is_gone(process_id):
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, timeout_s=15):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def forgotten():
    """Return the ids of the two processes that `forget` has left."""
    return [int(Path(name).read_text()) for name in ("one", "two")]


# Processes


def test_what_a_function_left_behind_ends_with_the_pool(started):
    with make_pool("forget") as pool:
        assert pool.score([make_rollout()]).scores == [1.0]
        left = forgotten()
        assert not any(map(is_gone, left))
    assert all(map(is_gone, left)) and not started()


@pytest.mark.parametrize("victim", ["worker", "supervisor"])
def test_what_a_function_left_behind_ends_after_its_worker_or_the_supervisor_was_killed(victim, started):
    with make_pool("forget") as pool:
        pool.score([make_rollout()])
        (worker,), left = pool.process_ids, forgotten()
        processes = {"worker": worker, "supervisor": psutil.Process(worker).ppid()}
        os.kill(processes[victim], signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, [*processes.values(), *left])))  # before the pool is used again
        for name in ("one", "two"):
            Path(name).unlink()
        assert pool.score([make_rollout()]).scores == [1.0] and pool.process_ids != [worker]  # by another worker
    assert not started()


PROGRAM = """
import sys, time
from types import SimpleNamespace
from hybrid_rl.rewards import ScorerPool
pool = ScorerPool([f"scorers.py:{sys.argv[1]}"], timeout_s=600, num_workers=1, on_error="raise")
pool.score([SimpleNamespace(prompt=SimpleNamespace(prompt_id=0), text="", sequence_id=0, response_ids=[])])
open("hangs", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("name", ["forget", "forget_and_hang"], ids=["idle", "busy"])
def test_nothing_is_left_after_the_process_of_the_pool_was_killed(ending, name):
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, name], env={**os.environ, **PATHS})
    try:
        wait_until(Path("hangs").exists, timeout_s=60)
        everyone = [*descendants(program.pid), *forgotten()]
        assert len(set(everyone)) == 4  # supervisor, worker and what it has left
    finally:
        program.send_signal(ending)
        program.wait()
    wait_until(lambda: all(map(is_gone, everyone)))


def test_a_worker_that_hangs_within_a_message_is_killed_at_its_limit():
    with make_pool("half_a_message", timeout_s=1) as pool:
        result = pool.score([make_rollout()])
    assert "took longer than reward.timeout_s = 1" in result.failures[0]


def test_a_stopped_worker_is_killed_at_its_limit_and_named():
    message = r"the scorer process \d+ took longer than reward\.timeout_s = 1 and is stopped \(SIGSTOP"
    with make_pool("stop", timeout_s=1, on_error="raise") as pool, pytest.raises(RewardLostError, match=message):
        pool.score([make_rollout()])


@pytest.mark.parametrize("stopped", ["worker", "supervisor", "both"])
def test_a_process_that_was_stopped_while_idle_delays_no_one(stopped):
    """The response is longer than the buffer of the connection, so that it cannot be sent to a stopped worker."""
    with make_pool("value", timeout_s=2) as pool:
        (worker,) = pool.process_ids
        supervisor = psutil.Process(worker).ppid()
        for process_id in {"worker": [worker], "supervisor": [supervisor], "both": [worker, supervisor]}[stopped]:
            os.kill(process_id, signal.SIGSTOP)
        start = time.monotonic()
        result = pool.score([make_rollout(text="x" * 2**22), make_rollout()])
        assert result.scores == ([1.0, 1.0] if stopped == "supervisor" else [0.0, 1.0])
    assert time.monotonic() - start < 20 and is_gone(worker) and is_gone(supervisor)


# Memory


@pytest.mark.parametrize("name", ["hold", "hold_in_child"])
def test_a_scorer_that_exceeds_its_memory_is_killed_and_named(name, started):
    rollouts = [make_rollout(text=str(num_bytes)) for num_bytes in (10**6, 4 * 10**8)]
    with make_pool(name, timeout_s=5 if name == "hold" else 60, memory_limit_bytes=2 * 10**8) as pool:
        result = pool.score(rollouts[1:])
        assert result.num_failed == 1
        assert "held more than reward.memory_limit_bytes = 200000000" in result.failures[0]
        if name == "hold":
            assert pool.score(rollouts[:1]).scores == [1.0]
    assert not started()


def test_a_full_machine_ends_a_scorer_before_the_trainer():
    with make_pool("oom_score", on_error="raise") as pool:
        own = int(Path("/proc/self/oom_score_adj").read_text())
        assert pool.score([make_rollout()]).scores == [min(1000, own + 500)]


def test_torch_can_be_imported_below_a_memory_limit_of_a_gibibyte():
    Path("scorers.py").write_text("import torch\ndef value(prompt, response): return torch.ones(())\n")
    with make_pool("value", memory_limit_bytes=2**30, on_error="raise") as pool:
        assert pool.score([make_rollout()]).scores == [1.0]


# Environment


def test_scorers_get_an_allow_list_of_the_environment(monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_OWN", "LC_TIME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = {}
    for names in ([], ["MY_OWN", "CUDA_VISIBLE_DEVICES"]):
        with make_pool("variables", environment_variables=names, on_error="raise") as pool:
            pool.score([make_rollout()])
        found[len(names)] = json.loads(Path("environment.json").read_text())
    assert not {"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_OWN"} & found[0].keys()
    assert (found[0]["LC_TIME"], found[0]["OMP_NUM_THREADS"], found[0]["PATH"]) == ("7", "7", os.environ["PATH"])
    assert found[0]["CUDA_VISIBLE_DEVICES"] == ""
    assert (found[2]["MY_OWN"], found[2]["CUDA_VISIBLE_DEVICES"]) == ("7", "0") and "HF_TOKEN" not in found[2]


def test_a_variable_that_is_not_set_is_refused(monkeypatch):
    monkeypatch.delenv("ABSENT", raising=False)
    with pytest.raises(ConfigError, match=r"reward\.environment_variables: 'ABSENT' is not set in the environment"):
        make_pool("value", environment_variables=["ABSENT"])
