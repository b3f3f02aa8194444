"""The choice of Liger's kernels; tests/gpu/test_fused_layers.py compares their results on a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hybrid_rl.config import Config, ConfigError, ModelsConfig, PromptsConfig, RolloutConfig
from hybrid_rl.models import fused_layers
from hybrid_rl.models.fused_layers import FAMILIES, check_family, uses_liger
from hybrid_rl.models.loading import load_actor
from hybrid_rl.planning.plan import GIB, Machine
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.shapes import read_shapes


@pytest.mark.parametrize("is_installed, has_gpu, is_there", [(1, 1, True), (0, 1, False), (0, 0, True)])
def test_auto_takes_liger_where_it_is_installed_and_verified(
    monkeypatch: pytest.MonkeyPatch, is_installed: int, has_gpu: int, is_there: bool
) -> None:
    """A machine without a GPU assumes that the GPU machine it plans for has it."""
    monkeypatch.setattr(fused_layers, "is_liger_kernel_available", lambda: bool(is_installed))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(has_gpu))
    assert uses_liger("auto", "qwen2", is_half_on_gpu=True) is is_there
    assert not uses_liger("auto", "qwen2", is_half_on_gpu=False)
    assert not uses_liger("auto", "gpt2", is_half_on_gpu=True)
    assert not uses_liger("off", "qwen2", is_half_on_gpu=True)
    assert uses_liger("liger", "qwen2", is_half_on_gpu=True)


def test_liger_is_refused_for_a_family_that_is_not_verified() -> None:
    for family in FAMILIES:
        check_family("liger", family, field="models.actor")
    check_family("auto", "gpt2", field="models.actor")
    with pytest.raises(ConfigError, match=r"^models.fused_layers = liger: checked for gemma, .*; models.critic is"):
        check_family("liger", "gpt2", field="models.critic")


def test_a_cpu_keeps_the_layers_of_transformers_and_refuses_liger(tiny: Path) -> None:
    path, cpu = str(tiny / "policy"), torch.device("cpu")
    actor = load_actor(path, ModelsConfig(), cpu)
    assert type(actor.model.base_model.norm).forward is actor.model.base_model.norm.forward.__func__
    with pytest.raises(ConfigError, match=r"models.fused_layers = liger: needs a GPU and models.dtype = bfloat16"):
        load_actor(path, ModelsConfig(fused_layers="liger"), cpu)


def test_the_loader_refuses_liger_for_a_family_that_is_not_verified(tmp_path: Path) -> None:
    """Liger itself would leave such a model unchanged without an error."""
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, n_positions=64, pad_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"models.actor = {tmp_path} is of type gpt2; use auto"):
        load_actor(str(tmp_path), ModelsConfig(fused_layers="liger"), torch.device("cpu"))


def test_the_plan_of_a_gpu_counts_the_smaller_activations_of_liger(tiny: Path) -> None:
    config = Config(
        models=ModelsConfig(actor=str(tiny / "policy"), fused_layers="off"),
        prompts=PromptsConfig(max_prompt_tokens=8),
        rollout=RolloutConfig(max_response_tokens=24, kv_cache_memory_bytes=GIB),
    )
    machine = Machine(gpu_memory_bytes=80 * GIB, num_gpus=1, num_nodes=1, backend="triton")
    num_bytes = []
    for setting in ("off", "liger"):
        planned = replace(config, models=replace(config.models, fused_layers=setting))
        plan = make_plan(planned, machine, read_shapes(planned))
        num_bytes.append(next(a.num_bytes for a in plan.allocations if a.name == "actor activations"))
    tokens = config.update.mini_batch_size * 32
    # Per token, each of two layers of width 32 and 64 stores 4 * 32 - 4 bytes less for each of two norms and 2 * 64
    # less for the MLP; the final norm stores 4 * 32 - 4 less.
    assert num_bytes[0] - num_bytes[1] == tokens * (2 * (2 * 124 + 128) + 124)
