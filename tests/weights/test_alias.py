"""DeepSpeed steps in the alias buffer bit for bit as in its own memory; a weight moved out of the buffer is named."""

import sys
from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import Prompt, Rollout, make_train_batch, pack
from hybrid_rl.config import ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.alias import flat_parameters_in
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.bucket import open_ipc_bucket

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


def make(tiny: Path, world: World, *, stage: int, dtype: str, kind: str = "adamw", is_aliased: bool = True):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(dtype=dtype), CPU)
    alias_buffer = AliasBuffer(dict(actor.model.named_parameters()), world) if is_aliased else None
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, kind=kind)
    return DeepSpeedEngine(
        actor, config, zero_stage=stage, total_steps=9, world=world, alias_buffer=alias_buffer
    ), alias_buffer


def step(trainer: DeepSpeedEngine) -> float:
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


def weights(trainer: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    with trainer.gathered([name for name, _, _ in trainer.named_shapes()]) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


CASES = [(0, "float32", "adamw"), (1, "float32", "adamw"), (2, "float32", "adamw")]
CASES += [(1, "bfloat16", "adamw"), (2, "bfloat16", "adamw"), (1, "bfloat16", "cpu_adam"), (2, "bfloat16", "cpu_adam")]


@pytest.mark.parametrize("stage, dtype, kind", CASES)
def test_steps_equal_those_without_the_buffer_and_show_through_it(tiny, world, stage, dtype, kind):
    trainer, alias_buffer = make(tiny, world, stage=stage, dtype=dtype, kind=kind)
    plain, _ = make(tiny, world, stage=stage, dtype=dtype, kind=kind, is_aliased=False)
    aliased = alias_buffer.export()
    seen = open_ipc_bucket(aliased.handle, CPU)  # a second mapping, like that of another process
    before = weights(trainer)
    assert [step(trainer) for _ in range(3)] == [step(plain) for _ in range(3)]
    expected = weights(plain)
    for slot in aliased.slots:
        assert torch.equal(slot.view(seen), expected[slot.name]), slot.name
        assert not torch.equal(expected[slot.name], before[slot.name])
    assert alias_buffer.moved() == []


def test_deepspeed_keeps_no_second_copy_of_the_weights(tiny, world):
    trainer, alias_buffer = make(tiny, world, stage=2, dtype="bfloat16")
    flat = {group.untyped_storage().data_ptr() for group in trainer.wrapped.optimizer.bit16_groups_flat}
    assert flat == {alias_buffer.ordered()[0].untyped_storage().data_ptr()}


def test_a_moved_weight_is_named(tiny, world):
    trainer, alias_buffer = make(tiny, world, stage=2, dtype="float32")
    name = "model.layers.1.mlp.up_proj.weight"
    parameter = trainer.model.get_parameter(name)
    parameter.data = parameter.data.clone()
    assert alias_buffer.moved() == [name]


def test_a_deepspeed_version_that_copies_is_an_error(tiny, world, monkeypatch):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    alias_buffer = AliasBuffer(dict(actor.model.named_parameters()), world)
    with (
        pytest.raises(RuntimeError, match=r"moved model\.embed_tokens\.weight out of the alias buffer"),
        flat_parameters_in(alias_buffer),
    ):
        actor.model.model.embed_tokens.weight.data = actor.model.model.embed_tokens.weight.data.clone()


def test_tensors_in_another_order_are_an_error(tiny, world):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    alias_buffer = AliasBuffer(dict(actor.model.named_parameters()), world)
    ordered = [p.data for p in alias_buffer.ordered() if p.ndim >= 2]
    assert alias_buffer.flat_view(ordered).numel() == sum(p.numel() for p in ordered)
    with pytest.raises(RuntimeError, match="not where the layout of the alias buffer has it"):
        alias_buffer.flat_view(ordered[::-1])


@pytest.fixture(scope="module")
def ranks(on_two_ranks):
    return on_two_ranks(__file__)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_ranks_gather_into_their_buffers(ranks, stage):
    for rank in (rank[stage] for rank in ranks):
        assert rank["moved"] == []
        assert all(torch.equal(weight, ranks[0][stage]["aliased"][name]) for name, weight in rank["aliased"].items())
        assert all(torch.equal(weight, rank["plain"][name]) for name, weight in rank["aliased"].items())


def train(tiny: Path, world: World, stage: int) -> dict:
    """Take two steps with the buffer and without it, as one of two ranks."""
    trainer, alias_buffer = make(tiny, world, stage=stage, dtype="float32")
    plain, _ = make(tiny, world, stage=stage, dtype="float32", is_aliased=False)
    for _ in range(2):
        step(trainer)
        step(plain)
    seen = open_ipc_bucket(alias_buffer.export().handle, CPU)
    aliased = {slot.name: slot.view(seen).clone() for slot in alias_buffer.slots}
    return {"aliased": aliased, "plain": weights(plain), "moved": alias_buffer.moved()}


def main() -> None:
    folder, tiny = map(Path, sys.argv[1:])
    world = join_world()
    torch.save({stage: train(tiny, world, stage) for stage in (0, 1, 2)}, folder / f"rank{world.rank}.pt")


if __name__ == "__main__":
    main()
