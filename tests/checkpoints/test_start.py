"""How a run starts from what lies in its folder: which checkpoint, which settings may differ, and whose files."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.checkpoints.find import checkpoint_name, find_newest
from hybrid_rl.checkpoints.lock import RunLock
from hybrid_rl.checkpoints.resume_rules import MAY_CHANGE, RULES
from hybrid_rl.checkpoints.resume_settings import compare, flatten, plain_settings
from hybrid_rl.checkpoints.run_folder import RunFolder, tidy
from hybrid_rl.checkpoints.saver import write
from hybrid_rl.checkpoints.snapshot import Snapshot
from hybrid_rl.checkpoints.start import Start, decide_start
from hybrid_rl.config import Config, ConfigError, ModelsConfig, RunConfig
from hybrid_rl.distributed import World
from tests.conftest import change
from tests.programs import PATHS

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Config:
    for name in ("policy", "reward"):
        shutil.copytree(tiny / name, tmp_path / name)
    models = ModelsConfig(actor=str(tmp_path / "policy"), reward=str(tmp_path / "reward"))
    return Config(run=RunConfig(name="run", dir=str(tmp_path / "runs")), models=models)


def save(config: Config, *steps: int) -> Path:
    """Write checkpoints of a run with these settings, and return the folder of the last one."""
    folder = RunFolder(config, WORLD)
    start = folder.accept(decide_start(config))
    folder.write_record(step=0, environment={})
    for step in steps:
        parts = {"actor": Snapshot(tensors={"weight": torch.full((64,), float(step))})}
        write(config.run_dir, step, parts, {"run": folder.identity()}, keep_last=9, world=WORLD)
    folder.close()
    assert start.run_id == folder.run_id
    return config.run_dir / "checkpoints" / checkpoint_name(steps[-1])


def refusals(config: Config) -> list[str]:
    with pytest.raises(ConfigError) as error:
        decide_start(config)
    return list(error.value.messages)


# Settings and models


def test_every_setting_has_a_rule_and_every_rule_a_setting() -> None:
    assert set(flatten(plain_settings(Config()))) == set(RULES)


def test_settings_that_do_not_fit_the_checkpoint_are_refused_together(config: Config) -> None:
    save(config, 3)
    changed = change(config, {"models.lora.rank": 4, "reward.normalize": True, "update.actor.lr": 5e-4})
    messages = refusals(changed)
    assert [message.split(" = ")[0] for message in messages] == ["models.lora.rank", "reward.normalize"]
    assert "models.lora.rank = 4, but the checkpoint was written with 0, and " in messages[0]
    assert all("start a new run with another run.name" in message for message in messages)
    assert decide_start(change(config, {"update.actor.lr": 5e-4})).warnings == ()


@pytest.mark.parametrize(
    "before, after",
    [
        ({"models.ema_decay": 0.9}, {"models.ema_decay": None}),
        ({"models.reference_sync_steps": 0}, {"models.reference_sync_steps": 5}),
        ({"advantage.estimator": "grpo"}, {"advantage.estimator": "gae"}),
        ({"ptx.path": None}, {"ptx.path": "texts.jsonl"}),
        ({"reward.normalize": True}, {"reward.normalize": False}),
        ({"models.lora.rank": 4, "models.lora.alpha": 8.0}, {"models.lora.rank": 4, "models.lora.alpha": 16.0}),
        ({"run.seed": 1}, {"run.seed": 2}),
    ],
    ids=lambda changes: ",".join(changes),
)
def test_a_state_that_only_one_side_has_is_refused(before: dict, after: dict) -> None:
    (message,) = compare(plain_settings(change(Config(), before)), change(Config(), after)).refused
    assert message.startswith(list(after)[-1])


@pytest.mark.parametrize(
    "before, after",
    [
        ({"models.ema_decay": 0.9}, {"models.ema_decay": 0.99}),
        ({"advantage.estimator": "grpo"}, {"advantage.estimator": "rloo"}),
    ],
    ids=lambda changes: ",".join(changes),
)
def test_another_value_for_the_same_state_warns(before: dict, after: dict) -> None:
    changes = compare(plain_settings(change(Config(), before)), change(Config(), after))
    assert changes.refused == () and len(changes.warned) == 1


def test_a_setting_without_effect_is_not_mentioned() -> None:
    changes = compare(plain_settings(Config()), change(Config(), {"ptx.coef": 0.2, "models.lora.alpha": 1.0}))
    assert (changes.refused, changes.warned) == ((), ())


def test_a_setting_that_changes_what_is_measured_warns(config: Config) -> None:
    save(config, 3)
    (warning,) = decide_start(change(config, {"rollout.temperature": 0.5})).warnings
    assert "goes on with other settings: rollout.temperature from 1.0 to 0.5 (" in warning


def test_settings_of_the_machine_may_change(config: Config) -> None:
    names = ["run.num_steps", "update.zero_stage", "update.micro_batch_tokens", "memory.swap", "checkpoint.keep_last"]
    assert {RULES[name].kind for name in names} == {MAY_CHANGE}
    changed = change(config, {"run.num_steps": 7, "update.zero_stage": 3, "memory.swap": "off"})
    changes = compare(plain_settings(config), changed)
    assert (changes.refused, changes.warned) == ((), ())


def test_another_model_under_the_same_path_is_refused_and_a_copy_is_not(config: Config, tmp_path: Path) -> None:
    save(config, 3)
    shutil.copytree(tmp_path / "policy", tmp_path / "copy")
    assert decide_start(change(config, {"models.actor": str(tmp_path / "copy")})).checkpoint is not None
    path = tmp_path / "policy" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    messages = refusals(config)
    assert any(
        message.startswith(f"models.actor = {tmp_path / 'policy'} is another model than the run's")
        for message in messages
    )


# Reward files


def test_a_reward_file_that_was_edited_warns_once_and_names_the_function(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text("def f(prompt, response):\n    return 0.0\n")
    names = [f"{file}:f", "exact_match"]
    config = change(config, {"reward.functions": names})
    save(config, 3)
    assert list(json.loads((config.run_dir / "run.json").read_text())["reward_files"]) == names[:1]
    assert decide_start(config).warnings == ()
    file.write_text("def f(prompt, response):\n    return 1.0\n")
    start = decide_start(config)
    (warning,) = start.warnings
    assert warning == (
        f"{config.run_dir} goes on with other settings: the file of {file}:f was edited (rewards may have another "
        "meaning)"
    )
    assert start.checkpoint is not None and start.is_other_evaluation  # the function also judges the evaluation
    save(config, 4)
    assert decide_start(config).warnings == ()


def test_a_reward_file_is_hashed_as_it_is_at_the_start(config: Config, tmp_path: Path) -> None:
    """Checkpoints hold the hash of what the run has imported, also after an edit while it runs."""
    file = tmp_path / "judge.py"
    file.write_text("def f(prompt, response):\n    return 0.0\n")
    config = change(config, {"reward.functions": [f"{file}:f"]})
    folder = RunFolder(config, WORLD)
    folder.accept(decide_start(config))
    before = folder.identity()["reward_files"]
    file.write_text("def f(prompt, response):\n    return 1.0\n")
    assert folder.identity()["reward_files"] == before
    folder.close()


# Checkpoints


def flip(path: Path, place: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x40
    path.write_bytes(content)


def test_one_bit_in_any_file_is_found_and_the_checkpoint_before_is_taken(config: Config) -> None:
    newest = save(config, 2, 5)
    names = sorted(path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file())
    listed = json.loads((newest / "manifest.json").read_text())["files"]
    assert names == sorted([*listed, "manifest.json"]) and len(names) == 3
    for name in names:
        size = (newest / name).stat().st_size
        for place in (0, size // 2, size - 1):
            flip(newest / name, place)
            start = decide_start(config)
            assert start.checkpoint == newest.parent / "step_000002", f"{name}, byte {place}"
            (warning,) = start.warnings
            assert f"step_000005: {name} is damaged" in warning
            flip(newest / name, place)
    assert decide_start(config).checkpoint == newest
    flip(newest / names[0])
    (warning,) = decide_start(config).warnings
    assert "The run goes on from step 2; 3 steps are lost and done again" in warning
    (message,) = refusals(replace(config, run=replace(config.run, resume="must")))
    assert "run.resume = must does not go back to step 2, which loses 3 steps" in message


def test_a_run_without_a_whole_checkpoint_is_refused(config: Config) -> None:
    newest = save(config, 2)
    (newest / "actor" / "part_00000.safetensors").unlink()
    (message,) = refusals(config)
    assert "no checkpoint is whole (step_000002: actor/part_00000.safetensors is missing)" in message


def test_a_file_of_another_checkpoint_is_not_read(config: Config) -> None:
    newest = save(config, 2, 5)
    shutil.copy(newest / "actor" / "part_00000.safetensors", newest / "actor" / "part_00007.safetensors")
    (warning,) = decide_start(config).warnings
    assert "actor/part_00007.safetensors is not one of its files" in warning


@pytest.mark.parametrize("text", ["", "../elsewhere", "step_000002", "nonsense"])
def test_a_pointer_to_something_else_does_not_hide_the_newest_checkpoint(config: Config, text: str) -> None:
    newest = save(config, 2, 5)
    (config.run_dir / "latest").write_text(text)
    found, (warning,) = find_newest(config.run_dir, may_lose_steps=True)
    assert found == newest and "step_000005 is whole and the newest" in warning
    tidy(config.run_dir, decide_start(config))
    assert (config.run_dir / "latest").read_text() == "step_000005"


def test_a_checkpoint_that_was_about_to_be_replaced_gets_its_name_back(config: Config) -> None:
    newest = save(config, 2, 5)
    newest.rename(newest.with_name(".replaced-step_000005"))
    shutil.copytree(newest.parent / "step_000002", newest)  # a copy that lies about its step
    start = decide_start(config)
    assert start.checkpoint == newest.with_name(".replaced-step_000005")
    assert "step_000005: holds step 2, so its folder was renamed" in start.warnings[0]
    assert tidy(config.run_dir, start).checkpoint == newest
    assert json.loads((newest / "state.json").read_text())["step"] == 5


# Other runs


def test_never_moves_an_earlier_run_aside(config: Config, tmp_path: Path) -> None:
    save(config, 2, 5)
    (config.run_dir / "best").mkdir()
    new = replace(config, run=replace(config.run, resume="never"))
    folder = RunFolder(new, WORLD)
    folder.accept(decide_start(new))
    folder.close()
    assert {path.name for path in config.run_dir.iterdir()} == {"lock"}
    (aside,) = [path for path in config.run_dir.parent.iterdir() if path != config.run_dir]
    assert (aside / "checkpoints" / "step_000005").is_dir() and (aside / "best").is_dir()
    assert decide_start(config).checkpoint is None


def record(config: Config, start: Start) -> str:
    """Let a run start and end before its first checkpoint, after a row of metrics; return its id."""
    folder = RunFolder(config, WORLD)
    folder.accept(start)
    folder.write_record(step=0, environment={})
    (config.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    folder.close()
    return folder.run_id


def test_a_run_that_ended_before_its_first_checkpoint_starts_again_as_the_same_run(config: Config) -> None:
    run_id = record(config, decide_start(config))
    again = decide_start(config)
    assert (again.run_id, again.checkpoint, again.is_moved_aside) == (run_id, None, False)


def test_without_a_checkpoint_a_run_with_other_settings_is_another_run(config: Config) -> None:
    run_id = record(config, decide_start(config))
    other = decide_start(change(config, {"advantage.gamma": 0.5}))
    assert other.run_id != run_id and other.is_moved_aside
    (config.run_dir / "run.json").write_text('{"id": "half')
    assert decide_start(config).is_moved_aside


def test_without_a_checkpoint_a_finished_run_is_moved_aside(config: Config) -> None:
    record(config, decide_start(config))
    (config.run_dir / "summary.json").write_text("{}")
    assert decide_start(config).is_moved_aside


def test_checkpoints_of_two_runs_in_one_folder_are_refused(config: Config) -> None:
    newest = save(config, 2, 5)
    state = json.loads((newest / "state.json").read_text())
    state["run"]["id"] = "0123456789"
    other = {"actor": Snapshot(tensors={"weight": torch.zeros(1)})}
    write(config.run_dir, 9, other, {"run": state["run"]}, keep_last=9, world=WORLD)
    (message,) = refusals(config)
    assert "holds files of several runs" in message and "step_000009 of run 01234567" in message


def test_the_best_actor_of_another_run_is_moved_aside(config: Config) -> None:
    save(config, 2)
    best = config.run_dir / "best"
    best.mkdir()
    (best / "model.safetensors").write_text("weights")
    notes: dict[str, Any] = {"step": 1, "accuracy": 0.9, "run_id": "other"}
    (best / "best.json").write_text(json.dumps(notes))
    tidy(config.run_dir, decide_start(config))
    assert not best.exists()


# The lock


HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from hybrid_rl.checkpoints.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
forked = os.fork()
if forked:
    print(started, forked, flush=True)
time.sleep(60)
"""


def test_a_second_run_is_refused_with_pid_and_host_until_the_first_dies(tmp_path: Path) -> None:
    """Processes that the first one started and forked survive it, and do not hold the lock."""
    environment = {**os.environ, **PATHS}
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert first.stdout is not None
    children = [int(pid) for pid in first.stdout.readline().split()]
    try:
        with pytest.raises(
            ConfigError, match=rf"another run uses this folder, process {first.pid} on {os.uname().nodename}"
        ):
            RunLock(tmp_path, patience_s=0.2)
        first.kill()
        first.wait()
        lock = RunLock(tmp_path)
        for child in children:
            os.kill(child, 0)
        lock.unlock()
    finally:
        first.kill()
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_one_run_after_the_other_takes_the_lock(tmp_path: Path) -> None:
    for _ in range(2):
        RunLock(tmp_path, patience_s=0.2).unlock()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir, run\.name = .*: cannot be written"):
        RunLock(tmp_path / "file" / "run")
