"""The head of a value model is found under any name, or refused; it never starts at zero in silence."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BertConfig, CTRLConfig

from hybrid_rl.config import ConfigError, ModelsConfig
from hybrid_rl.models.loading import load_value_model
from hybrid_rl.models.verification import probe_inputs
from hybrid_rl.models.weight_match import check_weights

CPU = torch.device("cpu")
WEIGHT, BIAS = torch.linspace(-1, 1, 32)[None], torch.tensor([0.25])


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A folder of a reward model without its head."""
    shutil.copytree(tiny / "reward", tmp_path / "reward")
    write_head(tmp_path / "reward", {})
    return tmp_path / "reward"


def write_head(folder: Path, head: Mapping[str, Tensor]) -> None:
    tensors = {name: t for name, t in load_file(folder / "model.safetensors").items() if name.startswith("model.")}
    save_file(tensors | dict(head), folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def load(folder: Path, *, new_head: bool = True) -> torch.nn.Module:
    check_weights(str(folder), field="models.critic", is_policy=False, new_head=new_head)
    return load_value_model(str(folder), ModelsConfig(), CPU, field="models.critic", new_head=new_head)


@pytest.mark.parametrize(
    "name, has_bias",
    [
        ("value_head", True),  # ColossalChat
        ("v_head.summary", True),  # TRL
        ("v_head", False),  # DeepSpeed-Chat
        ("classifier", False),
        ("regression_head", False),
        ("anything", False),
        ("score", True),  # a token classifier of transformers
    ],
)
@pytest.mark.parametrize("new_head", [True, False], ids=["critic", "reward model"])
def test_a_head_of_another_name_is_loaded(folder, caplog, name, has_bias, new_head):
    write_head(folder, {f"{name}.weight": WEIGHT} | ({f"{name}.bias": BIAS} if has_bias else {}))
    model = load(folder, new_head=new_head)
    assert torch.equal(model.head.weight, WEIGHT)
    assert f"{name}.weight" in caplog.text and "of the folder is the value head" in caplog.text
    both, _ = probe_inputs(model.model)
    hidden = model.hidden(**both)
    values = model(**both, index=torch.arange(7))
    torch.testing.assert_close(values, hidden @ WEIGHT[0] + (BIAS if has_bias else 0))


def test_the_prefix_of_openrlhf_names_the_head_among_several(folder):
    edit_config(folder, value_head_prefix="mine")
    write_head(folder, {"mine.weight": WEIGHT})
    assert torch.equal(load(folder).head.weight, WEIGHT)
    write_head(folder, {"mine.weight": WEIGHT, "other.weight": WEIGHT + 1})
    with pytest.raises(ConfigError, match=r"holds 1 that it does not take \(other\.weight\)"):
        load(folder)
    write_head(folder, {"other.weight": WEIGHT})
    with pytest.raises(ConfigError, match=r"config.json names the head mine \(value_head_prefix\), .* has other"):
        load(folder)


def test_several_heads_without_a_known_name_are_refused_by_name(folder):
    write_head(folder, {"a.weight": WEIGHT, "b.weight": WEIGHT + 1})
    with pytest.raises(ConfigError, match=r"several tensors could be the head .* \(a\.weight, b\.weight\)"):
        load(folder)


@pytest.mark.parametrize(
    "head, message",
    [
        ({"v_head.0.weight": torch.ones(8, 32)}, r"holds 1 that it does not take \(v_head\.0\.weight\)"),
        ({"score.weight": torch.ones(2, 32)}, r"score\.weight is \[2, 32\] instead of \[1, 32\]"),
        ({}, r"config.json describes a value model \(Llama.*\), but the folder holds no trained"),
    ],
)
def test_a_value_model_whose_head_does_not_fit_gets_no_head_of_zeros(folder, head, message):
    write_head(folder, head)
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_a_class_with_another_name_for_its_head_gives_the_scores_of_transformers(tiny, tmp_path):
    config = CTRLConfig(vocab_size=40, n_positions=64, n_embd=32, dff=48, n_layer=2, n_head=2, num_labels=1)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path)
    critic = load(tmp_path, new_head=False)
    assert critic.head_name == "classifier" and torch.equal(critic.head.weight, model.classifier.weight)
    _, alone = probe_inputs(critic.model)
    model.eval().config.pad_token_id = None
    expected = model(alone["input_ids"]).logits.flatten()
    found = critic(**alone, index=torch.tensor([3]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_class_that_computes_more_than_a_linear_head_is_refused(tmp_path):
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, num_labels=1
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"BertForSequenceClassification has dropout, classifier beside its base"):
        load(tmp_path)
