"""Trackers follow a run, each step once, and a tracker that fails neither ends nor blocks it."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybrid_rl.batch import make_train_batch
from hybrid_rl.config import Config, ConfigError, ModelsConfig, RewardConfig, RunConfig
from hybrid_rl.distributed import World
from hybrid_rl.monitoring.recorder import Recorder
from hybrid_rl.monitoring.trackers import follow, libraries, process, start
from hybrid_rl.monitoring.trackers.content import Row, due_samples
from hybrid_rl.monitoring.trackers.ledger import read_ledger
from tests.conftest import make_rollout

RUN_ID = "0123456789abcdef0123456789abcdef"
ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    run = RunConfig(name="r", dir=str(tmp_path), num_steps=3, trackers=[], tracked_samples=1)
    reward = RewardConfig(remote_urls=["http://h/score"], remote_headers={"Authorization": "Bearer $REWARD_TOKEN"})
    return Config(run=run, models=ModelsConfig(actor="somewhere"), reward=reward)


def with_trackers(config: Config, *trackers: str) -> Config:
    return replace(config, run=replace(config.run, trackers=list(trackers)))


def write_steps(config: Config, first_step: int, last_step: int, *, world: World = ALONE) -> None:
    """Record steps whose reward/rule is the step; the run ends in the usual way."""
    rollouts = [make_rollout(response_ids=[3]), make_rollout(response_ids=[3] * 3, prompt_id=1)]
    batch = make_train_batch(rollouts).with_fields(rewards=torch.tensor([1.0, 0.0]))
    with Recorder(config, world, ALONE) as recorder:
        recorder.open(first_step, run_id=RUN_ID)
        for step in range(first_step, last_step + 1):
            recorder.step(step, rollouts, batch, {"reward/rule": 2.0 * step}, {"pass@4": 0.25})
        recorder.summary({"accuracy": 0.25}, {"accuracy": 0.5})


def needs(library: str) -> None:
    """Skip a test whose library is not installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"hybrid_rl[{library}] is not installed")


class Kept:
    """A tracker in memory, which refuses some steps a number of times."""

    def __init__(self, refusals: Mapping[int, int]) -> None:
        self.rows: list[Row] = []
        self.summaries: list[tuple[int, Mapping[str, float]]] = []
        self.ends: list[bool] = []
        self._refusals = dict(refusals)

    def write(self, row: Row) -> None:
        if self._refusals.get(row.step):
            self._refusals[row.step] -= 1
            raise ConnectionError("https://me:secret@host does not answer")
        self.rows.append(row)

    def summarize(self, step: int, values: Mapping[str, float]) -> None:
        self.summaries.append((step, values))

    def finish(self, *, is_done: bool) -> None:
        self.ends.append(is_done)


def follow_to_the_end(config: Config, kept: Kept, *words: bytes | None) -> tuple[int, list[str | None]]:
    """Follow until the last word of the trainer; return the exit code and the error of the ledger at every word."""
    left, errors = list(words), []

    def next_word(seconds: float) -> bytes | None:
        errors.append(read_ledger(config.run_dir / "trackers" / "kept.json", RUN_ID).error)
        return left.pop(0)

    (config.run_dir / "trackers").mkdir(exist_ok=True)
    run = follow.tracked_run(config.run_dir, RUN_ID)
    return follow.Follower("kept", run, lambda run: kept).follow(next_word), errors


def test_a_tracker_gets_settings_rows_samples_and_summary_once_also_when_the_run_continues(config):
    write_steps(config, 1, 2)
    kept = Kept({})
    assert follow_to_the_end(config, kept, None, follow.DONE) == (0, [None, None])
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [{"step": row.step, **row.metrics} for row in kept.rows] == rows
    assert [row.step for row in kept.rows if row.samples] == [1]
    assert kept.rows[0].samples == due_samples(config.run_dir, 1, 1, 10)
    assert kept.summaries == [(2, {"summary/before/accuracy": 0.25, "summary/after/accuracy": 0.5})]
    write_steps(config, 2, 3)
    assert follow_to_the_end(config, kept, follow.DONE)[0] == 0
    assert [row.step for row in kept.rows] == [1, 2, 3] and kept.ends == [True, True]
    assert [step for step, _ in kept.summaries] == [2, 3]


def test_a_step_that_is_refused_is_sent_again_and_the_reason_is_kept_without_a_password(config):
    write_steps(config, 1, 2)
    kept = Kept({1: 2})
    code, errors = follow_to_the_end(config, kept, None, None, None, follow.DONE)
    assert code == 0 and [row.step for row in kept.rows] == [1, 2]
    reason = "ConnectionError: https://***@host does not answer"
    assert errors == [None, reason, reason, None]


def test_a_run_that_fails_or_is_killed_ends_as_failed_without_a_summary(config):
    write_steps(config, 1, 2)
    kept = Kept({})
    assert follow_to_the_end(config, kept, b"")[0] == 0
    assert kept.ends == [False] and not kept.summaries and [row.step for row in kept.rows] == [1, 2]
    refused = Kept({1: 9})
    (config.run_dir / "trackers" / "kept.json").unlink()
    assert follow_to_the_end(config, refused, b"")[0] == 1


def test_half_a_row_waits_for_its_other_half(tmp_path):
    path, lines = tmp_path / "metrics.jsonl", follow.Lines(tmp_path / "metrics.jsonl")
    assert list(lines.take()) == []
    path.write_text('{"step": 1}\n{"st')
    assert list(lines.take()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert list(lines.take()) == [{"step": 2}]


def test_samples_are_spread_over_a_step_and_due_every_few_steps(tmp_path):
    (tmp_path / "rollouts").mkdir()
    rows = [json.dumps({"prompt": f"p{n}", "answer": ["4"], "reward": n}) for n in range(6)]
    for step in (1, 4):
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text("\n".join(rows) + "\n")
    table = due_samples(tmp_path, 4, 3, 3)
    assert table and list(table.columns) == ["prompt", "answer", "reward"]
    assert table.rows == [["p0", '["4"]', 0], ["p2", '["4"]', 2], ["p4", '["4"]', 4]]
    assert len(due_samples(tmp_path, 1, 99, 3).rows) == 6
    assert [due_samples(tmp_path, step, number, 3) for step, number in ((2, 3), (4, 0), (7, 3))] == [None, None, None]


def test_samples_have_conversations_as_text(tmp_path):
    (tmp_path / "rollouts").mkdir()
    turns = [{"role": "assistant", "text": "5", "num_tokens": 1, "reward": 0.0}]
    row = {"prompt_id": 1, "turns": turns, "counts": {"environment/turns": 1.0}}
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text(json.dumps(row) + "\n")
    table = due_samples(tmp_path, 1, 1, 1)
    assert table.rows == [[1, "[assistant: 1 token, reward 0]\n5", '{"environment/turns": 1.0}']]


def test_tensorboard_has_settings_samples_and_summary(config):
    config = with_trackers(config, "tensorboard")
    write_steps(config, 1, 2)
    read = EventAccumulator(str(config.run_dir / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward/rule")] == [(1, 1.0), (2, 2.0)]
    assert [(event.step, event.value) for event in read.Scalars("summary/after/accuracy")] == [(2, 0.5)]
    texts = {name: event for name in ("settings", "samples") for event in read.Tensors(f"{name}/text_summary")}
    assert b"num_steps: 3" in texts["settings"].tensor_proto.string_val[0]
    assert (
        texts["samples"].step == 1
        and b"| prompt_id | prompt | response |" in texts["samples"].tensor_proto.string_val[0]
    )


def test_a_run_without_tensorboard_writes_no_events_and_other_ranks_track_nothing(config):
    write_steps(config, 1, 1)
    assert not (config.run_dir / "tensorboard").exists() and not (config.run_dir / "trackers").exists()
    write_steps(with_trackers(config, "tensorboard", "wandb"), 1, 1, world=replace(ALONE, rank=1, size=2))
    assert not (config.run_dir / "tensorboard").exists() and not (config.run_dir / "trackers").exists()


def test_a_missing_or_old_library_is_a_sentence_with_the_extra_to_install(monkeypatch):
    monkeypatch.setattr(libraries, "REQUIRED", {"wandb": (("no-such-package", "1"),), "mlflow": (("torch", "99"),)})
    with pytest.raises(ConfigError) as error:
        libraries.check_trackers(["tensorboard", "wandb", "mlflow"])
    assert error.value.messages == (
        "run.trackers: wandb needs the package no-such-package, which is not installed: run `pip install "
        "'hybrid_rl[wandb]'`, or take wandb out of the list",
        f"run.trackers: mlflow needs torch 99 or newer, and {torch.__version__} is installed: run `pip install "
        "'hybrid_rl[mlflow]'`, or take mlflow out of the list",
    )


def test_a_server_that_never_answers_costs_a_warning_and_the_seconds_of_the_end(config, monkeypatch, caplog):
    needs("mlflow")
    threads = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(start, "FINISH_S", 1.0)
        begin = time.monotonic()
        write_steps(with_trackers(config, "mlflow"), 1, 3)
    assert time.monotonic() - begin < 30 and threading.active_count() == threads
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(
        "run.trackers: mlflow has not sent everything within the time that a run waits at its end; the run goes on, "
        "metrics.jsonl has every row, and mlflow has the rows up to step 0"
    )
    assert len((config.run_dir / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_server_that_refuses_is_one_warning_and_its_password_is_in_no_file(config, monkeypatch, caplog):
    needs("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
    for name, value in {"TRACKING_URI": url, "HTTP_REQUEST_MAX_RETRIES": "0"}.items():
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    monkeypatch.setattr(start, "FINISH_S", 300.0)
    write_steps(with_trackers(config, "mlflow"), 1, 3)
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert re.match(r"run\.trackers: mlflow fails \(MlflowException: .*\); the run goes on, metrics\.jsonl ", warning)
    log = (config.run_dir / "trackers" / "mlflow.log").read_text()
    assert "MlflowException" in log and "127.0.0.1" in log
    assert not [path for path in config.run_dir.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]


def test_a_silent_a_failing_and_an_ended_process_are_reported_once_each(config, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "trackers"
    folder.mkdir()
    monkeypatch.setattr(process, "SILENT_S", 0.05)
    tracker = process.TrackerProcess("unknown", tmp_path, RUN_ID)  # ends at once: there is no config.yaml
    tracker.say(b"")
    tracker._process.wait()
    tracker.look(0)
    tracker.look(1)
    tracker.end(0)
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "run.trackers: unknown has ended with exit code 1"
    ]
    assert "config.yaml" in (folder / "unknown.log").read_text()


def test_a_process_that_cannot_be_started_is_a_warning(config, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    write_steps(with_trackers(config, "wandb"), 1, 1)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "run.trackers: the process of wandb cannot be started ([Errno 2] No such file or directory: "
        "'/no/such/python'); the run goes on without it"
    ]


def test_a_process_that_does_not_read_is_killed_with_its_children(tmp_path, monkeypatch):
    (tmp_path / "trackers").mkdir()
    monkeypatch.setattr(process, "FOLLOW", "tests.monitoring.silent_process")
    tracker = process.TrackerProcess("silent", tmp_path, RUN_ID)
    log = tmp_path / "trackers" / "silent.log"
    while not log.read_text().endswith("\n"):
        time.sleep(0.02)
    tracker.say(follow.DONE)
    tracker.end(0.2)
    child = int(log.read_text())
    while Path(f"/proc/{child}").exists() and "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
        time.sleep(0.02)


def test_a_process_outlives_its_trainer_only_to_send_the_last_rows(config):
    needs("trackio")
    config = with_trackers(config, "trackio")
    write_steps(with_trackers(config), 1, 3)
    program = (
        "import os, sys; from pathlib import Path\n"
        "from hybrid_rl.monitoring.trackers.process import TrackerProcess\n"
        "print(TrackerProcess('trackio', Path(sys.argv[1]), sys.argv[2]).process_id, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    (config.run_dir / "trackers").mkdir()
    environment = os.environ | {"TRACKIO_DIR": str(config.run_dir / "store")}
    command = [sys.executable, "-c", program, str(config.run_dir), RUN_ID]
    trainer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert trainer.returncode == -signal.SIGKILL
    follower = int(trainer.stdout)
    while Path(f"/proc/{follower}").exists():
        time.sleep(0.05)
    ledger = read_ledger(config.run_dir / "trackers" / "trackio.json", RUN_ID)
    assert (ledger.last_step, ledger.error) == (3, None)
