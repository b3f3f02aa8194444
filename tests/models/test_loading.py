"""Loaded models: heads, dropout, gradient checkpointing, and folders that are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification

from hybrid_rl.batch import pack
from hybrid_rl.config import ConfigError, ModelsConfig
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.models.tokenizer import load_tokenizer
from tests.models.families import CONFIGS, CPU, run_actor, save_random


def test_a_loaded_model_saves_the_weights_and_config_of_its_folder(policy, tmp_path):
    load_actor(str(policy), ModelsConfig(), CPU).model.save_pretrained(tmp_path)
    before, after = load_file(policy / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (policy, tmp_path)]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert configs[0]["tie_word_embeddings"] == configs[1]["tie_word_embeddings"]


def test_dropout_is_off_in_training_mode(policy, batch):
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    assert actor.model.training
    assert all(module.p == 0 for module in actor.modules() if isinstance(module, nn.Dropout))
    packed = pack(batch, [0, 1, 3], CPU)
    assert torch.equal(run_actor(actor, packed, 1.0)[0], run_actor(actor, packed, 1.0)[0])


@pytest.mark.parametrize("is_on", [False, True])
def test_gradient_checkpointing_runs_layers_twice_with_equal_gradients(tiny, batch, is_on):
    config = ModelsConfig(gradient_checkpointing=is_on)
    actor = load_actor(str(tiny / "policy"), config, CPU)
    calls = []
    actor.model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    packed = pack(batch, [2], CPU)
    run_actor(actor, packed, 1.0)[0].sum().backward()
    assert len(calls) == 1 + is_on
    plain = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    run_actor(plain, packed, 1.0)[0].sum().backward()
    for ours, theirs in zip(actor.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_a_critic_without_a_head_gets_one_of_zeros(policy, batch):
    critic = load_value_model(str(policy), ModelsConfig(), CPU, field="models.critic", new_head=True)
    assert not critic.model.score.weight.any()
    packed = pack(batch, [0, 1], CPU)
    assert critic(**packed_inputs(packed), index=packed.response_index).tolist() == [0] * 10
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    assert torch.equal(critic.hidden(**packed_inputs(packed)), actor.hidden(**packed_inputs(packed)))


def test_a_critic_keeps_a_trained_head(classifier):
    kept = load_value_model(str(classifier), ModelsConfig(), CPU, field="models.critic", new_head=True)
    assert torch.equal(kept.model.score.weight, load_file(classifier / "model.safetensors")["score.weight"])


def test_a_reward_model_without_a_head_is_refused(policy):
    with pytest.raises(ConfigError, match=r"models.reward = .*: the folder holds no trained `score` head"):
        load_value_model(str(policy), ModelsConfig(), CPU, field="models.reward")


def test_a_reward_model_with_two_labels_is_refused(tiny, tmp_path):
    folder = save_random(AutoModelForSequenceClassification, CONFIGS["llama"](num_labels=2), tmp_path, tiny / "policy")
    with pytest.raises(ConfigError, match=r"models.reward = "):
        load_value_model(str(folder), ModelsConfig(), CPU, field="models.reward")


@pytest.mark.parametrize("loader", ["actor", "reward", "tokenizer"])
def test_a_folder_without_a_model_is_refused(tmp_path, loader):
    with pytest.raises(ConfigError, match=f"{tmp_path}: no "):
        if loader == "actor":
            load_actor(str(tmp_path), ModelsConfig(), CPU)
        elif loader == "reward":
            load_value_model(str(tmp_path), ModelsConfig(), CPU, field="models.reward")
        else:
            load_tokenizer(str(tmp_path))
