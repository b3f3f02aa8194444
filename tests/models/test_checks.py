"""Checks of models against the settings before any weight is loaded."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_rl.config import (
    AdvantageConfig,
    Config,
    ConfigError,
    LoraConfig,
    ModelsConfig,
    PromptsConfig,
    RolloutConfig,
    UpdateConfig,
)
from hybrid_rl.models.checks import check_classes, check_models
from tests.models.families import FAMILIES

CPU = torch.device("cpu")


def test_lengths_and_parallel_sizes_must_fit_every_model(tiny, tmp_path):
    """Sequences of 64 tokens fit the tiny models; a critic with 32 positions is refused."""

    def config(**models: str) -> Config:
        return Config(
            models=ModelsConfig(actor=str(tiny / "policy"), reward=str(tiny / "reward"), **models),
            prompts=PromptsConfig(path="p", max_prompt_tokens=40),
            rollout=RolloutConfig(max_response_tokens=24),
        )

    check_models(config(), CPU)
    short = tmp_path / "short"
    shutil.copytree(tiny / "reward", short)
    settings = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 32}
    (short / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"40 \+ .* 24 = 64: models.critic = {short} takes at most 32 tokens"):
        check_models(config(critic=str(short)), CPU)
    parallel = replace(config(), update=UpdateConfig(sequence_parallel_size=3))
    with pytest.raises(ConfigError, match=r"sequence_parallel_size = 3: must divide the 2 attention heads of models\."):
        check_models(parallel, CPU)


@pytest.mark.parametrize(
    "models, message",
    [
        (
            {"attention": "sdpa"},
            r"models.attention = sdpa: models.actor is a Gemma2ForCausalLM with .* = 1.0, .* eager",
        ),
        ({"lora": LoraConfig(rank=1, target_modules=["v"])}, r"target_modules names v: Gemma2ForCausalLM .*, v_proj"),
        ({"lora": LoraConfig(target_modules=["v"])}, None),
        ({"lora": LoraConfig(rank=1, target_modules=["q_proj", "down_proj"]), "attention": "eager"}, None),
    ],
)
def test_attention_and_adapter_targets_must_fit_the_class(tiny, tmp_path, models, message):
    AutoModelForCausalLM.from_config(FAMILIES["gemma2"]()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny / "policy").save_pretrained(tmp_path)
    lengths = {"prompts": PromptsConfig(max_prompt_tokens=40), "rollout": RolloutConfig(max_response_tokens=24)}
    config = Config(models=ModelsConfig(actor=str(tmp_path), **models), **lengths)
    if message is None:
        check_models(config, CPU)
    else:
        with pytest.raises(ConfigError, match=message):
            check_models(config, CPU)


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3"])
def test_routing_settings_need_a_mixture_of_experts(tiny, tmp_path, family):
    FAMILIES[family]().save_pretrained(tmp_path)
    config = Config(
        models=ModelsConfig(actor=str(tmp_path)),
        rollout=RolloutConfig(routing_replay=True),
        update=UpdateConfig(router_aux_loss_coef=0.5),
    )
    if family == "qwen3-moe":
        check_classes(config, CPU)
        return
    with pytest.raises(ConfigError, match=r"^rollout.routing_replay = true: .*: Qwen3ForCausalLM has no routers") as no:
        check_classes(config, CPU)
    assert "set false" in str(no.value)


def test_experts_get_no_adapters_and_the_refusal_says_why(tmp_path):
    FAMILIES["qwen3-moe"]().save_pretrained(tmp_path)
    lora = LoraConfig(rank=1, target_modules=["q_proj", "down_proj"])
    config = Config(models=ModelsConfig(actor=str(tmp_path), lora=lora))
    with pytest.raises(ConfigError, match=r"names down_proj: .* \(experts get no adapters: each projection of all ex"):
        check_classes(config, CPU)


def test_a_class_that_a_family_lacks_is_named(tiny, tmp_path):
    AutoModelForCausalLM.from_config(FAMILIES["cohere"]()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny / "policy").save_pretrained(tmp_path)
    lengths = {"prompts": PromptsConfig(max_prompt_tokens=40), "rollout": RolloutConfig(max_response_tokens=24)}
    models = ModelsConfig(actor=str(tmp_path))
    with pytest.raises(ConfigError, match=r"models.critic: transformers has no sequence classifier of type cohere"):
        check_models(Config(models=models, **lengths), CPU)
    without = Config(models=models, advantage=AdvantageConfig(estimator="grpo"), **lengths)
    check_models(without, CPU)
    with pytest.raises(ConfigError, match=r"models.fused_layers = liger: .*; models.actor is of type cohere; use auto"):
        check_models(replace(without, models=replace(models, fused_layers="liger")), CPU)


def test_only_a_reward_model_may_have_another_tokenizer(tiny, tmp_path):
    """It reads re-encoded text, so the limit in tokens of the actor does not apply to it."""
    other = tmp_path / "other"
    shutil.copytree(tiny / "reward", other)
    settings = json.loads((other / "config.json").read_text()) | {"max_position_embeddings": 8}
    (other / "config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["abc"])
    tokenizer.save_pretrained(other)
    models = {"actor": str(tiny / "policy"), "reward": str(other)}
    rest = {"prompts": PromptsConfig(path="p", max_prompt_tokens=40), "rollout": RolloutConfig(max_response_tokens=24)}
    check_models(Config(models=ModelsConfig(**models, critic=str(tiny / "policy")), **rest), CPU)
    check_models(Config(models=ModelsConfig(**models), advantage=AdvantageConfig(estimator="grpo"), **rest), CPU)
    for field in ("critic", "reference"):
        with pytest.raises(ConfigError, match=rf"models.{field} = {other}: its tokenizer is not the actor's"):
            check_models(Config(models=ModelsConfig(**models, **{field: str(other)}), **rest), CPU)
    with pytest.raises(ConfigError, match=r"models.critic is null and would start as models.reward = "):
        check_models(Config(models=ModelsConfig(**models), **rest), CPU)
