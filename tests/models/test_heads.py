"""Heads: logits without targets, and the scaling of logits that configs name."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl.config import ModelsConfig
from hybrid_rl.models.heads import LogitScaling, LogprobHead, ValueHead, logit_scaling
from hybrid_rl.models.loading import load_actor
from tests.models.families import CPU, FAMILIES, PADDED


@torch.no_grad()
def test_a_log_prob_head_without_targets_returns_logits(policy, batch):
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    assert isinstance(actor.model.get_output_embeddings(), LogprobHead)
    ids = batch.sequences[3][None]
    expected = AutoModelForCausalLM.from_pretrained(policy).eval()(ids).logits
    torch.testing.assert_close(actor.model(ids).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("qwen3", LogitScaling()),
        ("cohere", LogitScaling(logit_scale=0.25)),
        ("granite", LogitScaling(logit_scale=1 / 4.0)),
        ("hyperclova", LogitScaling(logit_scale=0.3)),
        ("falcon-h1", LogitScaling(logit_scale=0.3)),
        ("gemma2", LogitScaling(softcap=3.0)),
    ],
)
def test_the_config_names_scale_and_cap(name, expected):
    assert logit_scaling((FAMILIES | PADDED)[name]()) == expected


def test_logits_are_scaled_and_then_capped():
    """3 tanh(0.5 * 6 / 3) = 3 tanh(1)."""
    scaling = LogitScaling(logit_scale=0.5, softcap=3.0)
    torch.testing.assert_close(scaling.apply(torch.tensor([6.0, 0.0])), torch.tensor([3 * math.tanh(1), 0.0]))
    assert LogitScaling(logit_scale=0.5).apply(torch.tensor([6.0])).tolist() == [3.0]


def test_a_value_head_computes_in_float32():
    """In bfloat16, 256 + 1 would round to 256."""
    head = ValueHead(2, 1, bias=False, dtype=torch.bfloat16)
    head.weight.data.copy_(torch.tensor([[256.0, 1.0]]))
    value = head(torch.ones(3, 2, dtype=torch.bfloat16))
    assert value.dtype == torch.float32 and value.tolist() == [257.0] * 3
