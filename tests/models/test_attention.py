"""The choice of an attention implementation, and the arguments that confine it to each packed sequence."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

from hybrid_rl.config import ConfigError, ModelsConfig
from hybrid_rl.models import attention
from hybrid_rl.models.attention import choose_attention, packing_arguments, repeats_keys, uses_varlen, varlen_attention
from hybrid_rl.models.loading import load_actor
from tests.models.families import CPU, FAMILIES, SMALL

CUDA = torch.device("cuda")


def choose(setting="auto", device=CUDA, dtype=torch.bfloat16, config=None):
    config = config or LlamaConfig(**SMALL)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    return choose_attention(setting, device, dtype, model_class, config, field="models.actor")


@pytest.fixture(params=[True, False], ids=["with flash-attn", "without"])
def has_flash(request, monkeypatch) -> bool:
    """Whether flash-attn seems to be installed."""
    find = {"flash_attn": object() if request.param else None}
    monkeypatch.setattr(attention.importlib.util, "find_spec", find.get)
    return request.param


def test_auto_takes_the_fastest_implementation_that_is_available(has_flash):
    assert choose() == ("flash_attention_2" if has_flash else "varlen")
    assert choose(dtype=torch.float32) == choose(device=CPU) == choose(device=CPU, dtype=torch.float32) == "sdpa"


def test_auto_takes_none_that_ignores_the_soft_cap(has_flash):
    config = FAMILIES["gemma2"]()
    assert choose(config=config) == ("flash_attention_2" if has_flash else "eager")
    assert choose(config=config, device=CPU) == "eager"
    assert choose(config=Gemma2Config(**SMALL, attn_logit_softcapping=None), device=CPU) == "sdpa"


@pytest.mark.parametrize("setting", ["flash_attention_2", "varlen", "sdpa", "eager"])
def test_a_supported_setting_is_taken_on_any_device(setting):
    assert choose(setting) == choose(setting, device=CPU, dtype=torch.float32) == setting


@pytest.mark.parametrize("setting", ["sdpa", "varlen"])
def test_an_implementation_that_ignores_the_soft_cap_is_refused(tmp_path, setting):
    FAMILIES["gemma2"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"models.attention = {setting}: .*attn_logit_softcapping = 1.0.* eager"):
        load_actor(str(tmp_path), ModelsConfig(attention=setting), CPU)


def test_a_token_costs_the_same_in_any_micro_batch_with_varlen_alone():
    assert [s for s in ("auto", "varlen", "flash_attention_2", "sdpa", "eager") if uses_varlen(s, is_gpu=True)] == [
        "auto",
        "varlen",
        "flash_attention_2",
    ]
    assert not any(uses_varlen(s, is_gpu=False) for s in ("auto", "sdpa", "varlen"))


def test_only_flash_attn_leaves_keys_unrepeated(has_flash):
    assert [repeats_keys(s) for s in ("flash_attention_2", "varlen", "sdpa", "eager")] == [False, True, True, True]
    assert repeats_keys("auto") != has_flash


# Two sequences of two and three tokens
BOUNDS = torch.tensor([0, 2, 5], dtype=torch.int32)
MASK = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]


def arguments(implementation, config=None):
    config = config or LlamaConfig(**SMALL)
    config._attn_implementation = implementation
    return packing_arguments(SimpleNamespace(config=config, dtype=torch.float32), BOUNDS, 3, 5)


@pytest.mark.parametrize("implementation", ["varlen", "flash_attention_2"])
def test_varlen_implementations_get_the_bounds(implementation):
    found = arguments(implementation)
    assert found.keys() == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert found["cu_seq_lens_q"] is BOUNDS and found["cu_seq_lens_k"] is BOUNDS
    assert found["max_length_q"] == found["max_length_k"] == 3


def test_others_get_a_mask_that_is_causal_in_each_sequence():
    mask = arguments("sdpa")["attention_mask"]
    assert mask.dtype == torch.bool and mask[0, 0].int().tolist() == MASK
    lowest = torch.finfo(torch.float32).min
    added = arguments("eager")["attention_mask"]
    assert added.shape == (1, 1, 5, 5) and (added[0, 0] == 0).int().tolist() == MASK
    assert set(added.unique().tolist()) == {lowest, 0.0}


def test_a_model_with_sliding_windows_builds_its_masks_from_position_ids():
    assert arguments("sdpa", MistralConfig(**SMALL, sliding_window=4)) == {}


def attend(**options) -> tuple[Tensor, None]:
    query, key = torch.zeros(1, 2, 5, 16), torch.zeros(1, 1, 5, 16)
    return varlen_attention(nn.Identity(), query, key, key, None, **options)


def test_varlen_attention_needs_bounds_and_refuses_what_its_kernel_lacks():
    with pytest.raises(ValueError, match="needs the lengths of the packed sequences; this model does not pass them on"):
        attend()
    for name in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(ValueError, match=f"varlen attention cannot apply {name}; set models.attention to"):
            attend(cu_seq_lens_q=BOUNDS, max_length_q=3, **{name: 1.0})


def test_varlen_attention_repeats_keys_and_counts_the_window_without_the_token_itself(monkeypatch):
    """The kernel itself needs a GPU, see tests/gpu/test_models.py."""
    calls = []

    def kernel(query, key, value, *bounds, scale, window_size):
        calls.append(
            (key.shape, value.shape, [b.tolist() if isinstance(b, Tensor) else b for b in bounds], window_size)
        )
        return query * scale

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    output, _ = attend(cu_seq_lens_q=BOUNDS, max_length_q=3, scaling=0.25)
    attend(cu_seq_lens_q=BOUNDS, max_length_q=3, scaling=0.25, sliding_window=4)
    assert output.shape == (1, 5, 2, 16)
    expected = (5, 2, 16), (5, 2, 16), [[0, 2, 5], [0, 2, 5], 3, 3]
    assert calls == [(*expected, (-1, 0)), (*expected, (3, 0))]
