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
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.config import AdvantageConfig, Config, ConfigError, ModelsConfig, PromptsConfig, RolloutConfig
from hybrid_rl.models.checks import check_models
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.weight_match import check_weights
from hybrid_rl.planning.shapes import read_shapes
from tests.conftest import make_rollout, tiny_config
from tests.models.families import FAMILIES, PADDED, run_actor, save_random

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
        check_models(config, torch.device("cpu"))
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


def test_a_plan_needs_no_weights_but_refuses_those_of_another_model(untied: Path) -> None:
    config = Config(models=ModelsConfig(actor=str(untied)), advantage=AdvantageConfig(estimator="grpo", kl_coef=0.0))
    edit(untied, without(Q))
    with pytest.raises(ConfigError, match=rf"models\.actor = .* lacks 1 of its tensors \({Q}\)"):
        read_shapes(config)
    (untied / "model.safetensors").unlink()
    assert read_shapes(config).actor.num_layers == 2
    with pytest.raises(ConfigError, match=r"models\.actor = .*: the folder holds no weights"):
        check_weights(str(untied), field="models.actor", is_policy=True)


def save_shards(folder: Path, *, names: tuple[str, str] = ("a.safetensors", "b.safetensors")) -> None:
    """Divide the weights of a folder into two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {name: names[i % 2] for i, name in enumerate(tensors)}
    for file in names:
        save_file({n: t for n, t in tensors.items() if index[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def test_shards_are_read_together_and_a_missing_one_is_named(untied: Path) -> None:
    save_shards(untied)
    check_weights(str(untied), field="models.actor", is_policy=True)
    first = (untied / "a.safetensors").read_bytes()
    (untied / "a.safetensors").write_bytes(first[: len(first) // 2])
    with pytest.raises(ConfigError, match=r"a\.safetensors is damaged \("):
        check_weights(str(untied), field="models.actor", is_policy=True)
    (untied / "a.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"index\.json names 1 files that are not there: a\.safetensors"):
        check_weights(str(untied), field="models.actor", is_policy=True)
    (untied / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json is damaged \(KeyError"):
        check_weights(str(untied), field="models.actor", is_policy=True)


def test_two_sets_of_weights_are_refused(untied: Path) -> None:
    copy = (untied / "model.safetensors").read_bytes()
    save_shards(untied)
    (untied / "model.safetensors").write_bytes(copy)
    with pytest.raises(ConfigError, match=r"holds two sets of weights, model\.safetensors and the files of"):
        check_weights(str(untied), field="models.actor", is_policy=True)


def test_of_two_formats_the_one_that_is_not_loaded_is_named(untied: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(untied / "model.safetensors")
    torch.save({name: tensor + 1 for name, tensor in tensors.items()}, untied / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING, "hybrid_rl"):
        model = load_actor(str(untied), ModelsConfig(), CPU).model
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    (message,) = (record.getMessage() for record in caplog.records)
    assert message == f"models.actor = {untied}: pytorch_model.bin of the folder is not used"


def test_a_pickled_file_is_read_without_running_it(untied: Path, tmp_path: Path) -> None:
    tensors, file, ran = load_file(untied / "model.safetensors"), untied / "pytorch_model.bin", tmp_path / "ran"
    (untied / "model.safetensors").unlink()
    torch.save(tensors, file)
    check_weights(str(untied), field="models.actor", is_policy=True)
    loaded = load_actor(str(untied), ModelsConfig(), CPU).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())

    class Code:
        def __reduce__(self):
            return (Path.touch, (ran,))

    for content in (tensors | {"code": Code()}, {"state_dict": tensors}, [1]):
        torch.save(content, file)
        with pytest.raises(ConfigError, match=r"models\.actor = .*pytorch_model\.bin"):
            check_weights(str(untied), field="models.actor", is_policy=True)
    assert not ran.exists()
    file.write_bytes(b"no pickle")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is damaged"):
        check_weights(str(untied), field="models.actor", is_policy=True)


def test_a_config_that_ties_two_different_tensors_is_refused(untied: Path) -> None:
    keys = json.loads((untied / "config.json").read_text()) | {"tie_word_embeddings": True}
    (untied / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ConfigError, match=r"config\.json ties lm_head\.weight to model\.embed_tokens\.weight, and"):
        load_actor(str(untied), ModelsConfig(), CPU)


@pytest.mark.parametrize("name", FAMILIES | PADDED)
def test_every_family_matches_its_own_folder(tiny: Path, tmp_path: Path, name: str) -> None:
    folder = save_random(AutoModelForCausalLM, (FAMILIES | PADDED)[name](), tmp_path, tiny / "policy")
    check_weights(str(folder), field="models.actor", is_policy=True)
    if name == "qwen3-moe":  # transformers fuses the experts of a folder into one tensor
        edit(folder, without("model.layers.1.mlp.experts.3.up_proj.weight"))
        with pytest.raises(ConfigError, match=r"models\.actor = .*Qwen3MoeForCausalLM"):
            check_weights(str(folder), field="models.actor", is_policy=True)


def test_actor_and_reference_of_one_folder_have_a_kl_of_exactly_zero(untied: Path) -> None:
    batch = make_train_batch([make_rollout([5, 9], [3, 8, 0]), make_rollout([1], [7, 4])])
    packed = pack(batch, [0, 1], CPU)
    actor, reference = (
        run_actor(load_actor(str(untied), ModelsConfig(), CPU, field=field), packed, 1.0)[0]
        for field in ("models.actor", "models.reference")
    )
    assert torch.equal(actor, reference)
