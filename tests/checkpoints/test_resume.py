"""Which checkpoint a run continues from, and which phase log it uses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_rl.checkpoints.find import checkpoint_name
from hybrid_rl.checkpoints.resume import open_phase_log
from hybrid_rl.checkpoints.saver import write
from hybrid_rl.checkpoints.snapshot import Snapshot
from hybrid_rl.checkpoints.start import decide_start
from hybrid_rl.config import CheckpointConfig, Config, ConfigError, RolloutConfig, RunConfig
from hybrid_rl.distributed import World

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def make_config(tmp_path: Path, **run) -> Config:
    return Config(run=RunConfig(name="run", dir=str(tmp_path), **run), checkpoint=CheckpointConfig(phase_log=True))


def write_checkpoint(config: Config, step: int, **state) -> Path:
    """Write a checkpoint with one small part."""
    part = Snapshot(tensors={"weight": torch.full((4,), float(step))})
    write(config.run_dir, step, {"actor": part}, state, keep_last=9, world=WORLD)
    return config.run_dir / "checkpoints" / checkpoint_name(step)


def test_run_resume_selects_the_checkpoint(tmp_path):
    assert decide_start(make_config(tmp_path)).checkpoint is None
    folder = write_checkpoint(make_config(tmp_path), 4)
    assert decide_start(make_config(tmp_path)).checkpoint == folder
    assert decide_start(make_config(tmp_path, resume="must")).checkpoint == folder
    start = decide_start(make_config(tmp_path, resume="never"))
    assert start.checkpoint is None and start.is_moved_aside
    with pytest.raises(ConfigError, match=r"run\.resume = must: .* has no checkpoint"):
        decide_start(make_config(tmp_path / "other", resume="must"))


def logged(config: Config, world: World, value: int, run_id: str = "a") -> int:
    """Return the result of a phase that would compute this value."""
    log = open_phase_log(config, world, 0, run_id=run_id)
    assert log is not None
    return log.get_or_compute(1, "rollout", lambda: value)


def test_a_log_is_used_only_with_the_settings_that_wrote_it(tmp_path, world):
    config = make_config(tmp_path)
    assert logged(config, world, 1) == 1
    assert logged(replace(config, run=replace(config.run, resume="auto")), world, 2) == 1
    assert logged(replace(config, rollout=RolloutConfig(temperature=0.5)), world, 3) == 3
    assert logged(replace(config, rollout=RolloutConfig(temperature=0.5)), world, 4) == 3
    assert logged(config, world, 5) == 5
    assert logged(config, world, 6, run_id="b") == 6


def test_a_run_without_a_log_deletes_an_older_one(tmp_path, world):
    config = make_config(tmp_path)
    assert logged(config, world, 1) == 1
    assert open_phase_log(replace(config, checkpoint=CheckpointConfig()), world, 0, run_id="a") is None
    assert logged(config, world, 2) == 2
