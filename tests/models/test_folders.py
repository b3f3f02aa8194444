"""Folders that cannot be used are refused in one sentence, and no code of theirs runs."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from hybrid_rl.config import Config, ConfigError, ModelsConfig
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.models.folders import load_config
from hybrid_rl.models.lengths import max_tokens
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.models.weight_match import check_weights
from hybrid_rl.planning.shapes import read_shapes


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny / "policy", tmp_path / "policy")
    return tmp_path / "policy"


def edit_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize(
    "quantization, method",
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_a_quantized_model_is_refused_also_by_the_plan(folder: Path, quantization: Any, method: str) -> None:
    edit_config(folder, quantization_config=quantization)
    for read in (lambda: load_config(str(folder), field="models.actor"), lambda: read_shapes(plan_config(folder))):
        with pytest.raises(ConfigError, match=rf"models\.actor = {folder}: the model is quantized \({method};"):
            read()


def plan_config(folder: Path) -> Config:
    return Config(models=ModelsConfig(actor=str(folder)))


def test_code_of_a_folder_never_runs_and_nobody_is_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("asked on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass A: pass\nclass B: pass\n")
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.A", "AutoModelForCausalLM": "own.B"})
    with pytest.raises(ConfigError, match=r"models\.actor = .*: the model needs Python code .*: true to run it"):
        load_config(str(folder), field="models.actor")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.A", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"tokenizer needs Python code .*, then set models.trust_remote_code: true"):
        load_tokenizer(str(folder))
    assert not ran.exists()


def test_code_of_a_folder_never_runs_where_transformers_has_the_class(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass A: pass\n")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(f"open({str(ran)!r}, 'w')\ndef generate(model): pass\n")
    edit_config(folder, auto_map={"AutoConfig": "own.A", "AutoModelForCausalLM": "own.A"})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"auto_map": {"AutoTokenizer": ["own.A", None]}})
    )
    path, models, device = str(folder), ModelsConfig(actor=str(folder), dtype="float32"), torch.device("cpu")
    read_shapes(plan_config(folder))
    check_weights(path, field="models.actor", is_policy=True)
    load_tokenizer(path)
    load_actor(path, models, device, field="models.actor")
    HuggingFaceEngine(path, dtype=torch.float32, device=device)
    assert not ran.exists()


def test_an_adapter_is_not_a_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds an adapter \(adapter_config\.json\); merge it into its base model"):
        load_config(str(folder), field="models.actor")


NO_JSON_OBJECT = ["", "[1]", "{", "\udcff".encode(errors="surrogateescape")]
UNKNOWN_TYPE = '{"model_type": "nothing"}'


@pytest.mark.parametrize(
    "name, content",
    [
        *itertools.product(["config.json", "tokenizer.json", "tokenizer_config.json"], NO_JSON_OBJECT),
        ("config.json", UNKNOWN_TYPE),
        ("tokenizer.json", UNKNOWN_TYPE),
    ],
)
def test_a_damaged_file_is_one_sentence(folder: Path, name: str, content: str | bytes) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(
        ConfigError, match=r"no Hugging Face model there|no tokenizer there|config\.json must be"
    ) as error:
        load_config(str(folder), field="models.actor")
        load_tokenizer(str(folder))
    assert len(error.value.messages) == 1 and "\n" not in error.value.messages[0]


@pytest.mark.parametrize(
    "rope, positions, expected",
    [
        ({"rope_type": "default"}, 64, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 64, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"rope_type": "linear", "factor": 2.0}, 64, 128),
        ({"rope_type": "dynamic", "factor": 2.0}, 64, 64),
    ],
)
def test_the_limit_of_a_sequence_counts_the_rope_scaling(rope: dict[str, Any], positions: int, expected: int) -> None:
    config = LlamaConfig(max_position_embeddings=positions, rope_parameters={"rope_theta": 10000.0, **rope})
    assert max_tokens(config) == expected
