"""A start that is refused changes nothing in the run's folder, and a damaged checkpoint is not continued from."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import pytest

from hybrid_rl.checkpoints.lock import LOCK_FILE
from hybrid_rl.checkpoints.start import decide_start
from hybrid_rl.config import Config


@pytest.fixture(scope="module")
def run(make_config, train_here, tmp_path_factory) -> Config:
    """A finished run of two steps and checkpoints, with every part that a checkpoint can have."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "texts.jsonl").write_text('{"text": "1+2=3"}\n{"text": "4+4=8"}\n')
    (folder / "judge.py").write_text("def f(prompt, response):\n    return 0.5\n")
    config = make_config(
        folder,
        models={"reference_sync_steps": 1, "ema_decay": 0.9},
        reward={"functions": [f"{folder / 'judge.py'}:f"], "normalize": True},
        advantage={"kl_target": 0.01},
        ptx={"path": str(folder / "texts.jsonl"), "batch_size": 3, "max_tokens": 16},
        checkpoint={"every_steps": 1, "export": True, "keep_best": True, "phase_log": True},
    )
    train_here(config)
    return config


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes and the time of change of every file; the lock holds the process that used it last."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE]
    return {path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


BY_THE_CHECKPOINT = {
    "--run.seed=7": "run.seed = 7, but the checkpoint was written with 0",
    "--models.lora.rank=4": "models.lora.rank = 4, but the checkpoint was written with 0",
    "--reward.normalize=false": "reward.normalize = false, but the checkpoint was written with true",
}
IN_FILES = {
    "--rollout.temperature=-1": "rollout.temperature = -1",
    "--update.sequence_parallel_size=2": "update.sequence_parallel_size = 2",
    "--models.reward=/absent/model": "models.reward = /absent/model: no Hugging Face model there",
    "--prompts.path=absent.jsonl": "prompts.path = absent.jsonl: no such file or folder",
    "--prompts.template_path=absent.json": "prompts.template_path = absent.json: there is no such file",
    '--reward.functions=["absent.py:f"]': "reward.functions: 'absent.py:f': there is no file",
}


@pytest.mark.parametrize(
    "refused",
    [
        {"--update.bogus=1": "update.bogus"},
        IN_FILES,
        BY_THE_CHECKPOINT,
        {"--models.reference=REWARD": "models.reference = "},
        {"--prompts.path=HELDOUT": "the data set is not the checkpoint's"},
    ],
    ids=["unknown setting", "mistakes in files", "by the checkpoint", "another model", "another data set"],
)
def test_a_refused_start_leaves_every_file_of_the_run_as_it_was(run, refusal, tiny, refused):
    before = contents(run.run_dir)
    assert {"config.yaml", "run.json", "metrics.jsonl", "latest", "summary.json"} <= before.keys()
    paths = {"REWARD": str(tiny / "reward"), "HELDOUT": str(tiny / "heldout.jsonl")}
    arguments = [functools.reduce(lambda text, name: text.replace(name, paths[name]), paths, text) for text in refused]
    found = refusal(run, "--run.num_steps=3", *arguments)
    for sentence in refused.values():
        assert any(sentence in message for message in found), found
    assert contents(run.run_dir) == before


def test_one_flipped_bit_in_any_file_of_a_checkpoint_is_named_and_the_one_before_is_taken(run, tmp_path):
    shutil.copytree(run.run_dir, tmp_path / "run")
    config = dataclasses.replace(run, run=dataclasses.replace(run.run, dir=str(tmp_path)))
    newest = tmp_path / "run" / "checkpoints" / "step_000002"
    names = [*json.loads((newest / "manifest.json").read_text())["files"], "manifest.json"]
    assert {name.split("/")[0] for name in names} == {
        *("actor", "critic", "ema", "reference", "random_state", "state.json", "manifest.json")
    }
    for number, name in enumerate(names):
        whole = (newest / name).read_bytes()
        damaged = bytearray(whole)
        damaged[(len(whole) * (number + 1)) // (len(names) + 1)] ^= 1 << number % 7
        (newest / name).write_bytes(damaged)
        start = decide_start(config)
        assert start.checkpoint == newest.with_name("step_000001"), name
        assert f"step_000002: {name} is damaged" in start.warnings[0]
        (newest / name).write_bytes(whole)
    assert decide_start(config).checkpoint == newest
