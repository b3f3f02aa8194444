"""The same run under Ray: two raylets on this machine, workers that die, a cluster that is too small, Ctrl-C."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from ray.cluster_utils import Cluster

from hybrid_rl.config import Config, as_dict
from launch import ray_cluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

# Rank 1 dies once while nothing, the responses and the scores of a step are in the log. The critic's update would go on
# from where the actor's does, see test_resume.py.
DIE_THREE_TIMES = """
import os, signal
from launch import ray_cluster

work = ray_cluster.work

def dying(job):
    from hybrid_rl import trainer

    def die_in(phase, name, die_in_step):
        original = getattr(trainer, name)
        def once(run, step, *arguments):
            marker = run.config.run_dir / f"died_in_{phase}"
            if run.world.rank == 1 and step == die_in_step and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return original(run, step, *arguments)
        setattr(trainer, name, once)

    die_in("rollout", "generate", 1)
    die_in("score", "score_responses", 2)
    die_in("update_actor", "update_actor", 3)
    work(job)

ray_cluster.work = dying
ray_cluster.main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes of one CPU each, every one a process of its own."""
    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            cluster.add_node(**node)
            yield cluster
        finally:
            cluster.shutdown()


Start = Callable[..., subprocess.Popen]


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Iterator[Start]:
    """Start a driver on the cluster; its output goes to output.txt."""
    started = []

    def run(config: Config, *arguments: str, program: list[str]) -> subprocess.Popen:
        settings = tmp_path / "settings.yaml"
        settings.write_text(yaml.safe_dump(as_dict(config)))
        command = [sys.executable, *program, "--address", cluster.address, "--cpu", "--config", str(settings)]
        started.append(
            subprocess.Popen(
                [*command, *arguments],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
                stdout=(tmp_path / "output.txt").open("w"),
                stderr=subprocess.STDOUT,
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


SCRIPT = ["launch/ray_cluster.py"]


def test_workers_that_die_change_nothing(make_config, launch, read_run, start, tmp_path):
    def config(name: str) -> Config:
        (tmp_path / name).mkdir()
        return make_config(
            tmp_path / name, run={"num_steps": 3}, checkpoint={"every_steps": 1, "phase_log": True, "export": False}
        )

    undisturbed, disturbed = config("undisturbed"), config("disturbed")
    driver = start(disturbed, "--max_failures", "3", program=["-c", DIE_THREE_TIMES])
    code = driver.wait(timeout=500)
    output = (tmp_path / "output.txt").read_text()
    assert code == 0, output
    assert "(rank 0 pid=" in output and "(rank 1 pid=" in output
    phases = {path.name for path in disturbed.run_dir.glob("died_in_*")}
    assert phases == {"died_in_rollout", "died_in_score", "died_in_update_actor"}

    ended = launch(undisturbed, "--num_processes", "2")
    assert ended.code == 0, ended.output
    found, expected = read_run(disturbed), read_run(undisturbed)
    assert (found.metrics, found.rollouts, found.state) == (expected.metrics, expected.rollouts, expected.state)


@pytest.fixture
def refused(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> Callable[..., str]:
    """Return what the command, here in this process, prints last before it ends with code 2."""
    monkeypatch.setattr(ray_cluster.signals, "handle_signals", lambda: None)  # the handlers of pytest stay
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")  # the command sets it where it is not set

    def run(config: Config, *arguments: str) -> str:
        settings = tmp_path / "settings.yaml"
        settings.write_text(yaml.safe_dump(as_dict(config)))
        command = ["ray_cluster.py", "--address", cluster.address, "--cpu", "--config", str(settings), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            ray_cluster.main()
        assert ended.value.code == 2
        return capfd.readouterr().err.splitlines()[-1]

    return run


def test_a_cluster_that_is_too_small_is_told_in_numbers(make_config, refused, tmp_path):
    said = refused(make_config(tmp_path), "--num_workers", "3", "--wait_s", "1")
    assert said.startswith("error: asked for 3 workers with one CPU each; after 1 s 2 of them are free")


def test_a_group_that_starts_again_must_be_allowed_to_resume(make_config, refused, tmp_path):
    said = refused(make_config(tmp_path, run={"resume": "never"}), "--max_failures", "1")
    assert said.endswith("a restart needs run.resume = auto or must, not never")


def test_a_setting_that_cannot_work_ends_with_its_sentence(make_config, refused, tmp_path):
    config = make_config(tmp_path, run={"resume": "must"})
    expected = f"error: run.resume = must: {config.run_dir} has no checkpoint; use auto"
    assert refused(config, "--num_workers", "1") == expected


def engines() -> list[psutil.Process]:
    """Return the vLLM engines below this process, wherever Ray put them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends just now
            if process.name().startswith("VLLM::Engine") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_sigterm_ends_the_engines_and_gives_its_exit_code(make_config, start, tmp_path):
    config = make_config(tmp_path, run={"num_steps": 1000, "eval_every_steps": 0}, rollout={"engine": "vllm"})
    others = engines()  # of tests before, which share them
    driver = start(config, "--num_workers", "1", program=SCRIPT)
    metrics, deadline = config.run_dir / "metrics.jsonl", time.monotonic() + 400
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert driver.poll() is None, (tmp_path / "output.txt").read_text()
        time.sleep(0.5)
    assert metrics.stat().st_size, (tmp_path / "output.txt").read_text()
    running = [engine for engine in engines() if engine not in others]
    assert running
    driver.terminate()
    assert driver.wait(timeout=120) == 143
    output = (tmp_path / "output.txt").read_text()
    assert output.splitlines().count("error: ended by SIGTERM") == 1, output
    _, alive = psutil.wait_procs(running, timeout=120)
    assert not alive


def wait_for_steps(config: Config, driver: subprocess.Popen, tmp_path: Path) -> None:
    """Wait until a run has finished a step."""
    metrics, deadline = config.run_dir / "metrics.jsonl", time.monotonic() + 400
    while not (metrics.exists() and metrics.stat().st_size):
        assert driver.poll() is None and time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
        time.sleep(0.2)


@pytest.mark.parametrize(
    "number, on_sigterm, code, sentence",
    [
        (signal.SIGTERM, True, 75, "preempted by SIGTERM: the checkpoint of step "),
        (signal.SIGTERM, False, 143, "ended by SIGTERM"),
        (signal.SIGINT, True, 130, "ended by SIGINT"),
    ],
)
def test_a_signal_to_the_command_ends_the_workers(make_config, start, tmp_path, number, on_sigterm, code, sentence):
    checkpoint = {"every_steps": 0, "on_sigterm": on_sigterm, "grace_s": 60.0}
    config = make_config(tmp_path, run={"num_steps": 100_000, "eval_every_steps": 0}, checkpoint=checkpoint)
    driver = start(config, "--num_workers", "2", program=SCRIPT)
    wait_for_steps(config, driver, tmp_path)
    (worker,) = {json.loads((config.run_dir / name).read_text())["pid"] for name in ["heartbeat.json"]}
    driver.send_signal(number)
    assert driver.wait(timeout=120) == code
    output = (tmp_path / "output.txt").read_text()
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {sentence}"), output
    assert (config.run_dir / "latest").exists() == (code == 75)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(worker) and "ray::" in " ".join(psutil.Process(worker).cmdline()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
