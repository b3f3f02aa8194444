"""A model and a tokenizer with Python code in their folder, and arguments that are passed on, in real runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl import trained_models
from hybrid_rl.config import ConfigError
from hybrid_rl.engines.start import start_engine

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def edit_json(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture
def own(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose config, model and tokenizer are classes of its own file; vLLM has the architecture."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))  # for the processes of the engine
    folder = tmp_path / "own_model"
    shutil.copytree(tiny / "policy", folder)
    (folder / "own.py").write_text(CODE)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    edit_json(folder / "config.json", model_type="own", auto_map=classes)
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    edit_json(folder / "tokenizer_config.json", **tokenizer)
    return folder


@pytest.fixture
def make_own(make_config, own: Path, tmp_path: Path):
    """Return the settings of a run of that model; keywords replace fields of a section."""

    def make(*, models: dict[str, Any], **sections: dict[str, Any]) -> Any:
        return make_config(
            tmp_path,
            run={"num_steps": 1, "eval_every_steps": 0},
            models={"actor": str(own), "reward": None, **models},
            advantage={"estimator": "grpo", "kl_coef": 0.1},
            checkpoint={"every_steps": 1, "export": True},
            **sections,
        )

    return make


def test_without_the_setting_the_code_is_refused_before_anything_loads(make_own, train_here, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    with pytest.raises(ConfigError, match=r"own_model: the model needs Python code .* models.trust_remote_code: true"):
        train_here(make_own(models={}))


def test_with_the_setting_the_model_trains_and_its_export_holds_the_code(make_own, train_here, capsys):
    config = make_own(models={"trust_remote_code": True})
    train_here(config)
    assert f"runs (models.trust_remote_code): {config.models.actor}" in capsys.readouterr().out
    exported = config.run_dir / "export"
    assert "class OwnForCausalLM" in (exported / "own.py").read_text()
    assert json.loads((exported / "config.json").read_text())["auto_map"]["AutoConfig"] == "own.OwnConfig"


@pytest.mark.slow
def test_vllm_runs_the_code_and_takes_the_arguments_that_are_passed_on(make_own, train_here, monkeypatch):
    found: dict[str, Any] = {}

    def start(*arguments: Any, **named: Any) -> Any:
        engine = start_engine(*arguments, **named)
        vllm_config = engine.llm.llm_engine.vllm_config
        found.update(
            config_class=type(vllm_config.model_config.hf_config).__name__,
            batch=vllm_config.scheduler_config.max_num_batched_tokens,
        )
        return engine

    monkeypatch.setattr(trained_models, "start_engine", start)
    passed_on = {"engine": "vllm", "vllm": {"max_num_batched_tokens": 333}, "stop_strings": ["<eos>"]}
    config = make_own(models={"trust_remote_code": True}, rollout=passed_on)
    train_here(config)
    assert found == {"config_class": "OwnConfig", "batch": 333}
    (line,) = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["rollout/logprob_gap"] < 1e-4
