"""The worker pool that keeps a failing rule function from ending or delaying a run."""

import logging
import os
import re
import resource
import subprocess
import sys
import time
import weakref
from dataclasses import replace

import psutil
import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.errors import RewardLostError
from hybrid_rl.rewards import FUNCTIONS, ScorerPool
from tests.conftest import make_rollout

SCORERS = """
import os, signal, sys, time, threading, math
import numpy

def length(prompt, response): return len(response)
def answer_is_seven(prompt, response): return prompt.answer == "7" and prompt.metadata["k"] == 1
def numpy_scalar(prompt, response): return numpy.float32(0.5)
def numpy_array(prompt, response): return numpy.array([[0.5]])
def none(prompt, response): return None
def text(prompt, response): return "1.0"
def listed(prompt, response): return [1.0, 0, 2]
def two_values(prompt, response): return numpy.ones((2, 1))
def nan(prompt, response): return math.nan
def inf(prompt, response): return math.inf
def raises(prompt, response): raise KeyError("gold")
def sleeps(prompt, response): time.sleep(60)
def holds_gil(prompt, response): return (9 ** 9 ** 9) % 10
def exits(prompt, response): print("bye"); exit()
def os_exits(prompt, response): os._exit(3)
def crashes(prompt, response): os.kill(os.getpid(), signal.SIGSEGV)
def prints(prompt, response): print("noise" * 1000); sys.stderr.write("noise"); return 1.0
def reads(prompt, response): return input()
def loads_torch(prompt, response): return "torch" in sys.modules
def process_id(prompt, response): return os.getpid()

def bad_at_3(prompt, response):
    if prompt.prompt_id == 3: time.sleep(60)
    return 1.0

def exits_at_3(prompt, response):
    if prompt.prompt_id == 3: os._exit(3)
    if prompt.prompt_id > 3: time.sleep(60)
    return 1.0

def alarm(prompt, response):
    def stop(*_): raise TimeoutError
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(5)
    signal.alarm(0)
    return 1.0

def forgotten_alarm(prompt, response): signal.setitimer(signal.ITIMER_REAL, 0.2); return 1.0

def dies_when_idle(prompt, response):
    threading.Timer(1, lambda: os._exit(1)).start()
    return 1.0

def starts_a_child(prompt, response):
    import subprocess
    subprocess.Popen(["sleep", "61.25"])
    time.sleep(60)
"""


@pytest.fixture
def scorers(tmp_path, monkeypatch):
    """Return a function that maps the names of functions in SCORERS to names for a pool."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scorers.py").write_text(SCORERS)
    return lambda *names: [n if n in FUNCTIONS else f"scorers.py:{n}" for n in names]


def make_rollouts(num=1, text="7", answer="7", **metadata):
    """Return responses with the same text to prompts 0, 1, ..., whose sequence ids start at 10."""
    metadata = {"k": 1, **metadata}
    rollouts = [make_rollout(prompt_id=n, sequence_id=10 + n, text=text, answer=answer) for n in range(num)]
    return [replace(rollout, prompt=replace(rollout.prompt, metadata=metadata)) for rollout in rollouts]


def make_pool(names, weights=None, *, timeout_s=60.0, num_workers=1, on_error="zero"):
    return ScorerPool(names, weights, timeout_s=timeout_s, num_workers=num_workers, on_error=on_error)


def children():
    """Return the ids of this process's child processes, zombies included."""
    listing = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return {line.split()[0] for line in listing.stdout.splitlines() if "ps" not in line.split()}


@pytest.fixture
def num_children():
    """Return a function that counts the child processes started in this test; other tests may leave their own."""
    before = children()
    return lambda: len(children() - before)


def wait_until_gone(*process_ids, timeout_s=15):
    """Wait until no process with one of the ids lives."""
    deadline = time.monotonic() + timeout_s
    while any(psutil.pid_exists(i) and psutil.Process(i).status() != psutil.STATUS_ZOMBIE for i in process_ids):
        assert time.monotonic() < deadline, "a process is still there"
        time.sleep(0.02)


def test_names_that_cannot_be_loaded_are_explained(scorers, tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module")
    (tmp_path / "quits.py").write_text("exit()")
    for name, message in {
        "exact": r"'exact' is unknown; give one of exact_match, last_number, .*, reasoning_gym, or path\.py:function",
        "absent.py:f": "there is no file .*absent.py",
        "scorers.py:absent": "scorers.py defines no function 'absent'",
        "scorers.py:SCORERS": "defines no function",
        "broken.py:f": "broken.py fails with ModuleNotFoundError: .*no_such_module",
        "quits.py:f": "quits.py fails with SystemExit",
    }.items():
        with pytest.raises(ConfigError, match=message):
            make_pool([name])


@pytest.mark.parametrize(
    "name, package, text, message",
    [
        ("math", "math_verify", "import absent", r"math_verify cannot be imported \(No module named 'absent'\): pip"),
        (
            "math",
            "math_verify",
            "def parse(*a, **b): return []",
            "math_verify finds no expression in .*, as without a parser",
        ),
        ("reasoning_gym", "reasoning_gym", "", "reasoning_gym cannot be imported .*: pip install reasoning-gym"),
    ],
)
def test_a_function_whose_library_is_missing_or_broken_is_refused(tmp_path, monkeypatch, name, package, text, message):
    (tmp_path / f"{package}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"reward.functions: '{name}': {message}"):
        make_pool(["exact_match", name])


def test_functions_are_listed_once_and_have_one_weight_each():
    with pytest.raises(ConfigError, match=r"reward\.functions is empty"):
        make_pool([])
    with pytest.raises(ConfigError, match="listed twice"):
        make_pool(["exact_match", "exact_match"])
    with pytest.raises(ConfigError, match=r"reward\.weights has 2 values for 1"):
        make_pool(["exact_match"], [1.0, 2.0])


def test_scores_are_weighted_sums_in_order(scorers):
    rollouts = [r for n in range(20) for r in make_rollouts(text="7" * (n + 1))]
    names = scorers("exact_match", "length", "answer_is_seven", "numpy_scalar", "numpy_array")
    with make_pool(names, [2.0, 1.0, 1.0, 1.0, 1.0], num_workers=2) as pool:
        result = pool.score(rollouts)
        assert result.per_function[names[0]] == [1.0] + [0.0] * 19
        assert result.per_function[names[1]] == [float(n + 1) for n in range(20)]
        assert result.scores == [2.0 * (n == 0) + n + 1 + 1.0 + 0.5 + 0.5 for n in range(20)]
        assert (result.num_failed, result.failures) == (0, {})
        assert pool.score([]).per_function == {name: [] for name in names}


@pytest.mark.parametrize(
    "name, reason",
    [
        ("none", "returned None, not a number"),
        ("text", "returned str '1.0', not a number"),
        ("listed", r"returned 3 rewards for a response of 1 tokens: return one reward per token"),
        ("two_values", "returned 2 rewards for a response of 1 tokens"),
        ("nan", "returned float nan"),
        ("inf", "returned float inf"),
        ("raises", r"KeyError: 'gold' \(scorers.py, line \d+: def raises"),
        ("exits", "SystemExit"),
        ("reads", "EOFError"),
        ("os_exits", r"the scorer process \d+ ended with exit code 3"),
        ("crashes", r"the scorer process \d+ was killed by SIGSEGV"),
        ("sleeps", r"the scorer process \d+ took longer than reward\.timeout_s = 2"),
        ("holds_gil", r"the scorer process \d+ took longer than reward\.timeout_s = 2"),
    ],
)
def test_failures_are_counted_or_end_the_run(num_children, name, reason, scorers, caplog):
    names, timeout_s = scorers("length", name, "exact_match"), 2 if name in ("sleeps", "holds_gil") else 60
    with make_pool(names, timeout_s=timeout_s) as pool, caplog.at_level(logging.WARNING):
        result = pool.score(make_rollouts(2))
    assert result.num_failed == 2 and result.per_function[names[0]] == [1.0, 1.0]
    assert result.per_function[names[1]] == [0.0, 0.0]
    assert f"prompt_id 1, sequence_id 11: {names[1]}: " in result.failures[1]
    assert re.search(reason, result.failures[0])
    assert "2 of 2 responses" in caplog.text

    error = RewardLostError if "the scorer process" in reason else ConfigError
    with (
        make_pool(scorers(name), timeout_s=timeout_s, on_error="raise") as pool,
        pytest.raises(error, match=f"reward.functions: prompt_id 0, sequence_id 10: .*{reason}.*; correct it"),
    ):
        pool.score(make_rollouts(2))
    assert num_children() == 0


def test_one_response_that_times_out_leaves_the_others_their_scores(scorers):
    start = time.monotonic()
    with make_pool(scorers("bad_at_3"), timeout_s=3, num_workers=2) as pool:
        result = pool.score(make_rollouts(8))
        assert result.scores == [1, 1, 1, 0, 1, 1, 1, 1] and result.num_failed == 1
        assert "prompt_id 3" in result.failures[3]
        assert pool.score(make_rollouts(3)).scores == [1, 1, 1]
    assert time.monotonic() - start < 50  # less than the 60 s that the function sleeps


def test_math_in_a_scorer_process_gives_up_on_a_tower_of_powers():
    """math-verify's alarm ends it after 2 s, and the next response has its full time limit."""
    rollouts = make_rollouts(3, text=r"\boxed{7}")
    rollouts[1] = make_rollouts(text=r"\boxed{9^{9^{9^{9}}}}")[0]
    with make_pool(["math"], timeout_s=60, on_error="raise") as pool:
        assert pool.score(rollouts).scores == [1, 0, 1]


def test_a_time_limit_below_maths_alarm_ends_it_first():
    rollouts = [*make_rollouts(text=r"\boxed{9^{9^{9^{9}}}}"), *make_rollouts(text="7")]
    with make_pool(["math"], timeout_s=1) as pool:
        result = pool.score(rollouts)
    assert result.scores == [0, 1] and result.num_failed == 1
    assert "took longer than reward.timeout_s = 1" in result.failures[0]


@pytest.mark.parametrize("name", ["prints", "alarm", "forgotten_alarm"])
def test_functions_may_print_and_set_alarms(name, scorers):
    with make_pool(scorers(name, "length"), on_error="raise") as pool:
        assert pool.score(make_rollouts(3)).scores == [2.0] * 3
        time.sleep(0.3)
        assert pool.score(make_rollouts(3)).scores == [2.0] * 3


def test_a_process_that_dies_while_idle_is_replaced(scorers):
    with make_pool(scorers("dies_when_idle"), on_error="raise") as pool:
        for _ in range(2):
            assert pool.score(make_rollouts()).scores == [1.0]
            wait_until_gone(*pool.process_ids)


def test_a_pool_can_score_again_after_it_raised(scorers):
    with make_pool(scorers("exits_at_3"), num_workers=2, on_error="raise") as pool:
        with pytest.raises(RewardLostError, match="prompt_id 3"):  # the other process is still scoring
            pool.score(make_rollouts(8))
        assert pool.score(make_rollouts(3)).scores == [1.0] * 3


def test_a_file_that_no_longer_loads_ends_the_run(scorers, tmp_path):
    with make_pool(scorers("length")) as pool:
        (tmp_path / "scorers.py").write_text("raise ValueError('edited')")
        assert pool.score(make_rollouts()).scores == [1.0]  # by the process that has loaded the file
        pool.close()
        with pytest.raises(ConfigError, match=r"'scorers.py:length': .*ValueError: edited"):
            pool.score(make_rollouts())


def test_one_process_starts_with_the_pool_and_the_others_with_the_first_call(num_children, scorers):
    pool = make_pool(scorers("process_id"), num_workers=3)
    assert num_children() == 1
    first = set(pool.score(make_rollouts(30)).scores)
    assert num_children() == 3 and first <= set(map(float, pool.process_ids))
    assert set(pool.score(make_rollouts(30)).scores) <= set(map(float, pool.process_ids))
    pool.close()
    assert num_children() == 0


def test_processes_end_with_a_pool_that_is_not_closed(num_children, scorers):
    pool = make_pool(scorers("process_id"), num_workers=2)
    pool.score(make_rollouts(2))
    assert num_children() == 2
    del pool
    assert num_children() == 0


def test_a_forked_process_leaves_the_pool_alone(scorers):
    with make_pool(scorers("length")) as pool:
        child = os.fork()
        if child == 0:
            try:
                weakref.finalize._exitfunc()  # what atexit calls
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert pool.score(make_rollouts()).scores == [1.0]


def test_processes_that_a_function_started_end_with_its_worker(scorers):
    with make_pool(scorers("starts_a_child"), timeout_s=0.5) as pool:
        assert pool.score(make_rollouts()).num_failed == 1
    assert subprocess.run(["pgrep", "-f", "sleep 61.25"], capture_output=True).stdout == b""


def test_workers_start_without_torch(scorers):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with make_pool(scorers("loads_torch")) as pool:
        assert pool.score(make_rollouts()).scores == [0.0]
    assert (
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1
    )  # CPU seconds; importing torch alone takes more


def test_workers_neither_run_the_main_program_nor_outlive_it(scorers, tmp_path):
    program = tmp_path / "main.py"
    program.write_text(
        "print('main runs')\n"
        "from types import SimpleNamespace\n"
        "from hybrid_rl.rewards import ScorerPool\n"
        "pool = ScorerPool(['scorers.py:length'], timeout_s=5, num_workers=1, on_error='raise')\n"
        "rollout = SimpleNamespace(prompt=SimpleNamespace(answer='7'), text='7', response_ids=[4])\n"
        "print(pool.score([rollout]).scores, pool.process_ids[0])\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env, timeout=60, check=True)
    assert done.stdout.startswith("main runs\n[1.0] ")
    wait_until_gone(int(done.stdout.split()[-1]))
