"""A moving reference and the EMA of the policy follow their formulas, at every ZeRO stage and over two ranks."""

import copy
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_rl.checkpoints import export
from hybrid_rl.config import Config, ConfigError, LoraConfig, ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.deepspeed.sharding import frozen_sharder
from hybrid_rl.memory.tenants import FrozenModule
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import Actor
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.steps import ema as ema_module
from hybrid_rl.steps.ema import EmaWeights, MovingReference, blend_reference

CPU = torch.device("cpu")
INPUTS: dict[str, Any] = {
    "input_ids": torch.tensor([[5, 9, 12, 30, 4]]),
    "position_ids": torch.arange(5)[None],
    "cu_seqlens": torch.tensor([0, 5], dtype=torch.int32),
    "max_length": 5,
    "index": torch.arange(4),
    "targets": torch.tensor([9, 12, 30, 4]),
    "temperature": 1.0,
}


def load(
    folder: Path, dtype: str = "float32", *, fill: float | None = None, rank: int = 0, shards: World | None = None
) -> Actor:
    sharder = frozen_sharder(Config(models=ModelsConfig(dtype=dtype)), shards, is_sharded=True) if shards else None
    lora = LoraConfig(rank=rank)
    actor = load_actor(str(folder / "policy"), ModelsConfig(dtype=dtype), CPU, lora=lora, sharder=sharder)
    for parameter in actor.parameters():
        if fill is not None:
            parameter.data.fill_(fill)
    return actor


def make_engine(module: Actor, stage: int, world: World) -> DeepSpeedEngine:
    return DeepSpeedEngine(module, OptimizerConfig(lr=1e-2), zero_stage=stage, total_steps=9, world=world)


def take_step(engine: DeepSpeedEngine) -> None:
    engine.backward(engine.forward(**INPUTS)[0].sum(), is_last=True)
    engine.step()


def weights_of(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
        return {name: t.clone() for name, t in tensors.items()}


def follow(folder: Path, stage: int, world: World, *, rank: int = 0) -> dict[str, Any]:
    """Return the weights before and after three steps, and the reference and the EMA after them."""
    engine = make_engine(load(folder, rank=rank), stage, world)
    reference, shards, ema = load(folder), load(folder, shards=world), EmaWeights(engine, 0.75, world)
    visited = [weights_of(engine)]
    for _ in range(3):
        take_step(engine)
        ema.update()
        for each in (reference, shards):
            blend_reference(each, engine, 0.25)
        visited.append(weights_of(engine))
    with deepspeed.zero.GatheredParameters(list(shards.parameters())):
        followed, gathered = (
            {name: p.detach().clone() for name, p in each.model.named_parameters()} for each in (reference, shards)
        )
    return {"visited": visited, "reference": followed, "sharded": gathered, "ema": averages(ema)}


def averages(ema: EmaWeights) -> dict[str, Tensor]:
    """Return name -> average; a collective."""
    with ema.gathered([name for name, _, _ in ema.named_shapes()]) as tensors:
        return dict(tensors)


def main() -> None:
    """Run as one of two ranks, at ZeRO 2 and 3, and gather few weights at a time, in several buckets."""
    torch.set_num_threads(1)
    ema_module.GATHERED_BYTES = 10_000
    world = join_world()
    results: dict[Any, Any] = {stage: follow(Path(sys.argv[2]), stage, world) for stage in (2, 3)}
    results["saved"] = save_and_load(Path(sys.argv[2]), Path(sys.argv[1]), world)
    torch.save(results, Path(sys.argv[1], f"rank{world.rank}.pt"))


def save_and_load(tiny: Path, folder: Path, world: World) -> list[dict[str, Tensor]]:
    """Save a reference as shards, load it whole, save that and load it as shards; return the weights of all three."""
    engine = make_engine(load(tiny), 2, world)
    take_step(engine)
    found = []
    for number, is_sharded in enumerate((True, False, True)):
        module = load(tiny, shards=world if is_sharded else None)
        reference = MovingReference(module, engine, None, world)
        if number:
            reference.load(folder / f"reference{number - 1}")
        else:
            reference.blend(engine, 0.5)
        reference.snapshot().write(folder / f"reference{number}", world.rank)
        world.barrier()
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            found.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return found


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("alpha, expected", [(0.25, 1.5), (0.5, 2.0), (1.0, 3.0)])
def test_blend_by_hand(tiny, world, alpha, expected, dtype):
    """Weights of 1 move towards weights of 3 by the fraction alpha."""
    reference = load(tiny, dtype, fill=1.0)
    engine = make_engine(load(tiny, dtype, fill=3.0), 2, world)
    blend_reference(reference, engine, alpha)
    assert all(p.dtype == getattr(torch, dtype) and (p == expected).all() for p in reference.parameters())
    assert all((w == 3).all() for w in weights_of(engine).values())


@pytest.mark.parametrize("stage, rank", [(0, 0), (1, 0), (2, 0), (3, 0), (2, 4), (3, 4)])
def test_reference_and_ema_equal_the_formula(tiny, world, stage, rank):
    """Low-rank adapters count as merged into the weights, as the engine serves them."""
    found = follow(tiny, stage, world, rank=rank)
    for name, start in found["visited"][0].items():
        reference = ema = start.double()
        for weights in found["visited"][1:]:
            reference = 0.75 * reference + 0.25 * weights[name].double()
            ema = 0.75 * ema + 0.25 * weights[name].double()
        for kind, expected in (("reference", reference), ("sharded", reference), ("ema", ema)):
            torch.testing.assert_close(found[kind][name].double(), expected, atol=1e-6, rtol=1e-6, msg=f"{kind} {name}")
    moved = {name: (w - found["visited"][0][name]).abs().max() for name, w in found["ema"].items()}
    assert {name for name, change in moved.items() if change > 1e-4} == {n for n in moved if not rank or "_proj" in n}


@pytest.fixture(scope="module")
def ranks(on_two_ranks) -> list[dict[Any, Any]]:
    return on_two_ranks(__file__)


def test_two_ranks_give_what_one_gives(tiny, world, ranks):
    """Each rank holds a reference, whole or as shards, and the EMA of some weights."""
    for stage in (2, 3):
        expected = follow(tiny, stage, world)
        for rank in ranks:
            for kind in ("reference", "sharded", "ema"):
                assert rank[stage][kind].keys() == expected[kind].keys()
                for name, tensor in expected[kind].items():
                    torch.testing.assert_close(rank[stage][kind][name], tensor, atol=1e-5, rtol=0, msg=name)


def test_a_checkpoint_of_shards_is_read_as_a_whole_reference_and_back(tiny, ranks):
    before = dict(load(tiny).named_parameters())
    for rank in ranks:
        first, *others = rank["saved"]
        assert not torch.equal(first["model.model.norm.weight"], before["model.model.norm.weight"])
        for other in others:
            assert other.keys() == first.keys() == before.keys()
            assert all(torch.equal(other[name], weight) for name, weight in first.items())


def test_reference_survives_a_checkpoint(tiny, world, tmp_path):
    engine = make_engine(load(tiny), 2, world)
    module = load(tiny)
    reference = MovingReference(module, engine, None, world)
    take_step(engine)
    reference.blend(engine, 0.6)
    reference.snapshot().write(tmp_path / "reference", 0)
    other = load(tiny)
    assert not torch.equal(other.model.model.norm.weight, module.model.model.norm.weight)
    again = MovingReference(other, engine, None, world)
    again.load(tmp_path / "reference")
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True))
    logprobs, _ = again(**INPUTS)
    assert torch.equal(logprobs, module(**INPUTS)[0])
    with pytest.raises(ConfigError, match="has no part"):
        again.load(tmp_path)


def test_reference_of_another_shape_is_refused(tiny, world):
    engine = make_engine(load(tiny), 2, world)
    other = load(tiny)
    other.model.model.norm.weight = torch.nn.Parameter(torch.ones(5))
    with pytest.raises(ConfigError, match=r"1 differ in name or shape, such as model\.norm\.weight"):
        MovingReference(other, engine, None, world)


def test_released_reference_is_saved_and_loaded_on_the_host(tiny, world, tmp_path):
    """A release frees the device copy; the blended weights return with the next restore."""
    engine = make_engine(load(tiny).to(world.device), 2, world)
    module = load(tiny).to(world.device)
    tenant = FrozenModule(module)
    reference = MovingReference(module, engine, tenant, world)
    num_bytes = tenant.release()
    before = {name: t.clone() for name, t in tenant.parameters().items()}
    tenant.restore()
    take_step(engine)
    reference.blend(engine, 0.5)
    expected = {name: p.detach().cpu() for name, p in module.named_parameters()}
    assert tenant.release() == num_bytes and tenant.restore() > 0 and tenant.release() == 0
    reference.snapshot().write(tmp_path, 0)
    assert all(p.numel() == 0 for p in module.parameters())
    tenant.restore()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.cpu(), expected[name]) and not torch.equal(before[name], expected[name])
    fresh = load(tiny).to(world.device)
    other = FrozenModule(fresh)
    other.release()
    MovingReference(module, engine, other, world).load(tmp_path)
    other.restore()
    assert all(torch.equal(p.cpu(), expected[name]) for name, p in fresh.named_parameters())


def test_ema_continues_from_its_file(tiny, world, tmp_path):
    engine = make_engine(load(tiny), 2, world)
    ema = EmaWeights(engine, 0.9, world)
    take_step(engine)
    ema.update()
    ema.snapshot().write(tmp_path / "ema", 0)
    other = EmaWeights(engine, 0.9, world)  # starts from weights that have moved
    assert not torch.equal(averages(other)["model.norm.weight"], averages(ema)["model.norm.weight"])
    other.load(tmp_path / "ema")
    take_step(engine)
    for each in (ema, other):
        each.update()
    assert all(torch.equal(w, averages(other)[name]) for name, w in averages(ema).items())


def test_ema_adds_up_changes_below_the_precision_of_bfloat16(tiny, world, tmp_path):
    """From 1, a hundred times a thousandth of the way to 1.0078125: 1 + (1 - 0.999^100) / 128 = 1.0007438."""
    actor = load(tiny, "bfloat16", fill=1.0)
    engine = make_engine(actor, 2, world)
    ema = EmaWeights(engine, 0.999, world)
    for parameter in actor.parameters():
        parameter.data.fill_(1.0078125)
    for _ in range(100):
        ema.update()
    assert all(w.dtype == torch.bfloat16 for w in averages(ema).values())
    ema.snapshot().write(tmp_path, 0)
    held = load_file(tmp_path / "part_00000.safetensors")["model.norm.weight"]
    assert held.dtype == torch.float32 and held.tolist() == pytest.approx([1.0007438] * 32, abs=1e-6)


def test_ema_is_exported_as_a_model(tiny, world, tmp_path):
    engine = make_engine(load(tiny), 2, world)
    ema = EmaWeights(engine, 0.5, world)
    take_step(engine)
    ema.update()
    actors = copy.deepcopy(weights_of(engine))
    tokenizer = load_tokenizer(str(tiny / "policy"))
    export.export_weights(tmp_path / "export_ema", engine, ema, tokenizer, world)
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export_ema").named_parameters())
    assert exported.keys() == averages(ema).keys()
    assert all(torch.equal(exported[name], w) for name, w in averages(ema).items())
    assert not torch.equal(exported["model.norm.weight"], actors["model.norm.weight"])
    assert all(torch.equal(w, actors[name]) for name, w in weights_of(engine).items())
    assert load_tokenizer(str(tmp_path / "export_ema")).get_vocab() == tokenizer.get_vocab()


if __name__ == "__main__":
    main()
