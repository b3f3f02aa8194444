"""Models by their name on the hub train from its local cache; what the cache lacks offline is one sentence."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from hybrid_rl.checkpoints.start import decide_start
from hybrid_rl.config import ConfigError

COMMITS = ["a" * 40, "b" * 40]
PARTS = {"weights": "model.safetensors", "tokenizer": "tokenizer", "config": "config.json", "everything": ""}
"""What is not in the cache -> how the names of its files begin."""


@pytest.fixture
def cache(tiny: Path, tmp_path, monkeypatch):
    """Write the tiny models into a cache of the hub, as org/policy and org/reward."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def write(role: str, missing: str = "", commit: str = COMMITS[0]) -> None:
        folder = tmp_path / "hub" / f"models--org--{role}"
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
        for file in (tiny / role).iterdir():
            if not (missing and file.name.startswith(PARTS[missing])):
                shutil.copy(file, snapshot)

    return write


MODELS = {"actor": "org/policy", "reward": "org/reward"}


def test_a_run_of_cached_models_trains_and_continues_with_the_same_commit_only(
    make_config, train_here, cache, tmp_path
):
    for role in ("policy", "reward"):
        cache(role)
    assert len(train_here(make_config(tmp_path, models=MODELS)).metrics) == 2
    config = make_config(tmp_path, models=MODELS, run={"num_steps": 3})
    models = json.loads((config.run_dir / "run.json").read_text())["models"]
    assert {role: model["content"] for role, model in models.items()} == dict.fromkeys(
        ["actor", "critic", "reference", "reward"], f"commit {COMMITS[0]}"
    )
    assert decide_start(config).checkpoint == config.run_dir / "checkpoints" / "step_000002"
    cache("reward", commit=COMMITS[1])
    with pytest.raises(ConfigError) as error:
        decide_start(config)
    assert [message.split(" is ")[0] for message in error.value.messages] == [
        "models.critic = org/reward",
        "models.reward = org/reward",
    ]


NOT_CACHED = "couldn't find them in the cached files"


@pytest.mark.parametrize(
    "role, missing, message",
    [
        ("policy", "everything", f"models.actor = org/policy: no Hugging Face model there (We {NOT_CACHED}"),
        ("policy", "config", f"models.actor = org/policy: no Hugging Face model there (We {NOT_CACHED}"),
        ("policy", "weights", "models.actor = org/policy: cannot be loaded (org/policy does not appear to have a file"),
        ("policy", "tokenizer", "org/policy: no tokenizer there"),
        ("reward", "everything", f"models.reward = org/reward: no Hugging Face model there (We {NOT_CACHED}"),
        ("reward", "weights", "models.reward = org/reward: cannot be loaded (org/reward does not appear to have a fi"),
        ("reward", "tokenizer", "org/reward: no tokenizer there"),
    ],
)
def test_what_the_cache_lacks_offline_is_one_sentence(make_config, cache, tmp_path, refusal, role, missing, message):
    for name in ("policy", "reward"):
        cache(name, missing if name == role else "")
    models = MODELS | {"critic": None}
    config = make_config(tmp_path, models=models, advantage={"estimator": "rloo", "kl_coef": 0.0})
    (sentence,) = refusal(config)
    assert sentence.replace("We couldn't connect to 'https://huggingface.co' to load the files, and", "We").startswith(
        message
    )


@pytest.mark.parametrize("setting", ["path", "eval_path"])
def test_a_data_set_of_the_hub_is_one_sentence(make_config, tmp_path, refusal, setting):
    config = make_config(tmp_path, prompts={setting: "org/rows"})
    (sentence,) = refusal(config)
    assert sentence.startswith(f"prompts.{setting} = org/rows: ")
