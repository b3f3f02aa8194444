"""Adapters in bfloat16 on a GPU: training under ZeRO 2 and 3, the reference inside the actor, and vLLM beside a base
that it aliases, with CUDA graphs and sleep."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.config import LoraConfig, ModelsConfig, OptimizerConfig, SyncConfig
from hybrid_rl.distributed import join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.lora import adapter_settings, base_parameters
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.adapter_sync import AdapterSync
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.checksum import checksums
from tests.conftest import make_rollout
from tests.gpu.test_alias import MIB, generate, packed_of, start, used

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


def test_vllm_serves_the_adapters_beside_the_base_that_it_aliases(small: Path) -> None:
    """Log-probs agree after steps; sleeps drop the adapters, and a sync brings them back; the base stays as it is."""
    world = join_world()
    lora = LoraConfig(rank=12, alpha=24.0)  # vLLM pads the rank to 16
    actor = load_actor(str(small / "policy"), ModelsConfig(), world.device, lora=lora)
    buffer = AliasBuffer(base_parameters(actor.model), world)
    before = checksums(buffer.ordered()).tolist()
    targets = adapter_settings(actor.model)["target_modules"]
    engine = start(
        small / "policy",
        world,
        aliased=buffer.export(),
        adapters=LoraConfig(rank=12, alpha=24.0, target_modules=targets),
    )
    trainer = DeepSpeedEngine(
        actor, OptimizerConfig(lr=3e-3), zero_stage=2, total_steps=9, world=world, alias_buffer=buffer
    )
    sync = AdapterSync(
        trainer.base,
        trainer.adapters,
        engine,
        SyncConfig(),
        world.device,
        Timeline(),
        alias_buffer=buffer,
        keeps_base=False,
    )
    responses, gaps, reports = [], [], []
    for _ in range(3):
        reports.append(sync.sync())
        responses.append(generate(engine))
        inputs, theirs = packed_of(responses[-1], world.device)
        logprobs, _ = trainer.forward(**inputs)
        gaps.append(float((logprobs.detach() - theirs).abs().mean()))
        trainer.backward(-logprobs.mean(), is_last=True)
        trainer.step()
    sync.sync()
    last, awake = generate(engine), used()
    cycled, asleep = [], []
    for _ in range(3):
        for tag in ("kv_cache", "weights"):
            engine.unmap(tag)
        asleep.append(used())
        engine.map("weights")
        sync.sync()
        engine.map("kv_cache")
        cycled.append(generate(engine))
    engine.close()
    print("gaps", gaps, "bytes", [report.num_bytes for report in reports], "awake", awake, "asleep", asleep)
    assert max(gaps) < 0.02
    assert responses[0] != responses[1] != responses[2] != last
    assert all(found == last for found in cycled)
    assert max(asleep) < awake - 900 * MIB
    adapter_bytes = sum(2 * matrix.numel() for matrix in trainer.adapter().values())
    assert [report.num_bytes for report in reports] == [adapter_bytes] * 3
    assert checksums(buffer.ordered()).tolist() == before
