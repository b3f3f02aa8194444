"""Liger's kernels compared with transformers' layers for every family: results, gradients and stored activations."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid_rl.config import ModelsConfig
from hybrid_rl.models.fused_layers import FAMILIES
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.packed import Actor
from hybrid_rl.planning.shapes import read_shape

HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not HAS_LIGER, reason="liger-kernel is not installed"),
]
DEVICE = torch.device("cuda")
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Folder of a random bfloat16 model of a family, with random weights of norms."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **SIZES))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    return str(tmp_path)


def packed(num_tokens: int) -> dict[str, Tensor | int]:
    """Return two packed sequences, the first of 11 tokens."""
    positions = torch.cat([torch.arange(11), torch.arange(num_tokens - 11)])[None].to(DEVICE)
    ends = torch.tensor([0, 11, num_tokens], dtype=torch.int32, device=DEVICE)
    ids = torch.randint(3, 1024, (1, num_tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return {"input_ids": ids, "position_ids": positions, "cu_seqlens": ends, "max_length": num_tokens - 11}


def results(actor: Actor) -> dict[str, Tensor]:
    """Return log-probs and all gradients of their sum, in float32."""
    inputs = packed(200)
    values, _ = actor(
        **inputs, index=torch.arange(199, device=DEVICE), targets=inputs["input_ids"][0, 1:], temperature=1.0
    )
    values.sum().backward()
    found = {name: p.grad.float() for name, p in actor.named_parameters() if p.grad is not None}
    return found | {"log-probs": values.detach().float()}


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_liger_is_no_further_from_float32_than_transformers(folder: str) -> None:
    exact = results(load_actor(folder, ModelsConfig(dtype="float32", fused_layers="off"), DEVICE))
    plain = results(load_actor(folder, ModelsConfig(fused_layers="off"), DEVICE))
    actor = load_actor(folder, ModelsConfig(), DEVICE)
    definitions = sys.modules[type(actor.model).__module__]
    assert actor.model.base_model.norm._get_name().startswith("Liger")
    assert not [
        name for name, value in vars(definitions).items() if isinstance(value, type) and "Liger" in value.__name__
    ]
    fused = results(actor)
    assert fused.keys() == plain.keys() == exact.keys()
    errors = {}
    for name, value in exact.items():
        size = value.norm()
        errors[name] = (float((fused[name] - value).norm() / size), float((plain[name] - value).norm() / size))
    worst = max(errors, key=lambda name: errors[name][0] / errors[name][1])
    print(type(actor.model).__name__, worst, errors[worst], "log-probs", errors["log-probs"])
    assert all(liger <= 1.5 * transformers + 1e-3 for liger, transformers in errors.values()), errors


@pytest.mark.parametrize("folder", ["qwen2"], indirect=True)
def test_value_models_also_compute_with_liger(folder: str) -> None:
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    plain, fused = (
        load_value_model(folder, ModelsConfig(fused_layers=setting), DEVICE, field="models.reward")
        for setting in ("off", "liger")
    )
    assert fused.model.base_model.norm._get_name() == "LigerRMSNorm"
    assert plain.model.base_model.norm._get_name() == "Qwen2RMSNorm"
    index = torch.arange(200, device=DEVICE)
    values = [model(**packed(200), index=index).detach() for model in (plain, fused)]
    assert (values[0] - values[1]).norm() < 0.02 * values[0].norm()


@pytest.mark.parametrize("setting", ["off", "liger"])
def test_a_forward_stores_the_activations_that_the_plan_counts(small: Path, setting: str) -> None:
    config = ModelsConfig(actor=str(small / "policy"), attention="varlen", fused_layers=setting)
    actor = load_actor(config.actor, config, DEVICE)
    inputs = packed(4096)
    for _ in range(2):  # the first forward compiles, which allocates memory that stays
        before = torch.cuda.memory_allocated()
        hidden = actor.hidden(**inputs)
        kept = torch.cuda.memory_allocated() - before - hidden.nbytes
        del hidden
    shape = read_shape(config.actor, field="models.actor", is_policy=True)
    planned = shape.activation_bytes(4096, 2, checkpointing=False, repeats_keys=True, is_fused=setting == "liger")
    print(setting, "kept", kept, "planned", planned)
    assert planned == pytest.approx(kept, rel=0.03)
