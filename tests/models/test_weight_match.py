"""A folder holds exactly the weights of the model that its config.json describes, or the run does not start."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from hybrid_rl.config import Config, ConfigError, ModelsConfig, PromptsConfig, RolloutConfig
from hybrid_rl.models.checks import check_models
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.weight_match import check_weights
from tests.conftest import tiny_config

CPU = torch.device("cpu")
Q = "model.layers.1.self_attn.q_proj.weight"
Tensors = dict[str, Tensor]


@pytest.fixture
def untied(tiny: Path, tmp_path: Path) -> Path:
    """A folder of a policy with a head of its own."""
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(tied=False)).save_pretrained(tmp_path / "policy")
    for file in (tiny / "policy").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "policy")
    return tmp_path / "policy"


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(path)).items()}, path, metadata={"format": "pt"})


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if name not in names}


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no head": (without("lm_head.weight"), r"lacks 1 of its tensors \(lm_head\.weight\)"),
    "no q_proj": (without(Q), rf"lacks 1 of its tensors \({Q}\)"),
    "a prefix": (
        lambda tensors: {f"module.{name}": t for name, t in tensors.items()},
        r"lacks 21 of its tensors \(lm_head\.weight, .* and 18 more\), holds 21 that it does not take \(module\.",
    ),
    "one more": (
        lambda tensors: tensors | {"model.layers.0.extra.weight": torch.ones(2)},
        r"holds 1 that it does not take \(model\.layers\.0\.extra\.weight\)",
    ),
    "another shape": (
        lambda tensors: tensors | {Q: torch.ones(64, 31)},
        rf"has 1 of another shape \({Q} is \[64, 31\] instead of \[64, 32\]\)",
    ),
    "integers": (
        lambda tensors: tensors | {Q: torch.ones(64, 32, dtype=torch.int8)},
        rf"lacks 1 of its tensors \({Q}\), holds 1 that are not in floating point \({Q} in I8\)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_before_and_while_loading(untied: Path, name: str) -> None:
    change, message = FAULTS[name]
    edit(untied, change)
    with pytest.raises(ConfigError, match=rf"models\.actor = {untied}: .*{message}"):
        check_weights(str(untied), field="models.actor", is_policy=True)
    if name != "integers":  # which transformers converts
        with pytest.raises(ConfigError, match=message):
            load_actor(str(untied), ModelsConfig(), CPU)


def test_a_layer_too_many_in_the_config_is_named(untied: Path) -> None:
    keys = json.loads((untied / "config.json").read_text()) | {"num_hidden_layers": 3}
    keys.pop("layer_types", None)
    (untied / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ConfigError, match=r"lacks 9 of its tensors \(model\.layers\.2\."):
        check_weights(str(untied), field="models.actor", is_policy=True)


def test_a_reward_model_without_its_backbone_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    shutil.copytree(tiny / "reward", folder)
    edit(folder, lambda tensors: {"score.weight": tensors["score.weight"]})
    for check in (
        check_weights,
        lambda path, **named: load_value_model(path, ModelsConfig(), CPU, field="models.reward"),
    ):
        with pytest.raises(ConfigError, match=r"models\.reward = .* lacks 20 of its tensors"):
            check(str(folder), field="models.reward", is_policy=False)


def test_all_models_are_checked_and_reported_together(untied: Path, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny / "reward", tmp_path / "reward")
    edit(tmp_path / "reward", without("model.norm.weight"))
    edit(untied, without("lm_head.weight"))
    config = Config(
        models=ModelsConfig(actor=str(untied), reward=str(tmp_path / "reward")),
        prompts=PromptsConfig(path="p", max_prompt_tokens=8),
        rollout=RolloutConfig(max_response_tokens=8),
    )
    with pytest.raises(ConfigError) as error:
        check_models(config)
    assert [message.split(" = ")[0] for message in error.value.messages] == ["models.actor", "models.reward"]


def test_a_policy_as_critic_has_a_new_head_which_is_named(
    untied: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    check_weights(str(untied), field="models.critic", is_policy=False, new_head=True)
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        critic = load_value_model(str(untied), ModelsConfig(), CPU, field="models.critic", new_head=True)
    assert critic.model.score.weight.abs().max() == 0
    (message,) = (record.getMessage() for record in caplog.records)
    assert "score.weight is new and starts at zero" in message and "lm_head.weight of the folder is not used" in message
    assert "newly initialized" not in capfd.readouterr().err
    with pytest.raises(ConfigError, match="holds no trained `score` head"):
        check_weights(str(untied), field="models.reward", is_policy=False)


def test_what_transformers_maps_is_accepted(tiny: Path, tmp_path: Path) -> None:
    """Tied heads are not in the folder, and GPT-2's folders may have names without `transformer.`."""
    check_weights(str(tiny / "policy"), field="models.actor", is_policy=True)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32))
    gpt2.save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: {name.removeprefix("transformer."): t for name, t in tensors.items()})
    check_weights(str(tmp_path), field="models.actor", is_policy=True)
    loaded = load_actor(str(tmp_path), ModelsConfig(), CPU).model
    assert torch.equal(loaded.transformer.wte.weight, gpt2.transformer.wte.weight)


@pytest.mark.parametrize("size", [0, 4, 200, -1])
def test_a_truncated_file_is_named(untied: Path, size: int) -> None:
    content = (untied / "model.safetensors").read_bytes()
    (untied / "model.safetensors").write_bytes(content[:size])
    with pytest.raises(ConfigError, match=r"models\.actor = .*model\.safetensors is damaged \("):
        check_weights(str(untied), field="models.actor", is_policy=True)
