"""history.jsonl has a line for every start of a run, with the settings that differ from the start before."""

import json
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from hybrid_rl.checkpoints.history import add_start, settings_changes
from hybrid_rl.checkpoints.run_folder import RunFolder
from hybrid_rl.checkpoints.start import decide_start
from hybrid_rl.config import Config, ModelsConfig, RunConfig
from hybrid_rl.distributed import World
from hybrid_rl.errors import FileWriteError
from tests.disks import a_full_disk

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def start(config: Config, step: int, **environment: object) -> list[dict]:
    """Start a run and return its history."""
    folder = RunFolder(config, WORLD)
    folder.accept(decide_start(config))
    folder.write_record(step=step, environment=environment)
    folder.close()
    return [json.loads(line) for line in (config.run_dir / "history.jsonl").read_text().splitlines()]


def test_every_start_is_a_line_with_what_has_changed(tiny: Path, tmp_path: Path):
    config = Config(run=RunConfig(name="r", dir=str(tmp_path)), models=ModelsConfig(actor=str(tiny / "policy")))
    (first,) = start(config, 0, torch="2.12", num_ranks=1)
    assert first["changes"] == {} and first["step"] == 0 and first["host"] == socket.gethostname()
    assert (first["torch"], first["num_ranks"]) == ("2.12", 1)
    assert datetime.now(UTC) - datetime.fromisoformat(first["time"]) < timedelta(seconds=60)

    actor = replace(config.update.actor, lr=1e-7, betas=(0.9, 0.99))
    changed = replace(config, update=replace(config.update, actor=actor), run=replace(config.run, num_steps=7))
    lines = start(changed, 3, torch="2.13", num_ranks=2)
    assert lines[0] == first and (lines[1]["step"], lines[1]["torch"], lines[1]["num_ranks"]) == (3, "2.13", 2)
    assert lines[1]["changes"] == {
        "run.num_steps": {"from": 100, "to": 7},
        "update.actor.betas": {"from": [0.9, 0.95], "to": [0.9, 0.99]},
        "update.actor.lr": {"from": 1e-6, "to": 1e-7},
    }
    assert [line["changes"] for line in start(changed, 3)][1:] == [lines[1]["changes"], {}]


def test_changes_name_the_setting_and_both_values():
    old = {"run": {"name": "a", "seed": 0}, "update": {"actor": {"lr": 0.1}}, "gone": 1}
    new = {"run": {"name": "a", "seed": 5}, "update": {"actor": {"lr": 0.1}}, "added": {"x": 2}}
    assert settings_changes(old, new) == {
        "added.x": {"from": None, "to": 2},
        "gone": {"from": 1, "to": None},
        "run.seed": {"from": 0, "to": 5},
    }


def test_half_a_line_of_a_killed_process_does_not_join_the_next_one(tmp_path: Path):
    (tmp_path / "history.jsonl").write_text('{"step": 0}\n{"st')
    add_start(tmp_path, {"step": 4})
    assert (tmp_path / "history.jsonl").read_text() == '{"step": 0}\n{"st\n{"step": 4}\n'


def test_a_full_disk_leaves_the_history_as_it_was(tmp_path: Path):
    add_start(tmp_path, {"step": 0})
    with a_full_disk(15), pytest.raises(FileWriteError, match=r"/history\.jsonl cannot be written \(File too large\)"):
        add_start(tmp_path, {"step": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]
    assert (tmp_path / "history.jsonl").read_text() == '{"step": 0}\n'
