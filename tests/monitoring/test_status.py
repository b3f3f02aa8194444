"""What operators see of a run while it goes on: heartbeat, log file, and metrics for Prometheus."""

import json
import logging
import os
import socket
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hybrid_rl.config import Config, ConfigError, ModelsConfig, RunConfig
from hybrid_rl.distributed import World
from hybrid_rl.errors import PreemptedError
from hybrid_rl.monitoring.activity import Activity
from hybrid_rl.monitoring.heartbeat import Heartbeat
from hybrid_rl.monitoring.log_file import NUM_OLD, LogFile
from hybrid_rl.monitoring.prometheus import MetricsServer
from hybrid_rl.monitoring.status import Status
from tests.disks import a_full_disk

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_a_heartbeat_names_step_phase_host_and_processes(tmp_path):
    path, activity = tmp_path / "heartbeat.json", Activity()
    child = subprocess.Popen(["sleep", "60"])
    heartbeat = Heartbeat(path, activity, rank=3)
    try:
        first = read(path)
        assert (first["step"], first["phase"], first["rank"]) == (0, "start", 3)
        assert (first["host"], first["pid"]) == (socket.gethostname(), os.getpid())
        assert {"pid": child.pid, "name": "sleep"} in first["children"]
        activity.enter("rollout", 5)
        heartbeat.beat()
        wait_for(lambda: read(path)["phase"] == "rollout")
        second = read(path)
        times = [datetime.fromisoformat(second[name]) for name in ("phase_started", "time")]
        assert second["step"] == 5 and times[0] <= times[1] <= datetime.now(UTC)
        assert times[0] > datetime.now(UTC) - timedelta(seconds=60)
    finally:
        child.kill()
        child.wait()
        heartbeat.close()
    assert read(path)["phase"] == "ended"
    assert list(tmp_path.iterdir()) == [path]


def test_a_heartbeat_goes_on_while_a_phase_lasts(tmp_path):
    path = tmp_path / "heartbeat.json"
    heartbeat = Heartbeat(path, Activity(), rank=0, interval_s=0.02)
    first = read(path)["time"]
    wait_for(lambda: read(path)["time"] != first)
    heartbeat.close()


def test_a_heartbeat_that_cannot_be_written_for_a_minute_is_one_warning(tmp_path, caplog, monkeypatch):
    """A full disk ends the run before that, with a sentence about another file."""
    path = tmp_path / "heartbeat.json"
    heartbeat, now = Heartbeat(path, Activity(), rank=0), time.monotonic()
    before = path.read_text()
    with a_full_disk(10), monkeypatch.context() as patch:
        for seconds in (0, 50, 70, 80):
            patch.setattr(time, "monotonic", lambda seconds=seconds: now + seconds)
            heartbeat._write("sync")
            assert len(caplog.records) == (seconds > 60)
    assert path.read_text() == before
    assert caplog.records[0].message.startswith(f"{path} cannot be written (File too large)")
    heartbeat.close()
    assert read(path)["phase"] == "ended"


def test_time_left_is_the_rest_of_the_phase_before_the_scores_and_of_the_step_after_them(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    activity = Activity()
    assert activity.seconds_left() == 0
    for step in (1, 2):  # 20 s of rollout, 10 s of score, 30 s of updates
        for phase, seconds in (("rollout", 20), ("score", 10), ("update_actor", 30)):
            activity.enter(phase, step)
            now += seconds
    activity.enter("rollout", 3)
    now += 5
    assert activity.seconds_left() == 15
    now += 100
    assert activity.seconds_left() == 0
    activity.enter("score", 4)
    now += 10
    assert activity.seconds_left() == 105 - 10  # step 3 took 105 s


def test_the_log_file_has_phases_steps_and_warnings_with_their_times(tmp_path):
    config = Config(run=RunConfig(name="r", dir=str(tmp_path)), models=ModelsConfig(actor="a"))
    config.run_dir.mkdir()
    status = Status(config, ALONE, Activity())
    status.show_phase("rollout", 1)
    status.show_step(1, {"reward": 0.5, "time/step": 2.0})
    logging.getLogger("hybrid_rl.rewards").warning("a score failed: %s", "\x1b[31mred\x07\u202e")
    status.close(None)
    logging.getLogger("hybrid_rl.rewards").warning("after the end")
    path = config.run_dir / "log.txt"
    lines = path.read_text().splitlines()
    texts = [line.split(" ", 1)[1] for line in lines]
    assert texts == [
        "INFO step 1: rollout",
        "INFO step 1: reward 0.5",
        "WARNING a score failed: \\u001b[31mred\\u0007\\u202e",
        "INFO the run ends",
    ]
    assert all(datetime.fromisoformat(line.split(" ", 1)[0]).tzinfo for line in lines)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_log_file_has_the_trace_of_an_unforeseen_error_alone(tmp_path):
    def log_of(error: Exception) -> str:
        log = LogFile(tmp_path / f"{type(error).__name__}.txt")
        try:
            raise error
        except Exception as caught:
            log.end(caught)
        return Path(log.baseFilename).read_text()

    assert log_of(PreemptedError("a checkpoint is complete")).endswith(
        "ERROR the run ends: PreemptedError: a checkpoint is complete\n"
    )
    text = log_of(ZeroDivisionError("by zero"))
    assert "ERROR the run ends: ZeroDivisionError: by zero\nTraceback" in text and "in log_of" in text


def test_a_library_that_configures_logging_does_not_end_the_log_file(tmp_path):
    import logging.config

    log = LogFile(tmp_path / "log.txt")
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # closes all handlers, as vLLM does
    logging.getLogger("hybrid_rl").info("after it")
    log.end(None)
    assert "INFO after it" in (tmp_path / "log.txt").read_text()


def test_the_log_file_rotates_by_size_and_old_files_are_deleted(tmp_path):
    log = LogFile(tmp_path / "log.txt", max_bytes=200)
    for number in range(100):
        logging.getLogger("hybrid_rl").info("line %d %s", number, "x" * 50)
    log.end(None)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log.txt", *(f"log.txt.{number}" for number in range(1, NUM_OLD + 1))]
    assert all(file.stat().st_size <= 200 and stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_a_log_file_that_cannot_be_written_says_so_once_and_a_full_disk_does_not(tmp_path, capsys):
    log = LogFile(tmp_path / "log.txt")
    with a_full_disk(0):
        logging.getLogger("hybrid_rl").info("a line")
    assert capsys.readouterr().err == ""
    log.close()
    (tmp_path / "log.txt").unlink()
    (tmp_path / "log.txt").mkdir()
    for _ in range(3):
        logging.getLogger("hybrid_rl").info("a line")
    log.end(None)
    assert capsys.readouterr().err.count("log.txt cannot be written: [Errno 21] Is a directory") == 1


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def samples(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_prometheus_reads_step_phase_and_the_metrics_of_the_last_step():
    port = free_port()
    server = MetricsServer(port)
    try:
        server.show_phase("rollout", 2)
        server.show_step(1, {"reward": 0.25, "actor/grad_norm": 3.0, "accuracy": 0.5})
        server.show_phase("score", 2)
        server.show_step(2, {"reward": 0.75, "actor/grad_norm": 2.0})
        assert samples(port) == {
            'hybrid_rl_phase{phase="score"}': 1.0,
            "hybrid_rl_current_step": 2.0,
            "hybrid_rl_step": 2.0,
            "hybrid_rl_reward": 0.75,
            "hybrid_rl_actor_grad_norm": 2.0,
            "hybrid_rl_accuracy": 0.5,
        }
        listening = [
            c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port
        ]
        assert [address.ip for address in listening] == ["127.0.0.1"]
        with pytest.raises(ConfigError, match=rf"run.prometheus_port = {port}: .* \(Address already in use\); give a"):
            MetricsServer(port)
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        samples(port)
