"""Bytes of checkpoints, exports and host memory, worked by hand for a 1B model."""

from dataclasses import replace

import pytest

from hybrid_rl.config import CheckpointConfig
from hybrid_rl.planning.plan import GIB, Machine
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.run_bytes import checkpoint_bytes, disk_uses, host_uses
from hybrid_rl.planning.shapes import read_shapes

NUM_PARAMS = 1_235_814_400
"""Llama 3.2 1B: 128256 x 2048 embeddings, 16 layers of 60,821,504, a norm of 2048."""


def test_a_checkpoint_holds_three_float32_per_trained_parameter(make_config):
    config = make_config("1b")
    assert checkpoint_bytes(config, read_shapes(config), dtype_bytes=2) == 12 * NUM_PARAMS
    averaged = make_config("1b", models={"actor": config.models.actor, "ema_decay": 0.99})
    assert checkpoint_bytes(averaged, read_shapes(averaged), dtype_bytes=2) == (12 + 4) * NUM_PARAMS


def test_a_checkpoint_of_adapters_holds_their_parameters_only(make_config):
    config = make_config("1b")
    lora = replace(config.models.lora, rank=4, target_modules=["q_proj"])
    adapted = replace(config, models=replace(config.models, lora=lora))
    assert checkpoint_bytes(adapted, read_shapes(adapted), dtype_bytes=2) == 12 * 16 * 4 * (2048 + 2048)


def test_one_checkpoint_more_than_are_kept_exists_while_one_is_written(make_config):
    config = replace(
        make_config("1b", models={"actor": make_config("1b").models.actor, "ema_decay": 0.99}),
        checkpoint=CheckpointConfig(every_steps=5, keep_last=2, keep_best=True, export=True),
    )
    assert disk_uses(config, read_shapes(config), dtype_bytes=2) == {
        "3 checkpoints": 3 * 16 * NUM_PARAMS,
        "exports": 3 * 2 * NUM_PARAMS,  # export/, export_ema/ and best/
    }
    often = replace(config.checkpoint, export_every_steps=5, export_keep_last=2, export_critic=True)
    periodic = replace(config, checkpoint=often)  # besides these, 3 steps of actor and EMA; there is no critic
    assert disk_uses(periodic, read_shapes(periodic), dtype_bytes=2)["exports"] == (3 + 3 * 2) * 2 * NUM_PARAMS
    never = replace(config, checkpoint=CheckpointConfig(every_steps=0, keep_best=False, export=False))
    assert sum(disk_uses(never, read_shapes(never), dtype_bytes=2).values()) == 0


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_the_host_holds_pinned_copies_and_the_larger_of_loading_and_saving(make_config, num_gpus):
    config = replace(make_config("1b"), checkpoint=CheckpointConfig(every_steps=5))
    shapes = read_shapes(config)
    plan = make_plan(config, Machine(gpu_memory_bytes=80 * GIB, num_gpus=num_gpus), shapes)
    uses = host_uses(config, shapes, plan, num_ranks=num_gpus, dtype_bytes=2, is_cpu=False)
    assert uses["what phases move off the GPU"] == num_gpus * sum(a.host_bytes for a in plan.allocations)
    moment = {1: "checkpoint", 8: "actor"}[num_gpus]  # 12 bytes of a parameter once, or 2 on every rank
    assert uses[f"the moment of {moment}"] == {1: 12, 8: 8 * 2}[num_gpus] * NUM_PARAMS and len(uses) == 3
