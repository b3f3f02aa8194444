"""Adapters learn and nothing else does; what the engine and an export get is the whole model, merged."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, FalconH1Config, GPT2Config

from hybrid_rl.batch import Packed, make_train_batch, pack
from hybrid_rl.checkpoints import export
from hybrid_rl.config import ConfigError, LoraConfig, ModelsConfig, OptimizerConfig, SyncConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.lora import ServedWeight, served_weights
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.sync import CopySync
from tests.conftest import make_rollout

CPU = torch.device("cpu")
LORA = LoraConfig(rank=2, alpha=6.0)
OPTIMIZER = OptimizerConfig(lr=3e-2, eps=1e-4, max_grad_norm=0.5)
LENGTHS = [(2, 5), (3, 1), (1, 8), (4, 3)]


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def policy(request, tiny, tmp_path_factory) -> Path:
    """A Llama, or a GPT-2, whose linear layers keep their weights transposed."""
    if request.param == "llama":
        return tiny / "policy"
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(2)
    ids = {"vocab_size": 40, "eos_token_id": 0, "bos_token_id": 1}
    model = AutoModelForCausalLM.from_config(GPT2Config(**ids, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny / "policy").save_pretrained(folder)
    return folder


def make_actor(folder: Path, world: World, stage: int = 2, lora: LoraConfig = LORA, **models: Any) -> DeepSpeedEngine:
    torch.manual_seed(11)
    actor = load_actor(str(folder), ModelsConfig(**models), CPU, lora=lora)
    return DeepSpeedEngine(actor, OPTIMIZER, zero_stage=stage, total_steps=9, world=world)


def make_critic(folder: Path, world: World, stage: int = 2, *, new_head: bool = False) -> DeepSpeedEngine:
    torch.manual_seed(12)
    field = "models.critic"
    critic = load_value_model(str(folder), ModelsConfig(), CPU, field=field, lora=LORA, new_head=new_head)
    return DeepSpeedEngine(critic, OPTIMIZER, zero_stage=stage, total_steps=9, world=world)


def make_packed(rows: list[int]) -> Packed:
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for i, (p, r) in enumerate(LENGTHS):
        ids = torch.randint(2, 38, (p + r,), generator=generator).tolist()
        rollouts.append(make_rollout(ids[:p], ids[p:], prompt_id=i))
    return pack(make_train_batch(rollouts), rows, CPU)


def actor_inputs(packed: Packed) -> dict[str, Any]:
    return packed_inputs(packed) | {"index": packed.response_index, "targets": packed.targets, "temperature": 0.8}


def step(trainer: DeepSpeedEngine, rows: list[int], *, is_critic: bool = False) -> float:
    packed = make_packed(rows)
    if is_critic:
        loss = (trainer.forward(**packed_inputs(packed), index=packed.response_index) - 0.5).square().sum()
    else:
        logprobs, entropy = trainer.forward(**actor_inputs(packed))
        loss = -(logprobs * packed.targets.remainder(3)).sum() - entropy.sum()
    trainer.backward(loss, is_last=True)
    return trainer.step()


def served(trainer: DeepSpeedEngine) -> dict[str, Tensor]:
    with trainer.gathered([name for name, _, _ in trainer.named_shapes()]) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def stored(trainer: DeepSpeedEngine) -> dict[str, tuple[bool, Tensor]]:
    """Return name -> (learns, value) of every parameter as it is kept, without merging."""
    return {name: (p.requires_grad, p.detach().clone()) for name, p in trainer.model.named_parameters()}


def peft_model(base: Path, trainer: DeepSpeedEngine, folder: Path, world: World) -> Any:
    export.export_adapter(folder, trainer, world)
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)


@pytest.mark.parametrize("targets", [None, "attention"])
def test_served_weights_are_those_that_peft_merges(policy, tmp_path, world, targets):
    names = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}["llama" if policy.name == "policy" else "gpt2"]
    actor = make_actor(policy, world, lora=LoraConfig(rank=2, alpha=6.0, target_modules=names if targets else None))
    step(actor, [0, 1])
    step(actor, [2])
    merged = dict(peft_model(policy, actor, tmp_path / "adapter", world).merge_and_unload().named_parameters())
    base = dict(AutoModelForCausalLM.from_pretrained(policy).named_parameters())
    found = served(actor)
    assert list(found) == list(base) and {n: t.shape for n, t in found.items()} == {n: p.shape for n, p in base.items()}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-6)
    changed = {name.split(".")[-2] for name, tensor in found.items() if not torch.equal(tensor, base[name])}
    all_layers = {"llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}}
    everything = all_layers.get("llama") if policy.name == "policy" else {"c_attn", "c_proj", "c_fc"}
    assert changed == (set(names) if targets else everything)


def test_merging_by_hand():
    """W = 256 and three products of 0.5 make 257.5, in bfloat16 258; added one by one they would be lost."""

    lora_a, lora_b = (torch.nn.Linear(*sizes, bias=False, dtype=torch.bfloat16) for sizes in ((1, 3), (3, 1)))
    lora_a.weight.data.fill_(0.5)
    lora_b.weight.data.fill_(1)
    parts = {"lora_A": {"default": lora_a}, "lora_B": {"default": lora_b}, "scaling": {"default": 1.0}}
    base = torch.nn.Parameter(torch.full((1, 1), 256.0, dtype=torch.bfloat16))
    merged = ServedWeight(base=base, layer=SimpleNamespace(**parts, fan_in_fan_out=False)).compute()
    assert merged.item() == 258 and merged.dtype == torch.bfloat16
    assert base.item() == 256


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_changes_adapters_only(policy, world, stage):
    actor = make_actor(policy, world, stage)
    before = served(actor)
    base = dict(AutoModelForCausalLM.from_pretrained(policy).named_parameters())
    assert all(torch.equal(tensor, base[name]) for name, tensor in before.items())  # B starts at 0
    adapter = actor.adapter()
    with actor._whole(list(actor.model.parameters())):
        frozen = {name: value for name, (learns, value) in stored(actor).items() if not learns}
    assert step(actor, [0, 1, 2]) > 0
    step(actor, [3])
    with actor._whole(list(actor.model.parameters())):
        after = {name: value for name, (learns, value) in stored(actor).items() if not learns}
    assert len(frozen) == len(base) and all(torch.equal(after[name], value) for name, value in frozen.items())
    assert all(not torch.equal(value, adapter[name]) for name, value in actor.adapter().items())


def test_state_bytes_count_what_learns(tiny, world):
    # Rank 2: 2 * (in + out) for q 32 64, k and v 32 32, o 64 32, gate and up 32 64, down 64 32; two layers.
    per_layer = 2 * (96 + 64 + 64 + 96 + 96 + 96 + 96)
    assert make_actor(tiny / "policy", world).optimizer_bytes() == 12 * 2 * per_layer
    assert make_critic(tiny / "reward", world, 3).optimizer_bytes() == 12 * (2 * per_layer + 32)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_critic_learns_adapters_and_head(tiny, world, stage):
    critic = make_critic(tiny / "policy", world, stage, new_head=True)
    before = served(critic)
    assert not before["score.weight"].any()
    for rows in ([0, 1], [2], [3]):
        step(critic, rows, is_critic=True)
    after = served(critic)
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "score"}


def test_stages_agree(policy, world):
    results = []
    for stage in (0, 2, 3):
        actor = make_actor(policy, world, stage)
        norms = [step(actor, rows) for rows in ([0, 1], [2, 3], [1, 2])]
        results.append((norms, served(actor), actor.adapter()))
    (norms, weights, adapter), *others = results
    for other_norms, other_weights, other_adapter in others:
        assert other_norms == pytest.approx(norms, rel=1e-5)
        for name, tensor in (weights | adapter).items():
            torch.testing.assert_close((other_weights | other_adapter)[name], tensor, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_reference_is_the_model_before_training(policy, world, stage):
    """Bit for bit; and asking for it in between changes nothing of the training."""
    actor, undisturbed = make_actor(policy, world, stage), make_actor(policy, world, stage)
    inputs = actor_inputs(make_packed([2, 0, 3]))
    with torch.no_grad():
        expected, _ = load_actor(str(policy), ModelsConfig(), CPU)(**inputs)
    for rows in ([0, 1], [2], [3]):
        assert torch.equal(actor.reference_forward(**inputs)[0], expected)
        assert step(actor, rows) == step(undisturbed, rows)
    with torch.no_grad():
        assert (actor.forward(**inputs)[0] - expected).abs().max() > 1e-3
    found = actor.adapter()
    assert all(torch.equal(found[name], tensor) for name, tensor in undisturbed.adapter().items())


def test_a_model_that_is_trained_itself_is_no_reference(tiny, world):
    actor = make_actor(tiny / "policy", world, lora=LoraConfig())
    assert not actor.has_adapters
    with pytest.raises(ValueError, match="no reference for itself"):
        actor.reference_forward(**actor_inputs(make_packed([0])))
    with pytest.raises(ValueError, match="no adapter to export"):
        export.export_adapter(tiny / "nowhere", actor, world)


def test_checkpointed_activations_give_the_same_gradients(tiny, world):
    plain, recomputed = (make_actor(tiny / "policy", world, gradient_checkpointing=on) for on in (False, True))
    for rows in ([0, 1], [2]):
        assert step(recomputed, rows) == pytest.approx(step(plain, rows), rel=1e-5)
    for name, tensor in plain.adapter().items():
        torch.testing.assert_close(recomputed.adapter()[name], tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_adapters_move_by_float32_steps(tiny, world, stage):
    actor = make_actor(tiny / "policy", world, stage, dtype="bfloat16")
    before = served(actor)
    for rows in ([0, 1], [2], [3]):
        step(actor, rows)
    after = served(actor)
    assert {t.dtype for t in after.values()} == {torch.bfloat16} == {t.dtype for t in actor.adapter().values()}
    assert all(torch.equal(after[n], before[n]) != ("proj" in n) for n in before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_leave_and_return_between_steps(tiny, world, dtype):
    moved, stayed = (make_actor(tiny / "policy", world, dtype=dtype) for _ in range(2))
    for rows in ([0, 1], [2], [3]):
        moved.offload()
        moved.reload()
        assert step(moved, rows) == step(stayed, rows)
    expected = stayed.adapter()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in moved.adapter().items())


def test_states_that_deepspeed_cannot_offload_are_refused(tiny, world):
    actor = make_actor(tiny / "policy", world, 1, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"memory.swap = deepspeed: .* update.zero_stage = 1 here; use 2 or 3"):
        actor.offload()


# Hand-over, export, checkpoints


@pytest.mark.parametrize("stage", [2, 3])
def test_engine_samples_by_the_trainers_logprobs(policy, world, stage):
    actor = make_actor(policy, world, stage)
    engine = HuggingFaceEngine(str(policy), dtype=torch.float32, device=CPU)
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
    assert (reference - expected).abs().max() > 1e-2  # with other weights it would show


@pytest.mark.parametrize("stage", [2, 3])
def test_exports_load_elsewhere_to_the_same_logits(policy, tmp_path, world, stage):
    actor = make_actor(policy, world, stage)
    for rows in ([0, 1], [2], [3]):
        step(actor, rows)
    tokenizer = load_tokenizer(str(policy))
    export.export(tmp_path / "whole", actor, tokenizer, world)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert not list((tmp_path / "whole").glob("adapter*"))
    tensors = served(actor)
    assert all(torch.equal(p, tensors[name]) for name, p in whole.named_parameters())
    adapted = peft_model(policy, actor, tmp_path / "adapter", world)
    assert {f.name for f in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(policy) and settings["r"] == 2
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
def test_resumed_is_uninterrupted(tiny, tmp_path, world, stage, is_critic):
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
def test_a_checkpoint_is_small(tmp_path, world, stage):
    """3.2 MB of weights; 2,048 of 800,000 numbers learn, kept four times at most, beside 60 kB of DeepSpeed's own."""
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


@pytest.mark.parametrize("unknown", ["lm_head", "qproj", "embed_tokens"])
def test_unknown_targets_are_refused(tiny, unknown):
    lora = LoraConfig(rank=2, target_modules=["q_proj", unknown])
    expected = rf"target_modules names {unknown}: LlamaForCausalLM .* it has down_proj, gate_proj, .*, v_proj$"
    with pytest.raises(ConfigError, match=expected):
        load_actor(str(tiny / "policy"), ModelsConfig(), CPU, lora=lora)


def test_layers_that_are_read_past_their_forward_are_refused(tmp_path):
    """Mamba's kernels take the weight of out_proj itself, and would leave its adapter out."""
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


def test_names_without_adapters_are_the_models_own(tiny):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    weights = served_weights(actor.model)
    assert {name: weight.base for name, weight in weights.items()} == dict(actor.model.named_parameters())
    assert all(weights[name].compute().data_ptr() == p.data_ptr() for name, p in actor.model.named_parameters())


# Two ranks

RANK_ROWS = [[[0, 1], [2, 3]], [[3, 0], [1]]]
"""Rows of each step and rank."""


def run_rank(folder: Path, tiny: Path, stage: int, world: World, *, alone: bool) -> dict[str, Any]:
    """Return what two steps make of actor and critic, when each rank has its rows or one rank has all."""
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
    """Run as one of two ranks, and leave the results in the folder."""
    folder, tiny = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    world = join_world()
    results = [run_rank(folder, tiny, stage, world, alone=False) for stage in (2, 3)]
    torch.save(results, folder / f"rank{world.rank}.pt")


def test_two_ranks_are_one(tiny, tmp_path, world, on_two_ranks):
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
