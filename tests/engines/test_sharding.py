"""A model that loads as ZeRO-3 shards is the model that loads whole, and no rank ever holds more than its shards."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybrid_rl.config import ConfigError, LoraConfig, ModelsConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.deepspeed.settings import deepspeed_settings
from hybrid_rl.engines.deepspeed.sharding import ZeroSharder
from hybrid_rl.memory.tenants import FrozenModule
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.packed import Actor, PackedModel, ValueModel, packed_inputs
from hybrid_rl.models.sharding import held_weights
from tests.conftest import packed_rows
from tests.engines.conftest import CPU, SETTINGS, inputs_of, take_step, weights_of
from tests.models.families import CONFIGS, FAMILIES, PADDED, save_random

PIECES = [[5, 9, 12, 30, 4], [8, 7, 6, 5, 4, 3, 0]], [[3, 2, 2, 0]]
MODELS = ModelsConfig(dtype="float32")


def make_sharder(world: World, *, is_frozen: bool = False) -> ZeroSharder:
    settings = deepspeed_settings(SETTINGS, zero_stage=3, dtype=torch.float32, device=CPU)
    return ZeroSharder(world, settings, gathers_layers=is_frozen)


def load_policy(folder: Path, world: World, *, is_sharded: bool, rank: int = 0) -> Actor:
    sharder = make_sharder(world) if is_sharded else None
    return load_actor(str(folder), MODELS, CPU, lora=LoraConfig(rank=rank), sharder=sharder)


def held_elements(module: PackedModel) -> dict[str, tuple[int, int]]:
    """Return name -> elements of a parameter that are whole on this rank, and elements of its shard."""
    parameters: list[tuple[str, Any]] = list(module.model.named_parameters())
    return {name: (p.numel(), p.ds_tensor.numel() if hasattr(p, "ds_tensor") else 0) for name, p in parameters}


def steps(actor: Actor, world: World) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Take three optimizer steps; return their gradient norms and the weights after them."""
    engine = DeepSpeedEngine(actor, SETTINGS, zero_stage=3, total_steps=6, world=world)
    norms = [take_step(engine, packed_rows(*PIECES)) for _ in range(3)]
    return norms, weights_of(engine)


def values(module: ValueModel) -> torch.Tensor:
    (packed,) = packed_rows(PIECES[0])
    with torch.no_grad():
        return module(**packed_inputs(packed), index=packed.response_index)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3-moe", "gemma2", "bloom", "lfm2"])
def test_sharded_models_of_every_kind_train_as_whole_ones(tiny, tmp_path, world, family):
    """Among them fused experts, transposed weights, padded batches, and a layer that reads another one's weight."""
    config = (CONFIGS | FAMILIES | PADDED)[family]()
    folder = save_random(AutoModelForCausalLM, config, tmp_path, tiny / "policy")
    whole, sharded = (steps(load_policy(folder, world, is_sharded=each), world) for each in (False, True))
    assert sharded[0] == whole[0]
    assert sharded[1].keys() == whole[1].keys()
    assert all(torch.equal(sharded[1][name], whole[1][name]) for name in whole[1])


def test_a_folder_with_two_values_for_tied_weights_is_refused(tiny, tmp_path, world):
    """transformers compares tied weights by the tensors, which are empty once they are sharded."""
    shutil.copytree(tiny / "policy", tmp_path / "both")
    file = tmp_path / "both" / "model.safetensors"
    tensors = load_file(file)
    for factor in (1, 2):
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] * factor}, file, {"format": "pt"})
        if factor == 1:
            actor = load_policy(tmp_path / "both", world, is_sharded=True)
            assert actor.model.lm_head.weight is actor.model.model.embed_tokens.weight
        else:
            with pytest.raises(ConfigError, match=r"config.json ties lm_head.weight to model.embed_tokens.weight"):
                load_policy(tmp_path / "both", world, is_sharded=True)


def test_a_folder_that_lacks_a_tensor_is_refused_as_a_whole_model_is(tiny, tmp_path, world):
    shutil.copytree(tiny / "policy", tmp_path / "part")
    file = tmp_path / "part" / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if n != "model.norm.weight"}, file, {"format": "pt"})
    messages = []
    for is_sharded in (False, True):
        with pytest.raises(ConfigError) as refused:
            load_policy(tmp_path / "part", world, is_sharded=is_sharded)
        messages.append(str(refused.value))
    assert "lacks 1 of its tensors (model.norm.weight)" in messages[0]
    assert messages[1] == messages[0]


def write_heads(tiny: Path, root: Path) -> list[Path]:
    """Write the reward model with its head under its own name, under another one with a bias, and without a head."""
    tensors = load_file(tiny / "reward" / "model.safetensors")
    body = {name: t for name, t in tensors.items() if name != "score.weight"}
    head = tensors["score.weight"]
    bias = torch.tensor([0.5])
    contents = {
        "own": tensors,
        "own_with_bias": tensors | {"score.bias": bias},
        "other": body | {"v_head.summary.weight": head, "v_head.summary.bias": bias},
        "none": body,
    }
    for name, content in contents.items():
        shutil.copytree(tiny / "reward", root / name)
        save_file(content, root / name / "model.safetensors", {"format": "pt"})
    config = json.loads((root / "none" / "config.json").read_text())
    (root / "none" / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return [root / name for name in contents]


def compare_value_models(folders: list[Path], world: World) -> list[tuple[bool, float]]:
    """Return for each folder whether sharded and whole model give the same values, and their largest size."""
    found = []
    for folder in folders:
        whole = values(load_value_model(str(folder), MODELS, CPU, field="models.critic", new_head=True))
        for sharder in (make_sharder(world), make_sharder(world, is_frozen=True)):
            model = load_value_model(str(folder), MODELS, CPU, field="models.critic", new_head=True, sharder=sharder)
            sharded = values(model)
            found.append((torch.allclose(sharded, whole, atol=1e-6), float(whole.abs().max())))
    return found


def test_value_heads_load_sharded_from_wherever_they_are(tiny, tmp_path, world):
    found = compare_value_models(write_heads(tiny, tmp_path), world)
    assert all(is_same for is_same, _ in found)
    sizes = [size for _, size in found]
    assert min(sizes[:6]) > 0 and max(sizes[6:]) == 0


def test_a_released_model_leaves_no_weights_on_the_device_and_computes_the_same_after_a_restore(tiny, world):
    sharder = make_sharder(world, is_frozen=True)
    module = load_value_model(str(tiny / "reward"), MODELS, CPU, field="models.reward", sharder=sharder)
    before, held = values(module), held_weights(module)
    tenant = FrozenModule(module, weights=held, before_release=module.layer_gathering.free_gathered)
    num_bytes = sum(t.nbytes for t in [*held.values(), *module.buffers()])
    for copied in (num_bytes, 0):
        assert tenant.release() == copied
        assert [t.numel() for t in [*held.values(), *module.parameters(), *module.buffers()] if t.numel()] == []
        assert tenant.restore() == num_bytes
        assert torch.equal(values(module), before)


def test_weights_of_a_forward_that_failed_are_freed(tiny, world):
    actor = load_actor(str(tiny / "policy"), MODELS, CPU, sharder=make_sharder(world, is_frozen=True))
    (packed,) = packed_rows(PIECES[0])
    with torch.no_grad():
        expected, _ = actor(**inputs_of(packed))
        with pytest.raises(IndexError):
            actor(**inputs_of(packed) | {"input_ids": packed.input_ids + 1000})
        assert any(whole for whole, _ in held_elements(actor).values())
        actor.layer_gathering.free_gathered()
        assert not any(whole for whole, _ in held_elements(actor).values())
        assert torch.equal(actor(**inputs_of(packed))[0], expected)


def main() -> None:
    """Load and train on two ranks, whole and sharded, and keep what both give."""
    folder, tiny = Path(sys.argv[1]), Path(sys.argv[2])
    world = join_world()
    kept: dict[str, Any] = {}
    for is_sharded in (False, True):
        for rank in (0, 4):
            torch.manual_seed(0)
            actor = load_policy(tiny / "policy", world, is_sharded=is_sharded, rank=rank)
            held = held_elements(actor) if is_sharded and not rank else {}
            (packed,) = packed_rows(PIECES[world.rank])
            with torch.no_grad():
                logprobs, _ = actor(**inputs_of(packed))
            kept[f"{is_sharded} {rank}"] = (held, logprobs, *steps(actor, world))
    heads = folder / f"heads{world.rank}"
    kept["heads"] = compare_value_models(write_heads(tiny, heads)[1:3], world)
    torch.save(kept, folder / f"rank{world.rank}.pt")


@pytest.fixture(scope="module")
def ranks(on_two_ranks) -> list[dict[str, Any]]:
    return on_two_ranks(__file__)


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapters"])
def test_two_ranks_train_sharded_models_as_whole_ones(ranks, rank):
    for kept in ranks:
        (_, logprobs, norms, weights), whole = kept[f"True {rank}"], kept[f"False {rank}"]
        torch.testing.assert_close(logprobs, whole[1], atol=1e-6, rtol=0)
        assert norms == pytest.approx(whole[2], rel=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole[3][name], atol=1e-6, rtol=0, msg=name)


def test_each_of_two_ranks_holds_half_of_every_weight(ranks, tiny):
    tensors = load_file(tiny / "policy" / "model.safetensors")
    for kept in ranks:
        held = kept["True 0"][0]
        assert held == {name: (0, -(-tensors[name].numel() // 2)) for name in held}
        assert len(held) == len(tensors)


def test_value_heads_are_the_same_on_two_ranks(ranks):
    assert all(is_same for kept in ranks for is_same, _ in kept["heads"])


if __name__ == "__main__":
    main()
