"""What `colocated.py check` finds, and that a run finds the same."""

import json
from pathlib import Path

import pytest
import torch

from hybrid_rl.checkpoints.lock import RunLock
from hybrid_rl.config import Config, ConfigError
from hybrid_rl.monitoring.trackers import libraries
from hybrid_rl.planning.plan import GIB, Machine
from launch.check import check_run_elsewhere, check_run_here, num_ranks_here, start_checked
from tests.conftest import VALID_CONFIG, change


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Config:
    return change(
        VALID_CONFIG,
        {
            "run.dir": str(tmp_path / "runs"),
            "run.name": "run",
            "models.actor": str(tiny / "policy"),
            "models.reward": str(tiny / "reward"),
            "prompts.path": str(tiny / "prompts.jsonl"),
            "prompts.eval_path": str(tiny / "heldout.jsonl"),
            "prompts.max_prompt_tokens": 8,
            "rollout.engine": "hf",
            "rollout.rollout_batch_size": 4,
            "rollout.max_response_tokens": 12,
            "update.mini_batch_size": 4,
        },
    )


def findings(config: Config, num_processes: int | None = None) -> tuple[str, ...]:
    """Return what a check finds; a start must find the same."""
    with pytest.raises(ConfigError) as error:
        check_run_here(config, num_processes)
    with pytest.raises(ConfigError) as of_start:
        start_checked(config, num_processes)
    assert of_start.value.messages == error.value.messages
    return error.value.messages


def test_a_run_without_mistakes_is_described_and_nothing_is_written(config):
    num_rows = len(Path(config.prompts.path).read_text().splitlines())
    lines = check_run_here(config, None)
    assert lines[:2] == ["settings, models, data and machine: no mistakes", "ranks: 1, with a CPU each; nodes: 1"]
    assert lines[2].startswith(f"prompts: {num_rows} for training")
    assert "actor: LlamaForCausalLM in float32, attention sdpa, no fused layers" in lines
    assert lines[-1] == "start: step 1"
    assert not Path(config.run.dir).exists()


def test_mistakes_of_settings_environment_machine_and_data_are_found_together(config, monkeypatch, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1="}\n')
    wrong = {"update.actor.lr": -1.0, "models.reward": str(tmp_path / "no"), "prompts.path": str(rows)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    found = findings(change(config, wrong), None)
    for words in ("update.actor.lr = -1.0", "CUDA_VISIBLE_DEVICES = 0,0", "cudaMallocAsync", "TMPDIR = "):
        assert sum(words in message for message in found) == 1, (words, found)
    assert any("models.reward" in message for message in found)
    assert any("prompts.path: row 0" in message or "rows.jsonl" in message for message in found)
    assert not Path(config.run.dir).exists()


def test_a_folder_that_another_run_uses_is_found(config):
    lock = RunLock(config.run_dir)
    before = sorted(config.run_dir.iterdir())
    holder = json.loads((config.run_dir / "lock").read_text())["pid"]
    try:
        with pytest.raises(ConfigError, match=rf"another run uses this folder, process {holder} on "):
            check_run_here(config, None)
    finally:
        lock.unlock()
    assert sorted(config.run_dir.iterdir()) == before
    check_run_here(config, None)


def test_groups_of_ranks_must_divide_the_processes(config):
    parallel = change(config, {"update.sequence_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"update.sequence_parallel_size = 2: must divide the number of ranks, 3"):
        check_run_here(parallel, 3)
    assert check_run_here(parallel, 4)[1] == "ranks: 4, with a CPU each; nodes: 1"


def test_more_processes_than_gpus_are_refused_and_any_number_on_a_cpu(monkeypatch):
    assert (num_ranks_here(None), num_ranks_here(3)) == (1, 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (num_ranks_here(None), num_ranks_here(1)) == (2, 1)
    with pytest.raises(ConfigError, match=r"^--num_processes 3: only 2 GPUs are visible"):
        num_ranks_here(3)


def test_a_run_on_another_machine_is_planned_for_its_gpus(config, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")  # of this machine
    lines = check_run_elsewhere(config, Machine(gpu_memory_bytes=80 * GIB, num_gpus=4, num_nodes=2))
    assert lines[:2] == ["settings, models and data: no mistakes", "ranks: 8, with a GPU each; nodes: 2"]
    with pytest.raises(ConfigError, match=r"phase .* needs .* bytes"):
        check_run_elsewhere(config, Machine(gpu_memory_bytes=1 << 20))


def test_a_tracker_without_its_library_is_found(config, monkeypatch):
    monkeypatch.setattr(libraries, "REQUIRED", {"wandb": (("no-such-package", "1"),)})
    with pytest.raises(ConfigError) as error:
        check_run_here(change(config, {"run.trackers": ["tensorboard", "wandb"]}), None)
    assert error.value.messages == (
        "run.trackers: wandb needs the package no-such-package, which is not installed: run `pip install "
        "'hybrid_rl[wandb]'`, or take wandb out of the list",
    )
    with pytest.raises(ConfigError, match=r"run\.trackers"):
        check_run_here(change(config, {"run.trackers": ["neptune"]}), None)
