"""A run with all trackers at once, whose processes end with it."""

import importlib.util
import json
import os
from dataclasses import replace

import psutil
import pytest

from hybrid_rl.monitoring.trackers import start
from hybrid_rl.monitoring.trackers.ledger import ledger_path, read_ledger

LIBRARIES = ("wandb", "trackio", "mlflow")


@pytest.mark.slow
def test_all_trackers_follow_a_run_that_continues(make_config, train_here, tmp_path, monkeypatch, caplog):
    missing = [library for library in LIBRARIES if importlib.util.find_spec(library) is None]
    if missing:
        pytest.skip(f"hybrid_rl[trackers] is not installed: {missing}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setattr(start, "FINISH_S", 300.0)
    monkeypatch.chdir(tmp_path)
    config = make_config(tmp_path, checkpoint={"every_steps": 1, "export": False})
    config = replace(config, run=replace(config.run, trackers=["tensorboard", *LIBRARIES]))
    for num_steps in (2, 3):
        train_here(replace(config, run=replace(config.run, num_steps=num_steps)))
        run_id = json.loads((config.run_dir / "run.json").read_text())["id"]
        for library in LIBRARIES:
            ledger = read_ledger(ledger_path(config.run_dir, library), run_id)
            assert (ledger.last_step, ledger.summarized_step, ledger.error) == (num_steps, num_steps, None)
    assert not [record for record in caplog.records if "run.trackers" in record.message]
    alive = [p for p in psutil.process_iter(["cmdline", "ppid"]) if p.info["ppid"] == os.getpid()]
    assert not [p for p in alive if "hybrid_rl.monitoring" in " ".join(p.info["cmdline"] or ())]
    histograms = [
        json.loads(line) for line in (config.run_dir / "trackers" / "histograms.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in histograms] == [1, 2, 3]
