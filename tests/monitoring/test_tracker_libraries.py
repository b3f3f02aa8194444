"""The libraries of trackers, each with what it wrote read back by the library: a run in two parts, offline."""

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import Config
from hybrid_rl.monitoring.trackers import start
from hybrid_rl.monitoring.trackers.content import due_samples
from hybrid_rl.monitoring.trackers.follow import tracked_run
from tests.monitoring.test_trackers import RUN_ID, config, with_trackers, write_steps  # noqa: F401

SECRETS = ("k" * 40, "reward-token-of-the-environment")


@dataclass
class Read:
    """What a tracker has of a run."""

    name: str
    project: str
    steps: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    """Step -> rows of metrics, one for each time that the step was written."""
    settings: dict[str, Any] = field(default_factory=dict)
    samples: list[list[Any]] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    """Of the first step: name -> counts and edges."""
    num_runs: int = 1


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run, a log of blocks of 32 KiB with records in pieces."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, joined = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        joined += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            yield Record.FromString(joined)
            joined = b""


def values_of(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def read_wandb(run: Config, tmp_path: Path) -> Read:
    paths = sorted(run.run_dir.glob("wandb/offline-run-*/*.wandb"))
    records = [record for path in paths for record in wandb_records(path)]
    runs = [record.run for record in records if record.HasField("run")]
    read = Read(runs[0].display_name, runs[0].project, num_runs=len({run.run_id for run in runs}))
    assert runs[0].run_id == RUN_ID
    for record in records:
        if record.HasField("history"):
            row = values_of(record.history.item)
            read.steps.setdefault(int(row["_step"]), []).append(row)
            for name in {key.split("/values")[0] for key in row if key.endswith("/values")}:
                read.histograms.setdefault(name, (row[f"{name}/values"], row[f"{name}/bins"]))
        read.settings |= values_of(record.config.update)
        read.summary |= values_of(record.summary.update)
    (table,) = run.run_dir.glob("wandb/offline-run-*/files/media/table/samples_*.json")
    read.samples = json.loads(table.read_text())["data"]
    return read


def read_trackio(run: Config, tmp_path: Path) -> Read:
    program = (
        "import json, sys; from trackio.api import Api; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "runs = list(Api().runs(sys.argv[1])); run = runs[0]\n"
        "print(json.dumps([len(runs), run.name, run.config, S.get_logs(run.project, run.name, run_id=run.id)]))"
    )
    command = [sys.executable, "-c", program, "ours"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    num_runs, name, settings, logs = json.loads(output.splitlines()[-1])
    read = Read(name.removesuffix(f"-{RUN_ID[:8]}"), "ours", settings=settings, num_runs=num_runs)
    for row in logs:
        summary = {key: value for key, value in row.items() if key.startswith("summary/")}
        read.summary |= summary
        if not summary:
            read.steps.setdefault(row["step"], []).append(row)
            for key, value in row.items():
                if isinstance(value, dict) and value["_type"] == "trackio.histogram":
                    read.histograms.setdefault(key, (value["values"], value["bins"]))
        if "samples" in row:
            read.samples = [list(sample.values()) for sample in row["samples"]["_value"]]
    return read


def read_mlflow(run: Config, tmp_path: Path) -> Read:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("ours")
    assert experiment
    found = client.search_runs([experiment.experiment_id])
    tracked = found[0]
    assert tracked.info.status == "FINISHED" and tracked.info.run_name
    read = Read(tracked.info.run_name, experiment.name, settings=dict(tracked.data.params), num_runs=len(found))
    for name in tracked.data.metrics:
        for metric in client.get_metric_history(tracked.info.run_id, name):
            if name.startswith("summary/"):
                read.summary[name] = metric.value
                continue
            rows = read.steps.setdefault(metric.step, [{}])
            row = next((row for row in rows if name not in row), None)
            if row is None:
                rows.append(row := {})
            row[name.replace("pass_4", "pass@4")] = metric.value
    table = client.load_table(experiment.experiment_id, "samples/step_000001.json", [tracked.info.run_id])
    read.samples = table.astype(object).where(table.notna(), None).values.tolist()
    return read


READERS: dict[str, Callable[[Config, Path], Read]] = {
    "wandb": read_wandb,
    "trackio": read_trackio,
    "mlflow": read_mlflow,
}


@pytest.mark.slow
@pytest.mark.parametrize("library", READERS)
def test_a_run_in_two_parts_is_one_run_with_each_step_once(config: Config, library, tmp_path, monkeypatch, caplog):  # noqa: F811
    """The second part does step 2 again, as after a checkpoint of step 1."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"hybrid_rl[{library}] is not installed")
    monkeypatch.chdir(tmp_path)
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": SECRETS[0],
        "WANDB_PROJECT": "other",
        "TRACKIO_DIR": str(tmp_path / "store"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "REWARD_TOKEN": SECRETS[1],
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "FINISH_S", 300.0)
    config = with_trackers(replace(config, run=replace(config.run, project="ours")), library)
    write_steps(config, 1, 2)
    samples = due_samples(config.run_dir, 1, 1, 10)
    write_steps(config, 2, 3)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert not (config.run_dir / "trackers" / f"{library}.json").read_text().count("Error")

    read = READERS[library](config, tmp_path)
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert (read.name, read.project, read.num_runs) == ("r", "ours", 1)
    assert sorted(read.steps) == [1, 2, 3] and all(len(found) == 1 for found in read.steps.values())
    for step in (1, 3):  # step 2 was sent before it was done again
        (found,) = read.steps[step]
        expected = {name: value for name, value in rows[step - 1].items() if name != "step"}
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert read.steps[2][0]["reward/rule"] == 2.0
    assert samples and read.samples and read.samples[0][: len(samples.columns)] == samples.rows[0]
    assert read.summary["summary/before/accuracy"] == 0.25 and read.summary["summary/after/accuracy"] == 0.5
    given = tracked_run(config.run_dir, RUN_ID).settings
    assert {name: str(read.settings[name]) for name in given} == {name: str(value) for name, value in given.items()}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if any(secret.encode() in path.read_bytes() for secret in SECRETS)] == []
