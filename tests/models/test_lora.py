"""Training of adapters: only they change, the reference stays exact, and ZeRO stages and ranks agree.

As a program this file is one of two ranks: python <file> <folder> <tiny>.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconH1Config

from hybrid_rl.checkpoints import export
from hybrid_rl.config import ConfigError, LoraConfig, ModelsConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.lora import ServedWeight, served_weights
from tests.models.adapters import (
    CPU,
    LORA,
    actor_inputs,
    make_actor,
    make_critic,
    make_packed,
    peft_model,
    served,
    step,
    stored,
)


@pytest.mark.parametrize("targets", [None, "attention"])
def test_served_weights_equal_those_that_peft_merges(lora_policy, tmp_path, world, targets):
    names = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}["llama" if lora_policy.name == "policy" else "gpt2"]
    actor = make_actor(
        lora_policy, world, lora=LoraConfig(rank=2, alpha=6.0, target_modules=names if targets else None)
    )
    step(actor, [0, 1])
    step(actor, [2])
    merged = dict(peft_model(lora_policy, actor, tmp_path / "adapter", world).merge_and_unload().named_parameters())
    base = dict(AutoModelForCausalLM.from_pretrained(lora_policy).named_parameters())
    found = served(actor)
    assert list(found) == list(base) and {n: t.shape for n, t in found.items()} == {n: p.shape for n, p in base.items()}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-6)
    changed = {name.split(".")[-2] for name, tensor in found.items() if not torch.equal(tensor, base[name])}
    all_layers = {"llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}}
    everything = all_layers.get("llama") if lora_policy.name == "policy" else {"c_attn", "c_proj", "c_fc"}
    assert changed == (set(names) if targets else everything)


def test_a_merged_weight_is_rounded_once():
    """256 + 3 * 0.5 = 257.5 is 258 in bfloat16; added one by one and rounded each time, it would stay 256."""

    lora_a, lora_b = (torch.nn.Linear(*sizes, bias=False, dtype=torch.bfloat16) for sizes in ((1, 3), (3, 1)))
    lora_a.weight.data.fill_(0.5)
    lora_b.weight.data.fill_(1)
    parts = {"lora_A": {"default": lora_a}, "lora_B": {"default": lora_b}, "scaling": {"default": 1.0}}
    base = torch.nn.Parameter(torch.full((1, 1), 256.0, dtype=torch.bfloat16))
    merged = ServedWeight(base=base, layer=SimpleNamespace(**parts, fan_in_fan_out=False)).compute()
    assert merged.item() == 258 and merged.dtype == torch.bfloat16
    assert base.item() == 256


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_changes_only_adapters(lora_policy, world, stage):
    actor = make_actor(lora_policy, world, stage)
    before = served(actor)
    base = dict(AutoModelForCausalLM.from_pretrained(lora_policy).named_parameters())
    assert all(torch.equal(tensor, base[name]) for name, tensor in before.items())  # B starts at 0
    adapter = actor.adapter()
    frozen = {name: value for name, (is_trained, value) in stored(actor, stage).items() if not is_trained}
    assert step(actor, [0, 1, 2]) > 0
    step(actor, [3])
    after = {name: value for name, (is_trained, value) in stored(actor, stage).items() if not is_trained}
    assert len(frozen) == len(base) and all(torch.equal(after[name], value) for name, value in frozen.items())
    assert all(not torch.equal(value, adapter[name]) for name, value in actor.adapter().items())


def test_optimizer_bytes_count_trained_parameters_only(tiny, world):
    # Rank 2: 2 * (in + out) for q 32 64, k and v 32 32, o 64 32, gate and up 32 64, down 64 32; two layers.
    per_layer = 2 * (96 + 64 + 64 + 96 + 96 + 96 + 96)
    assert make_actor(tiny / "policy", world).optimizer_bytes() == 12 * 2 * per_layer
    assert make_critic(tiny / "reward", world, 3).optimizer_bytes() == 12 * (2 * per_layer + 32)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_critic_trains_adapters_and_head(tiny, world, stage):
    critic = make_critic(tiny / "policy", world, stage, new_head=True)
    before = served(critic)
    assert not before["score.weight"].any()
    for rows in ([0, 1], [2], [3]):
        step(critic, rows, is_critic=True)
    after = served(critic)
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "score"}


def test_zero_stages_agree(lora_policy, world):
    results = []
    for stage in (0, 2, 3):
        actor = make_actor(lora_policy, world, stage)
        norms = [step(actor, rows) for rows in ([0, 1], [2, 3], [1, 2])]
        results.append((norms, served(actor), actor.adapter()))
    (norms, weights, adapter), *others = results
    for other_norms, other_weights, other_adapter in others:
        assert other_norms == pytest.approx(norms, rel=1e-5)
        for name, tensor in (weights | adapter).items():
            torch.testing.assert_close((other_weights | other_adapter)[name], tensor, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_reference_is_the_model_before_training(lora_policy, world, stage):
    """The outputs are equal bit for bit, and computing them does not change training."""
    actor, undisturbed = make_actor(lora_policy, world, stage), make_actor(lora_policy, world, stage)
    inputs = actor_inputs(make_packed([2, 0, 3]))
    with torch.no_grad():
        expected, _ = load_actor(str(lora_policy), ModelsConfig(), CPU)(**inputs)
    for rows in ([0, 1], [2], [3]):
        assert torch.equal(actor.reference_forward(**inputs)[0], expected)
        assert step(actor, rows) == step(undisturbed, rows)
    with torch.no_grad():
        assert (actor.forward(**inputs)[0] - expected).abs().max() > 1e-3
    found = actor.adapter()
    assert all(torch.equal(found[name], tensor) for name, tensor in undisturbed.adapter().items())


def test_a_model_without_adapters_has_no_reference_and_no_adapter(tiny, world):
    actor = make_actor(tiny / "policy", world, lora=LoraConfig())
    assert not actor.has_adapters
    with pytest.raises(ValueError, match="the model has no adapters, so its own weights are trained"):
        actor.reference_forward(**actor_inputs(make_packed([0])))
    with pytest.raises(ValueError, match="no adapter to export"):
        export.export_adapter(tiny / "nowhere", actor, world)


def test_gradient_checkpointing_gives_the_same_gradients(tiny, world):
    plain, recomputed = (make_actor(tiny / "policy", world, gradient_checkpointing=on) for on in (False, True))
    for rows in ([0, 1], [2]):
        assert step(recomputed, rows) == pytest.approx(step(plain, rows), rel=1e-5)
    for name, tensor in plain.adapter().items():
        torch.testing.assert_close(recomputed.adapter()[name], tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_adapters_have_float32_master_weights(tiny, world, stage):
    actor = make_actor(tiny / "policy", world, stage, dtype="bfloat16")
    before = served(actor)
    for rows in ([0, 1], [2], [3]):
        step(actor, rows)
    after = served(actor)
    assert {t.dtype for t in after.values()} == {torch.bfloat16} == {t.dtype for t in actor.adapter().values()}
    assert all(torch.equal(after[n], before[n]) != ("proj" in n) for n in before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_optimizer_states_between_steps_changes_nothing(tiny, world, dtype):
    moved, stayed = (make_actor(tiny / "policy", world, dtype=dtype) for _ in range(2))
    for rows in ([0, 1], [2], [3]):
        moved.offload()
        moved.reload()
        assert step(moved, rows) == step(stayed, rows)
    expected = stayed.adapter()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in moved.adapter().items())


def test_offloading_that_deepspeed_lacks_is_refused(tiny, world):
    actor = make_actor(tiny / "policy", world, 1, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"memory.swap = deepspeed: .* update.zero_stage = 1 here; use 2 or 3"):
        actor.offload()


@pytest.mark.parametrize("unknown", ["lm_head", "qproj", "embed_tokens"])
def test_unknown_targets_are_refused(tiny, unknown):
    lora = LoraConfig(rank=2, target_modules=["q_proj", unknown])
    expected = rf"target_modules names {unknown}: LlamaForCausalLM .* it has down_proj, gate_proj, .*, v_proj$"
    with pytest.raises(ConfigError, match=expected):
        load_actor(str(tiny / "policy"), ModelsConfig(), CPU, lora=lora)


def test_layers_whose_weight_is_read_without_a_call_are_refused(tmp_path):
    """Mamba's kernels read the weight of out_proj, which would ignore its adapter."""
    ids = {"vocab_size": 40, "eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 0}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4}
    config = FalconH1Config(**ids, **sizes, **mamba, intermediate_size=48, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"models.lora.target_modules, of down_proj, .*: .*'out_proj' is incompatible"
    ):
        load_actor(str(tmp_path), ModelsConfig(), CPU, lora=LORA)
    load_actor(str(tmp_path), ModelsConfig(), CPU, lora=LoraConfig(rank=2, target_modules=["q_proj", "v_proj"]))


def test_without_adapters_the_served_weights_are_the_parameters(tiny):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    weights = served_weights(actor.model)
    assert {name: weight.base for name, weight in weights.items()} == dict(actor.model.named_parameters())
    assert all(weights[name].compute().data_ptr() == p.data_ptr() for name, p in actor.model.named_parameters())


# Two ranks

RANK_ROWS = [[[0, 1], [2, 3]], [[3, 0], [1]]]
"""Rows of each step and rank."""


def run_rank(folder: Path, tiny: Path, stage: int, world: World, *, alone: bool) -> dict[str, Any]:
    """Return norms, weights and reference of actor and critic after two steps, on the rows of this rank or on all."""
    actor, critic = make_actor(tiny / "policy", world, stage), make_critic(tiny / "reward", world, stage)
    norms = []
    for ranks in RANK_ROWS:
        rows = [row for rows in ranks for row in rows] if alone else ranks[world.rank]
        reference, _ = actor.reference_forward(**actor_inputs(make_packed([2])))
        norms += [step(actor, rows), step(critic, rows, is_critic=True)]
    weights = {f"{name}.{key}": t for name, e in (("a", actor), ("c", critic)) for key, t in served(e).items()}
    saved = folder / f"two-ranks-{stage}"
    if not alone:
        actor.snapshot().write(saved, world.rank)
        world.barrier()
        other = make_actor(tiny / "policy", world, stage)
        other.load(saved)
        found = served(other)
        weights |= {f"r.{key}": t for key, t in found.items()}
    return {"norms": norms, "weights": weights | actor.adapter(), "reference": reference}


def main() -> None:
    """Run as one of two ranks and save the results in the folder."""
    folder, tiny = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    world = join_world()
    results = [run_rank(folder, tiny, stage, world, alone=False) for stage in (2, 3)]
    torch.save(results, folder / f"rank{world.rank}.pt")


def test_two_ranks_train_like_one(tiny, tmp_path, world, on_two_ranks):
    results = on_two_ranks(__file__)
    for i, stage in enumerate((2, 3)):
        expected = run_rank(tmp_path, tiny, stage, world, alone=True)
        for result in (results[0][i], results[1][i]):
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
            assert torch.equal(result["reference"], results[0][i]["reference"])
            torch.testing.assert_close(result["reference"], expected["reference"], atol=1e-5, rtol=0)
            for name, tensor in expected["weights"].items():
                torch.testing.assert_close(result["weights"][name], tensor, atol=1e-5, rtol=0, msg=name)
            resumed = {name[2:]: t for name, t in result["weights"].items() if name.startswith("r.")}
            assert resumed and all(torch.equal(t, result["weights"][f"a.{name}"]) for name, t in resumed.items())


if __name__ == "__main__":
    main()
