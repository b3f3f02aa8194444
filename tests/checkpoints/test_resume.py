"""Which checkpoint a run continues from, and which phase log it uses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_rl.checkpoints.resume import find_checkpoint, open_phase_log
from hybrid_rl.config import CheckpointConfig, Config, ConfigError, RolloutConfig, RunConfig
from hybrid_rl.distributed import World


def make_config(tmp_path: Path, **run) -> Config:
    return Config(run=RunConfig(name="run", dir=str(tmp_path), **run), checkpoint=CheckpointConfig(phase_log=True))


def test_run_resume_selects_the_checkpoint(tmp_path):
    assert find_checkpoint(make_config(tmp_path)) is None
    folder = tmp_path / "run/checkpoints/step_000004"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"step": 4, "world_size": 8}))
    (tmp_path / "run/latest").write_text(folder.name)
    assert find_checkpoint(make_config(tmp_path)) == folder
    assert find_checkpoint(make_config(tmp_path, resume="must")) == folder
    assert find_checkpoint(make_config(tmp_path, resume="never")) is None
    with pytest.raises(ConfigError, match=r"run\.resume = must: .* has no checkpoint"):
        find_checkpoint(make_config(tmp_path / "other", resume="must"))


def logged(config: Config, world: World, value: int) -> int:
    """Return the result of a phase that would compute this value."""
    log = open_phase_log(config, world, 0)
    assert log is not None
    return log.get_or_compute(1, "rollout", lambda: value)


def test_a_log_is_used_only_with_the_settings_that_wrote_it(tmp_path, world):
    config = make_config(tmp_path)
    assert logged(config, world, 1) == 1
    assert logged(replace(config, run=replace(config.run, resume="auto")), world, 2) == 1
    assert logged(replace(config, rollout=RolloutConfig(temperature=0.5)), world, 3) == 3
    assert logged(replace(config, rollout=RolloutConfig(temperature=0.5)), world, 4) == 3
    assert logged(config, world, 5) == 5
    assert logged(replace(config, run=replace(config.run, resume="never")), world, 6) == 6


def test_a_run_without_a_log_deletes_an_older_one(tmp_path, world):
    config = make_config(tmp_path)
    assert logged(config, world, 1) == 1
    assert open_phase_log(replace(config, checkpoint=CheckpointConfig()), world, 0) is None
    assert logged(config, world, 2) == 2
