"""Weight sync, exports and checkpoints of a model with adapters."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.checkpoints import export
from hybrid_rl.config import ConfigError, LoraConfig, SyncConfig
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.sync import CopySync
from tests.conftest import make_rollout
from tests.models.adapters import CPU, actor_inputs, make_actor, make_critic, make_packed, peft_model, served, step


@pytest.mark.parametrize("stage", [2, 3])
def test_engine_samples_by_the_trainers_logprobs(lora_policy, world, stage):
    actor = make_actor(lora_policy, world, stage)
    engine = HuggingFaceEngine(str(lora_policy), dtype=torch.float32, device=CPU)
    sync = CopySync(actor, engine, SyncConfig(bucket_bytes=9000), CPU, Timeline())
    sync.sync()
    for rows in ([0, 1], [2], [3]):
        step(actor, rows)
    assert sync.sync().version == 2
    sampling = Sampling(temperature=0.8, max_tokens=12, stop_token_ids=())
    (generation,) = engine.generate([[5, 9, 3]], sampling, [1])
    rollout = make_rollout([5, 9, 3], generation.token_ids)
    inputs = actor_inputs(pack(make_train_batch([rollout]), [0], CPU))
    with torch.no_grad():
        found, reference = actor.forward(**inputs)[0], actor.reference_forward(**inputs)[0]
    expected = torch.tensor(generation.logprobs)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert (reference - expected).abs().max() > 1e-2  # other weights differ visibly


@pytest.mark.parametrize("stage", [2, 3])
def test_exports_load_elsewhere_to_the_same_logits(lora_policy, tmp_path, world, stage):
    actor = make_actor(lora_policy, world, stage)
    for rows in ([0, 1], [2], [3]):
        step(actor, rows)
    tokenizer = load_tokenizer(str(lora_policy))
    export.export(tmp_path / "whole", actor, tokenizer, world)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert not list((tmp_path / "whole").glob("adapter*"))
    tensors = served(actor)
    assert all(torch.equal(p, tensors[name]) for name, p in whole.named_parameters())
    adapted = peft_model(lora_policy, actor, tmp_path / "adapter", world)
    assert {f.name for f in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(lora_policy) and settings["r"] == 2
    packed = make_packed([2])
    with torch.no_grad():
        logits = [model(packed.input_ids).logits for model in (whole, adapted)]
        found, _ = actor.forward(**actor_inputs(packed))
    torch.testing.assert_close(logits[0], logits[1], atol=2e-5, rtol=0)
    expected = (logits[1][0, packed.response_index] / 0.8).log_softmax(-1).gather(-1, packed.targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def folder_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


@pytest.mark.parametrize("is_critic", [False, True], ids=["actor", "critic"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(tiny, tmp_path, world, stage, is_critic):
    make = make_critic if is_critic else make_actor
    source = tiny / ("reward" if is_critic else "policy")
    first = make(source, world, stage)
    for rows in ([0, 1], [2]):
        step(first, rows, is_critic=is_critic)
    first.snapshot().write(tmp_path, world.rank)
    resumed = make(source, world, stage)
    resumed.load(tmp_path)
    assert resumed.lr == first.lr
    for rows in ([3], [0, 2]):
        assert step(resumed, rows, is_critic=is_critic) == step(first, rows, is_critic=is_critic)
    expected = served(first)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in served(resumed).items())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_checkpoint_holds_the_adapters_only(tmp_path, world, stage):
    """Of 800,000 parameters 2,048 are trained, and each is stored at most four times."""
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=40, n_embd=128, n_layer=4, n_head=2, n_positions=64))
    model.save_pretrained(tmp_path / "model")
    actor = make_actor(tmp_path / "model", world, stage, LoraConfig(rank=1, target_modules=["c_attn"]))
    step(actor, [0, 1])
    actor.snapshot().write(tmp_path / "saved", world.rank)
    assert sum(t.numel() for t in actor.adapter().values()) == 4 * (128 + 3 * 128)
    assert 4 * 2048 < folder_bytes(tmp_path / "saved") < 0.05 * folder_bytes(tmp_path / "model")


@pytest.mark.parametrize(
    "lora", [LoraConfig(), LoraConfig(rank=2, alpha=8.0), LoraConfig(rank=2, alpha=6.0, target_modules=["q_proj"])]
)
def test_a_checkpoint_of_other_adapters_is_refused(tiny, tmp_path, world, lora):
    make_actor(tiny / "policy", world).snapshot().write(tmp_path, world.rank)
    with pytest.raises(ConfigError, match=r"models.lora gives .* was saved with .*'alpha': 6.0"):
        make_actor(tiny / "policy", world, lora=lora).load(tmp_path)
