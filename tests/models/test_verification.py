"""Models that cannot be packed run padded with a warning; models with other logits are refused."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl.batch import pack
from hybrid_rl.config import ConfigError, ModelsConfig
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.verification import is_close, probe_inputs, verify_packing
from tests.models.families import CPU, PADDED, run_actor, save_random


def test_a_model_that_runs_padded_is_logged(tiny, tmp_path, caplog):
    folder = save_random(AutoModelForCausalLM, PADDED["bloom"](), tmp_path, tiny / "policy")
    with caplog.at_level(logging.WARNING):
        load_actor(str(folder), ModelsConfig(), CPU)
    assert f"models.actor = {folder}: BloomForCausalLM cannot keep packed sequences apart" in caplog.text


@torch.no_grad()
def test_every_family_has_the_same_layout_in_bfloat16(family, batch):
    """Verification in 16 bits tells rounding from attention to neighbours."""
    name, folder = family
    actor = load_actor(str(folder), ModelsConfig(dtype="bfloat16"), CPU)
    assert actor.is_padded == (name in PADDED)
    exact = load_actor(str(folder), ModelsConfig(), CPU)
    packed = pack(batch, [4, 0, 5, 1, 3, 2], CPU)
    found, expected = (run_actor(model, packed, 1.0)[0] for model in (actor, exact))
    assert (found - expected).abs().mean() < 0.25 * expected.std()


def test_a_config_whose_logit_scale_the_model_ignores_is_refused(tiny, tmp_path):
    """transformers' MPT ignores the logit_scale of its config."""
    folder = save_random(AutoModelForCausalLM, PADDED["mpt"](logit_scale=0.5), tmp_path, tiny / "policy")
    with pytest.raises(ConfigError, match=f"models.actor = {folder}: MptForCausalLM changes logits after its head"):
        load_actor(str(folder), ModelsConfig(), CPU)


def test_probe_inputs_are_two_sequences_and_the_second_alone(tiny):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    both, alone = probe_inputs(actor.model)
    assert both["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]] and both["cu_seqlens"].tolist() == [0, 3, 7]
    assert alone["input_ids"].tolist() == [both["input_ids"][0, 3:].tolist()]
    assert alone["position_ids"].tolist() == [[0, 1, 2, 3]] and alone["cu_seqlens"].tolist() == [0, 4]
    assert both["max_length"] == alone["max_length"] == 4


@pytest.mark.parametrize(
    "dtype, difference, expected",
    [
        (torch.float32, 0.9e-3, True),
        (torch.float32, 1.1e-3, False),
        (torch.bfloat16, 0.2, True),
        (torch.bfloat16, 0.3, False),
    ],
)
def test_the_tolerance_is_relative_and_1e_3_in_float32(dtype, difference, expected):
    values = torch.full((16,), 8.0, dtype=dtype)
    assert is_close((values.float() * (1 + difference)).to(dtype), values, 0.25) is expected


def test_varlen_attention_of_a_padded_model_is_refused(tiny, tmp_path):
    folder = save_random(AutoModelForCausalLM, PADDED["gpt-oss"](), tmp_path, tiny / "policy")
    actor = load_actor(str(folder), ModelsConfig(), CPU)
    actor.model.config._attn_implementation = "varlen"
    with pytest.raises(
        ConfigError, match=r"models.attention = varlen: models.actor = F: .* runs padded; use sdpa or auto"
    ):
        verify_packing(actor, ModelsConfig(attention="varlen"), "F", field="models.actor")
