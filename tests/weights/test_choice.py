"""What the engine gets follows from the settings alone: adapters or merged weights, views or copies of the base."""

from dataclasses import replace

import pytest
import torch

from hybrid_rl.config import (
    AdvantageConfig,
    Config,
    ConfigError,
    LoraConfig,
    ModelsConfig,
    RolloutConfig,
    SyncConfig,
    UpdateConfig,
)
from hybrid_rl.weights.choice import ADAPTER_RANKS, SyncChoice, adapter_rank, choose_sync

TENSORS = [("embed", (8, 4), torch.float32), ("0.q_proj.weight", (4, 4), torch.float32)]


def choose(*, rank: int = 4, lora: str = "auto", mode: str = "auto", architecture: str = "LlamaForCausalLM", **further):
    models = ModelsConfig(lora=LoraConfig(rank=rank, sync=lora))
    config = Config(models=models, sync=SyncConfig(mode=mode), **further)
    return choose_sync(config, architecture=architecture, tensors=TENSORS)


def test_without_adapters_only_views_or_copies_are_chosen():
    assert choose(rank=0) == SyncChoice(why_copies="", sends_adapters=False, why_merged="", shares_critic=False)
    assert choose(rank=0, lora="adapters") == choose(rank=0)
    copied = choose(rank=0, mode="copy")
    assert copied == SyncChoice(why_copies="sync.mode = copy", sends_adapters=False, why_merged="", shares_critic=False)


@pytest.mark.parametrize("lora", ["auto", "adapters"])
@pytest.mark.parametrize("mode", ["auto", "alias"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_adapters_are_sent_beside_a_base_that_is_aliased(lora, mode, stage):
    choice = choose(lora=lora, mode=mode, update=UpdateConfig(zero_stage=stage))
    assert choice == SyncChoice(why_copies="", sends_adapters=True, why_merged="", shares_critic=True)


COPIED = {
    "zero3": ({"update": UpdateConfig(zero_stage=3)}, "update.zero_stage = 3"),
    "tp2": ({"rollout": RolloutConfig(tensor_parallel_size=2)}, "rollout.tensor_parallel_size = 2"),
    "mode": ({"mode": "copy"}, "sync.mode = copy"),
    "architecture": ({"architecture": "GPTNeoXForCausalLM"}, "GPTNeoXForCausalLM"),
}


@pytest.mark.parametrize("case", list(COPIED))
def test_where_the_base_is_copied_auto_merges_and_adapters_are_a_choice(case):
    settings, reason = COPIED[case]
    merged, adapters = choose(**settings), choose(lora="adapters", **settings)
    assert not merged.sends_adapters and adapters.sends_adapters and adapters.why_merged == ""
    assert reason in merged.why_merged and reason in merged.why_copies and reason in adapters.why_copies


def test_merged_weights_are_copies():
    choice = choose(lora="merged")
    assert not choice.sends_adapters
    assert choice.why_merged == "models.lora.sync = merged"
    assert "models.lora.sync = merged" in choice.why_copies
    with pytest.raises(ConfigError, match=r"sync\.mode = alias: models\.lora\.sync = merged"):
        choose(lora="merged", mode="alias")


def test_a_rank_beyond_vllms_is_merged_or_refused_by_a_sentence():
    assert "models.lora.rank = 513: vLLM serves adapters up to rank 512" in choose(rank=513).why_merged
    assert choose(rank=513).why_copies == choose(rank=513).why_merged
    with pytest.raises(ConfigError, match=r"models\.lora\.sync = adapters: models\.lora\.rank = 513: .*use merged"):
        choose(rank=513, lora="adapters")
    assert choose(rank=513, rollout=RolloutConfig(engine="hf")).sends_adapters


def test_layers_that_vllm_takes_apart_are_merged_or_refused_by_a_sentence():
    assert "Glm4ForCausalLM joins gate and up projections" in choose(architecture="Glm4ForCausalLM").why_merged
    with pytest.raises(ConfigError, match=r"models\.lora\.sync = adapters: Glm4ForCausalLM joins .*use merged"):
        choose(lora="adapters", architecture="Glm4ForCausalLM")


def test_a_vllm_before_the_tested_one_gets_adapters_only_where_the_settings_ask_for_them(monkeypatch):
    monkeypatch.setattr("hybrid_rl.weights.choice._vllm_version", lambda: "0.26.0")
    assert choose().why_merged == "vLLM 0.26.0: adapters from memory are tested with vLLM 0.32 and later"
    assert choose(lora="adapters").sends_adapters
    assert choose(rollout=RolloutConfig(engine="hf")).sends_adapters


def test_experts_are_merged_or_refused_by_a_sentence():
    tensors = [*TENSORS, ("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 4), torch.float32)]
    auto, adapters = (Config(models=ModelsConfig(lora=LoraConfig(rank=4, sync=sync))) for sync in ("auto", "adapters"))
    found = choose_sync(auto, architecture="Qwen3ForCausalLM", tensors=tensors)
    assert "Qwen3ForCausalLM has experts" in found.why_merged and found.why_copies == found.why_merged
    with pytest.raises(ConfigError, match=r"models\.lora\.sync = adapters: Qwen3ForCausalLM has experts, .*use merged"):
        choose_sync(adapters, architecture="Qwen3ForCausalLM", tensors=tensors)


@pytest.mark.parametrize("rank, size", [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (321, 512), (512, 512)])
def test_memory_of_an_adapter_has_the_next_rank_that_vllm_knows(rank, size):
    assert adapter_rank(rank) == size and size in ADAPTER_RANKS


def test_a_critic_that_starts_from_the_actor_shares_its_aliased_base():
    models = ModelsConfig(actor="a", lora=LoraConfig(rank=4))
    for changes, is_shared in (({}, True), ({"critic": "a"}, True), ({"critic": "c"}, False), ({"reward": "r"}, False)):
        config = Config(models=replace(models, **changes))
        choice = choose_sync(config, architecture="LlamaForCausalLM", tensors=TENSORS)
        assert config.has_critic and choice.shares_critic == is_shared, changes
    grpo = Config(models=models, advantage=AdvantageConfig(estimator="grpo"))
    assert not choose_sync(grpo, architecture="LlamaForCausalLM", tensors=TENSORS).shares_critic
    assert not choose(lora="merged").shares_critic and not choose(mode="copy").shares_critic
