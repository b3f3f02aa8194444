"""Shard plans of small models, compared with plans written by hand, and the models that are refused."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
)

from hybrid_rl.config import ConfigError
from hybrid_rl.models.tensor_parallel import check_shard_plan, shard_plan

SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 36,
    "pad_token_id": 0,
}


def empty(config: Any, auto_class: Any = AutoModelForCausalLM) -> Any:
    with torch.device("meta"):
        return auto_class.from_config(config)


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_layers_are_sharded_in_pairs_with_one_communication_each(auto_class):
    model, layer = empty(Qwen3Config(**SMALL, attention_bias=True), auto_class), "model.layers.0"
    plan = check_shard_plan(model, 2)
    assert set(plan.rows) == {
        *(f"{layer}.self_attn.{name}_proj" for name in "qkv"),
        *(f"{layer}.mlp.{name}_proj" for name in ("gate", "up")),
    }
    assert plan.columns == (f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj")
    assert plan.summed == (f"{layer}.self_attn.q_norm", f"{layer}.self_attn.k_norm")
    dimensions = {name: plan.dimension(name) for name, _ in model.named_parameters()}
    assert {name for name, dimension in dimensions.items() if dimension == 0} == {
        *(f"{layer}.self_attn.{name}_proj.{leaf}" for name in "qkv" for leaf in ("weight", "bias")),
        *(f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up")),
    }
    # The bias of a column-sharded layer is replicated: every rank adds it once, to the summed output.
    assert {name for name, dimension in dimensions.items() if dimension == 1} == {
        f"{layer}.self_attn.o_proj.weight",
        f"{layer}.mlp.down_proj.weight",
    }


def test_layers_that_return_whole_activations_are_replicated():
    """Olmo 2 normalizes queries and keys over all heads."""
    plan = check_shard_plan(empty(Olmo2Config(**SMALL)), 2)
    assert {name.split(".")[-1] for name in (*plan.rows, *plan.columns)} == {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    "config, size, message",
    [
        (
            GPT2Config(n_embd=32, n_layer=1, n_head=2),
            2,
            "transformers has no plan that shards a layer of GPT2LMHeadModel",
        ),
        (Phi3Config(**SMALL), 2, "transformers has no plan that shards a layer of Phi3ForCausalLM"),
        (MixtralConfig(**SMALL), 2, "plan of MixtralForCausalLM shards by moe_tp_experts, packed_colwise, not supp"),
        (LlamaConfig(**SMALL), 4, "must divide the 2 num_key_value_heads of LlamaForCausalLM"),
        (LlamaConfig(**SMALL), 3, "must divide the 4 num_attention_heads of LlamaForCausalLM"),
        (
            LlamaConfig(**SMALL | {"intermediate_size": 35}),
            2,
            "must divide the width 35 of model.layers.0.mlp.gate_proj",
        ),
    ],
)
def test_model_that_cannot_be_sharded_is_refused(config, size, message):
    with pytest.raises(ConfigError, match=f"update.tensor_parallel_size = {size}: .*{message}"):
        check_shard_plan(empty(config), size)


def test_model_without_a_plan_has_an_empty_shard_plan():
    assert shard_plan(empty(GPT2Config(n_embd=32, n_layer=1, n_head=2))).rows == ()
    names = shard_plan(empty(GPTNeoXConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))).rows
    assert {name.split(".")[-1] for name in names} == {"query_key_value", "dense_h_to_4h"}
