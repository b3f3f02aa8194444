"""Adapters in bfloat16 on a GPU: packed attention, offloading, ZeRO 2 and 3, and the reference inside the actor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.config import LoraConfig, ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import packed_inputs
from tests.conftest import make_rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def make_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for i, (p, r) in enumerate([(5, 20), (60, 3), (17, 31)]):
        ids = torch.randint(1, 32_000, (p + r,), generator=generator).tolist()
        rollouts.append(make_rollout(ids[:p], ids[p:], prompt_id=i))
    packed = pack(make_train_batch(rollouts), [0, 1, 2], torch.device("cuda"))
    return packed_inputs(packed) | {"index": packed.response_index, "targets": packed.targets, "temperature": 1.0}


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_are_trained_while_optimizer_states_are_offloaded_in_between(small: Path, stage: int) -> None:
    world = join_world()
    actor = load_actor(str(small / "policy"), ModelsConfig(), world.device, lora=LoraConfig(rank=16))
    trainer = DeepSpeedEngine(
        actor, OptimizerConfig(lr=1e-3), zero_stage=stage, total_steps=9, world=world, is_offloaded=True
    )
    name = "model.layers.3.self_attn.q_proj.weight"
    with trainer.gathered([name]) as tensors:
        before = tensors[name].clone()
    inputs = make_inputs()
    reference, _ = trainer.reference_forward(**inputs)
    losses = []
    for _ in range(4):
        trainer.offload()
        trainer.reload()
        logprobs, _ = trainer.forward(**inputs)
        losses.append(-float(logprobs.detach().mean()))
        trainer.backward(-logprobs.mean(), is_last=True)
        assert trainer.step() > 0
    assert losses[-1] < losses[0] - 0.1
    assert torch.equal(trainer.reference_forward(**inputs)[0], reference)
    with trainer.gathered([name]) as tensors:
        assert not torch.equal(tensors[name], before)
    numel = sum(tensor.numel() for tensor in trainer.adapter().values())
    assert trainer.optimizer_bytes() == 12 * numel < 2e8
