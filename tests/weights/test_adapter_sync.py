"""Weight sync of adapters beside a base that is never written, with the Hugging Face engine."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_rl.config import LoraConfig, ModelsConfig, OptimizerConfig, SyncConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.lora import base_parameters, frozen_parameters
from hybrid_rl.models.packed import ValueModel
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.adapter_sync import AdapterSync
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.bucket import open_ipc_bucket
from hybrid_rl.weights.checksum import checksum
from hybrid_rl.weights.verify import SyncError
from tests.models.adapters import CPU, step

LORA = LoraConfig(rank=3, alpha=7.0, target_modules=["q_proj", "down_proj"])
GREEDY = Sampling(temperature=0.0, max_tokens=8, stop_token_ids=(0,))
SAMPLED = replace(GREEDY, temperature=1.0)
PROMPT = [5, 9, 3]
NUM_BASE, NUM_MATRICES = 20, 8
"""Tensors of the tiny policy, and matrices of adapters on two layers of each of its two blocks."""


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


class Pair:
    """A trainer with adapters, and an engine that aliases its base or gets a copy of it."""

    def __init__(self, tiny: Path, world: World, *, stage: int = 2, is_aliased: bool = True, lora: LoraConfig = LORA):
        torch.manual_seed(3)
        folder = str(tiny / "policy")
        actor = load_actor(folder, ModelsConfig(), CPU, lora=lora)
        self.buffer = AliasBuffer(base_parameters(actor.model), world) if is_aliased else None
        self.exported = self.buffer.export() if self.buffer else None
        self.trainer = DeepSpeedEngine(
            actor,
            OptimizerConfig(lr=0.3, weight_decay=0.0),
            zero_stage=stage,
            total_steps=9,
            world=world,
            alias_buffer=self.buffer,
        )
        self.make_engine = lambda: HuggingFaceEngine(
            folder, dtype=torch.float32, device=CPU, aliased=self.exported, adapters=lora
        )
        self.engine = self.make_engine()

    def sync(self, *, keeps_base: bool = True, num_verified: int = 100) -> AdapterSync:
        config = SyncConfig(num_verified=num_verified, bucket_bytes=4096)
        arguments = (self.trainer.base, self.trainer.adapters, self.engine, config, CPU, Timeline())
        return AdapterSync(*arguments, alias_buffer=self.buffer, keeps_base=keeps_base)

    def merged_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Return the log-probs of tokens that follow PROMPT, of a model with the trainer's merged weights."""
        model = HuggingFaceEngine(str(self.engine._folder), dtype=torch.float32, device=CPU)
        with self.trainer.gathered(list(model.parameters)) as tensors, torch.no_grad():
            for name, parameter in model.parameters.items():
                parameter.copy_(tensors[name])
            logits = model.model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None]).squeeze(-1)


def make_critic_module(tiny: Path, seed: int) -> ValueModel:
    """Return a critic that starts from the policy, with adapters and a head of zeros."""
    torch.manual_seed(seed)
    path = str(tiny / "policy")
    return load_value_model(path, ModelsConfig(), CPU, field="models.critic", lora=LORA, new_head=True)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("stage, is_aliased", [(0, True), (2, True), (2, False), (3, False)])
def test_engine_has_the_trainers_distribution_after_steps(tiny, world, stage, is_aliased, rslora):
    pair = Pair(tiny, world, stage=stage, is_aliased=is_aliased, lora=replace(LORA, rslora=rslora))
    sync = pair.sync()
    reports = [sync.sync()]
    for _ in range(2):
        step(pair.trainer, [0, 1, 2, 3])
        reports.append(sync.sync())
    (found,) = pair.engine.generate([PROMPT], SAMPLED, [1])
    expected = pair.merged_logprobs(found.token_ids)
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=2e-5, rtol=0)
    assert [report.version for report in reports] == [1, 2, 3]
    assert {report.num_verified for report in reports} == {NUM_BASE + NUM_MATRICES}
    scale = 7 / math.sqrt(3) if rslora else 7 / 3
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    torch.testing.assert_close(pair.engine.parameters[name].data, pair.trainer.adapter()[name] * scale)


def test_later_syncs_send_the_adapters_alone(tiny, world):
    adapter_bytes = 4 * 2 * (3 * (32 + 64) + 3 * (64 + 32))  # float32, two blocks, q_proj 32 to 64, down_proj 64 to 32
    for is_aliased, first in ((True, 0), (False, None)):
        pair = Pair(tiny, world, is_aliased=is_aliased)
        sync, base = pair.sync(), sum(4 * math.prod(shape) for _, shape, _ in pair.trainer.base.named_shapes())
        sizes = [sync.sync().num_bytes for _ in range(3)]
        assert sizes == [adapter_bytes + (base if first is None else first), adapter_bytes, adapter_bytes]
    forgetful = Pair(tiny, world, is_aliased=False)
    sync = forgetful.sync(keeps_base=False)
    assert [sync.sync().num_bytes for _ in range(2)] == [adapter_bytes + base] * 2


def test_the_shared_base_is_never_written(tiny, world):
    pair = Pair(tiny, world)
    seen = open_ipc_bucket(pair.exported.handle, CPU)  # a second mapping, like that of another process
    names = [slot.name for slot in pair.exported.slots]
    before = [checksum(slot.view(seen)) for slot in pair.exported.slots]
    sync, adapter = pair.sync(), pair.trainer.adapter()
    for _ in range(3):
        sync.sync()
        pair.engine.generate([PROMPT], GREEDY, None)
        step(pair.trainer, [0, 1, 2, 3])
    assert len(names) == NUM_BASE
    assert [checksum(slot.view(seen)) for slot in pair.exported.slots] == before
    assert all(not torch.equal(matrix, adapter[name]) for name, matrix in pair.trainer.adapter().items())
    assert len({pair.engine.parameters[name].untyped_storage().data_ptr() for name in names}) == 1


def test_a_write_to_the_base_is_named_although_engine_and_trainer_share_it(tiny, world):
    pair = Pair(tiny, world)
    sync = pair.sync()
    sync.sync()
    pair.trainer.model.get_parameter("model.norm.weight").data[3] += 1e-3
    with pytest.raises(SyncError, match=r"trainer tensor model\.norm\.weight is frozen and has changed"):
        sync.sync()


def test_an_adapter_that_differs_in_the_engine_is_named(tiny, world, monkeypatch):
    pair = Pair(tiny, world)
    sync, load = pair.sync(), pair.engine.load_bucket
    victim = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"

    def load_and_corrupt(index: int) -> None:
        load(index)
        pair.engine.parameters[victim].data[1, 2] += 1

    monkeypatch.setattr(pair.engine, "load_bucket", load_and_corrupt)
    with pytest.raises(SyncError, match=f"tensor {victim} differs between trainer and engine worker 0"):
        sync.sync()


@pytest.mark.parametrize("is_aliased", [True, False])
def test_an_engine_that_starts_again_gets_base_and_adapters(tiny, world, is_aliased):
    pair = Pair(tiny, world, is_aliased=is_aliased)
    sync = pair.sync()
    sync.sync()
    step(pair.trainer, [0, 1, 2, 3])
    first = sync.sync()
    expected = pair.engine.generate([PROMPT], SAMPLED, [1])
    pair.engine = sync._engine = pair.make_engine()
    for verifier in sync._verifiers:
        verifier._engine = pair.engine
    sync.connect()
    report = sync.sync()
    assert report.version == 1 and report.num_verified == NUM_BASE + NUM_MATRICES
    assert (report.num_bytes > first.num_bytes) == (not is_aliased)
    assert pair.engine.generate([PROMPT], SAMPLED, [1]) == expected


def test_a_critic_on_the_actors_base_computes_and_trains_as_with_a_base_of_its_own(tiny, world):
    pair, torch_seed = Pair(tiny, world), 12
    sync = pair.sync()
    sync.sync()
    own, shared = (make_critic_module(tiny, torch_seed) for _ in range(2))
    base = frozen_parameters(shared.model)
    assert pair.buffer.share(base) == len(base) == NUM_BASE  # all but the head
    assert len({p.untyped_storage().data_ptr() for p in [*base.values(), *pair.buffer.ordered()]}) == 1
    engines = [
        DeepSpeedEngine(m, OptimizerConfig(lr=0.1), zero_stage=2, total_steps=9, world=world) for m in (own, shared)
    ]
    for _ in range(2):
        assert step(engines[0], [0, 1, 2, 3], is_critic=True) == step(engines[1], [0, 1, 2, 3], is_critic=True)
    assert all(torch.equal(*pair) for pair in zip(own.parameters(), shared.parameters(), strict=True))
    assert len({p.untyped_storage().data_ptr() for p in [*base.values(), *pair.buffer.ordered()]}) == 1
    sync.sync()  # the base is what it was


def test_a_tensor_that_differs_is_not_shared(tiny, world):
    pair, critic = Pair(tiny, world), make_critic_module(tiny, 1)
    base = frozen_parameters(critic.model)
    changed = base["model.norm.weight"]
    changed.data[0] += 1
    assert pair.buffer.share(base) == NUM_BASE - 1
    assert not pair.buffer.contains(changed) and not torch.equal(
        changed, pair.trainer.model.get_parameter("model.norm.weight")
    )
