"""Who computes with Liger's kernels. What they compute needs a GPU: tests/gpu/test_fused_layers.py."""

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
def test_auto_takes_liger_where_it_is_installed_and_checked(
    monkeypatch: pytest.MonkeyPatch, is_installed: int, has_gpu: int, is_there: bool
) -> None:
    """A machine without a GPU plans for one that has it."""
    monkeypatch.setattr(fused_layers, "is_liger_kernel_available", lambda: bool(is_installed))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(has_gpu))
    assert uses_liger("auto", "qwen2", is_half_on_gpu=True) is is_there
    assert not uses_liger("auto", "qwen2", is_half_on_gpu=False)
    assert not uses_liger("auto", "gpt2", is_half_on_gpu=True)
    assert not uses_liger("off", "qwen2", is_half_on_gpu=True)
    assert uses_liger("liger", "qwen2", is_half_on_gpu=True)


def test_a_family_that_was_not_checked_is_refused() -> None:
    for family in FAMILIES:
        check_family("liger", family, field="models.actor")
    check_family("auto", "gpt2", field="models.actor")
    with pytest.raises(ConfigError, match=r"^models.fused_layers = liger: checked for gemma, .*; models.critic is"):
        check_family("liger", "gpt2", field="models.critic")


def test_a_cpu_has_the_layers_of_transformers_or_says_why(tiny: Path) -> None:
    path, cpu = str(tiny / "policy"), torch.device("cpu")
    actor = load_actor(path, ModelsConfig(), cpu)
    assert type(actor.model.base_model.norm).forward is actor.model.base_model.norm.forward.__func__
    with pytest.raises(ConfigError, match=r"models.fused_layers = liger: needs a GPU and models.dtype = bfloat16"):
        load_actor(path, ModelsConfig(fused_layers="liger"), cpu)


def test_an_unchecked_family_is_refused_by_the_loader_too(tmp_path: Path) -> None:
    """Liger would leave a family that it does not know as it is, and say nothing."""
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, n_positions=64, pad_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"models.actor = {tmp_path} is of type gpt2; use auto"):
        load_actor(str(tmp_path), ModelsConfig(fused_layers="liger"), torch.device("cpu"))


def test_the_plan_of_a_gpu_counts_what_liger_keeps(tiny: Path) -> None:
    config = Config(
        models=ModelsConfig(actor=str(tiny / "policy"), fused_layers="off"),
        prompts=PromptsConfig(max_prompt_tokens=8),
        rollout=RolloutConfig(max_response_tokens=24, kv_cache_memory_bytes=GIB),
    )
    machine = Machine(gpu_memory_bytes=80 * GIB, num_gpus=1, num_nodes=1, backend="triton")
    rows = []
    for setting in ("off", "liger"):
        now = replace(config, models=replace(config.models, fused_layers=setting))
        plan = make_plan(now, machine, read_shapes(now))
        rows.append(next(a.num_bytes for a in plan.allocations if a.name == "actor activations"))
    tokens = config.update.mini_batch_size * 32
    # Two layers of width 32 and 64: two norms keep 4 * 32 - 4 bytes less, the feed-forward 2 * 64. One more norm.
    assert rows[0] - rows[1] == tokens * (2 * (2 * 124 + 128) + 124)
