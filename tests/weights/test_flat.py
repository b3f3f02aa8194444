"""DeepSpeed steps in the shared buffer, bit for bit as in its own, and whoever moves a weight out of it is found."""

import sys
from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import Prompt, Rollout, make_train_batch, pack
from hybrid_rl.config import ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import TrainEngine
from hybrid_rl.models.loading import load_actor, packed_inputs
from hybrid_rl.weights.bucket import open_shared
from hybrid_rl.weights.flat import FlatWeights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


def make(tiny: Path, world: World, *, stage: int, dtype: str, kind: str = "adamw", is_flat: bool = True):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(dtype=dtype), CPU)
    flat = FlatWeights(actor.model, world) if is_flat else None
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, kind=kind)
    return TrainEngine(actor, config, zero_stage=stage, total_steps=9, world=world, flat=flat), flat


def step(trainer: TrainEngine) -> float:
    prompt = Prompt(prompt_id=0, text="", token_ids=[5, 9])
    rollout = Rollout(
        prompt=prompt, sequence_id=0, response_ids=[3, 8, 0], rollout_logprobs=[], is_truncated=False, text=""
    )
    packed = pack(make_train_batch([rollout]), [0], CPU)
    logprobs, _ = trainer.forward(
        **packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0
    )
    trainer.backward(-logprobs.sum(), is_last=True)
    return trainer.step()


def weights(trainer: TrainEngine) -> dict[str, torch.Tensor]:
    with trainer.gathered([name for name, _, _ in trainer.named_shapes()]) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


CASES = [(0, "float32", "adamw"), (1, "float32", "adamw"), (2, "float32", "adamw")]
CASES += [(1, "bfloat16", "adamw"), (2, "bfloat16", "adamw"), (1, "bfloat16", "cpu_adam"), (2, "bfloat16", "cpu_adam")]


@pytest.mark.parametrize("stage, dtype, kind", CASES)
def test_steps_are_those_without_the_buffer_and_are_seen_through_it(tiny, world, stage, dtype, kind):
    trainer, flat = make(tiny, world, stage=stage, dtype=dtype, kind=kind)
    plain, _ = make(tiny, world, stage=stage, dtype=dtype, kind=kind, is_flat=False)
    shared = flat.share()
    seen = open_shared(shared.handle, CPU)  # a mapping of its own, as another process has it
    before = weights(trainer)
    assert [step(trainer) for _ in range(3)] == [step(plain) for _ in range(3)]
    expected = weights(plain)
    for slot in shared.slots:
        assert torch.equal(slot.view(seen), expected[slot.name]), slot.name
        assert not torch.equal(expected[slot.name], before[slot.name])
    assert flat.moved() == []
    flat.unlink()


def test_buffer_has_no_second_copy(tiny, world):
    trainer, flat = make(tiny, world, stage=2, dtype="bfloat16")
    mine = {group.untyped_storage().data_ptr() for group in trainer._engine.optimizer.bit16_groups_flat}
    assert mine == {flat.ordered()[0].untyped_storage().data_ptr()}
    flat.unlink()


def test_weight_that_was_moved_is_named(tiny, world):
    trainer, flat = make(tiny, world, stage=2, dtype="float32")
    name = "model.layers.1.mlp.up_proj.weight"
    parameter = trainer.model.get_parameter(name)
    parameter.data = parameter.data.clone()
    assert flat.moved() == [name]
    flat.unlink()


def test_deepspeed_that_copies_is_an_error(tiny, world, monkeypatch):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    flat = FlatWeights(actor.model, world)
    flat.unlink()
    with (
        pytest.raises(RuntimeError, match=r"moved model\.embed_tokens\.weight out of the shared buffer"),
        flat.adopted(),
    ):
        actor.model.model.embed_tokens.weight.data = actor.model.model.embed_tokens.weight.data.clone()


def test_neighbours_in_another_order_are_an_error(tiny, world):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    flat = FlatWeights(actor.model, world)
    flat.unlink()
    ordered = [p.data for p in flat.ordered() if p.ndim >= 2]
    assert flat._flat(ordered).numel() == sum(p.numel() for p in ordered)
    with pytest.raises(RuntimeError, match="not where the shared layout has it"):
        flat._flat(ordered[::-1])


@pytest.fixture(scope="module")
def ranks(on_two_ranks):
    return on_two_ranks(__file__)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_gather_into_their_buffers(ranks, stage):
    for rank in (rank[stage] for rank in ranks):
        assert rank["moved"] == []
        assert all(torch.equal(weight, ranks[0][stage]["shared"][name]) for name, weight in rank["shared"].items())
        assert all(torch.equal(weight, rank["plain"][name]) for name, weight in rank["shared"].items())


def learn(tiny: Path, world: World, stage: int) -> dict:
    """Take two steps with the buffer and without, as one of two ranks."""
    trainer, flat = make(tiny, world, stage=stage, dtype="float32")
    plain, _ = make(tiny, world, stage=stage, dtype="float32", is_flat=False)
    for _ in range(2):
        step(trainer)
        step(plain)
    seen = open_shared(flat.share().handle, CPU)
    flat.unlink()
    shared = {slot.name: slot.view(seen).clone() for slot in flat.slots}
    return {"shared": shared, "plain": weights(plain), "moved": flat.moved()}


def main() -> None:
    folder, tiny = map(Path, sys.argv[1:])
    world = join_world()
    torch.save({stage: learn(tiny, world, stage) for stage in (0, 1, 2)}, folder / f"rank{world.rank}.pt")


if __name__ == "__main__":
    main()
