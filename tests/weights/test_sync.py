"""Weight sync and its verification find every way in which the engine could keep other weights, by name."""

import math
import re
from pathlib import Path

import pytest
import torch

from hybrid_rl.config import ModelsConfig, OptimizerConfig, SyncConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.models.loading import load_actor
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.bucket import AliasedWeights, open_ipc_bucket
from hybrid_rl.weights.checksum import checksum
from hybrid_rl.weights.sync import AliasSync, CopySync
from hybrid_rl.weights.verify import SyncError

CPU = torch.device("cpu")
VICTIM = "model.layers.1.mlp.up_proj.weight"
CAP = 2048  # bytes; the largest tensors have 64 * 32 * 4 = 8192


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


@pytest.fixture(params=[2, 3], ids=["zero2", "zero3"])
def trainer(request, tiny: Path, world: World) -> DeepSpeedEngine:
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    return DeepSpeedEngine(actor, OptimizerConfig(lr=1e-3), zero_stage=request.param, total_steps=9, world=world)


class Engine(HuggingFaceEngine):
    """Hugging Face engine that starts with other weights than the trainer's and records its calls."""

    def __init__(self, model: Path, **aliased: AliasedWeights) -> None:
        super().__init__(str(model), dtype=torch.float32, device=CPU, **aliased)
        for parameter in self.parameters.values() if not aliased else []:
            parameter.mul_(0.5)
        self.calls: list[str] = []
        self.bucket_nbytes = 0

    def open_bucket(self, handle, plan):
        self.calls.append("open")
        self.bucket_nbytes = open_ipc_bucket(handle, CPU).nbytes
        self.names = [[slot.name for slot in bucket] for bucket in plan]
        super().open_bucket(handle, plan)

    def load_bucket(self, index):
        self.calls.append(f"load {index}")
        super().load_bucket(index)

    def finish_sync(self):
        self.calls.append("finish")
        super().finish_sync()

    def checksums(self, names):
        self.calls.append("checksums")
        self.verified = list(names)
        return super().checksums(names)


@pytest.fixture
def aliasing(tiny: Path, world: World) -> tuple[DeepSpeedEngine, Engine, AliasSync]:
    """A trainer and an engine that aliases its weights."""
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    alias_buffer = AliasBuffer(dict(actor.model.named_parameters()), world)
    engine = Engine(tiny / "policy", aliased=alias_buffer.export())
    trainer = DeepSpeedEngine(
        actor, OptimizerConfig(lr=1e-3), zero_stage=2, total_steps=9, world=world, alias_buffer=alias_buffer
    )
    sync = AliasSync(trainer, engine, SyncConfig(num_verified=7), CPU, Timeline(), alias_buffer=alias_buffer)
    return trainer, engine, sync


def make_sync(trainer: DeepSpeedEngine, engine: Engine, *, num_verified: int = 8, cap: int = CAP) -> CopySync:
    return CopySync(trainer, engine, SyncConfig(bucket_bytes=cap, num_verified=num_verified), CPU, Timeline())


def same_weights(trainer: DeepSpeedEngine, engine: Engine) -> bool:
    names = [name for name, _, _ in trainer.named_shapes()]
    (held,) = engine.checksums(names)
    with trainer.gathered(names) as tensors:
        return all(checksum(tensors[name]) == held[name][0][1] for name in names)


def test_the_engine_runs_the_trainers_weights(tiny, trainer, train_step):
    engine = Engine(tiny / "policy")
    sync = make_sync(trainer, engine)
    assert not same_weights(trainer, engine)
    report = sync.sync()
    assert same_weights(trainer, engine)
    names = [name for name, _, _ in trainer.named_shapes()]
    assert report.version == engine.weights_version == 1 and report.num_verified == len(names)
    assert report.num_bytes == sum(4 * math.prod(shape) for _, shape, _ in trainer.named_shapes())
    sampling = Sampling(temperature=0.0, max_tokens=3, stop_token_ids=())
    assert len(engine.generate([[5, 9]], sampling, None)[0].token_ids) == 3
    train_step(trainer)
    assert not same_weights(trainer, engine)
    report = sync.sync()
    assert same_weights(trainer, engine)
    assert report.version == engine.weights_version == 2 and report.num_verified == 8


def test_tied_head_is_not_sent_and_follows_the_embedding(tiny, trainer):
    engine = Engine(tiny / "policy")
    make_sync(trainer, engine, cap=2 * 8192).sync()  # no tensor is larger than a half, so the order is kept
    sent = [name for bucket in engine.names for name in bucket]
    assert sent == [name for name, _, _ in trainer.named_shapes()]
    assert "lm_head.weight" not in sent and "model.embed_tokens.weight" in sent
    head, embedding = engine.model.lm_head.weight, engine.model.model.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr()


@pytest.mark.parametrize(
    "cap, most",
    [(1, 2 * 8192), (2048, 2 * 8192), (10_000, 2 * 8192), (2 * 8192, 2 * 8192), (1 << 30, 1 << 30)],
)
def test_the_buffer_stays_below_the_cap_except_for_a_tensor_larger_than_its_half(tiny, trainer, cap, most):
    engine = Engine(tiny / "policy")
    sync = make_sync(trainer, engine, cap=cap)
    assert max(4 * math.prod(shape) for _, shape, _ in trainer.named_shapes()) == 8192
    assert engine.bucket_nbytes <= most
    sync.sync()
    assert same_weights(trainer, engine)
    assert len(engine.names) == {1: 20, 1 << 30: 1}.get(cap, len(engine.names))


class CopiesLate(Engine):
    """Copies a bucket as late as the protocol allows, in the next call."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.waiting: list[int] = []

    def load_bucket(self, index):
        self.copy_waiting()
        self.waiting.append(index)

    def copy_waiting(self):
        while self.waiting:
            super().load_bucket(self.waiting.pop())

    def finish_sync(self):
        self.copy_waiting()
        super().finish_sync()


def test_no_bucket_is_overwritten_before_it_is_copied(tiny, trainer, train_step):
    engine = CopiesLate(tiny / "policy")
    sync = make_sync(trainer, engine)
    sync.sync()
    train_step(trainer)
    sync.sync()
    assert same_weights(trainer, engine)
    assert engine.calls.count("finish") == 2 and len(engine.names) > 3


def test_a_sync_loads_all_buckets_then_finishes_then_verifies(tiny, trainer):
    engine = Engine(tiny / "policy")
    make_sync(trainer, engine).sync()
    loads = [f"load {i}" for i in range(len(engine.names))]
    assert len(loads) > 3
    assert engine.calls == ["open", *loads, "finish", "checksums"]


def test_the_rotation_covers_every_tensor_equally(tiny, trainer):
    engine = Engine(tiny / "policy")
    sync = make_sync(trainer, engine, num_verified=7)
    sync.sync()
    names = [name for name, _, _ in trainer.named_shapes()]
    assert engine.verified == names and len(names) == 20
    seen = []
    for _ in range(20):  # 20 weight syncs with 7 tensors each verify all 20 tensors 7 times
        assert sync.sync().num_verified == 7
        assert len(set(engine.verified)) == 7
        seen += engine.verified
    assert {name: seen.count(name) for name in names} == dict.fromkeys(names, 7)


def test_no_more_tensors_are_verified_than_there_are(tiny, trainer):
    engine = Engine(tiny / "policy")
    sync = make_sync(trainer, engine, num_verified=1000)
    assert [sync.sync().num_verified for _ in range(2)] == [20, 20]


class DropsOne(Engine):
    """Ignores one tensor, as if its name did not match."""

    def load_bucket(self, index):
        self._plan[index] = [slot for slot in self._plan[index] if slot.name != VICTIM]
        super().load_bucket(index)


class KeepsOneStale(Engine):
    """From the second weight sync on, one tensor keeps its old values."""

    def load_bucket(self, index):
        before = self.parameters[VICTIM].clone()
        super().load_bucket(index)
        if self.weights_version > 0:
            self.parameters[VICTIM].copy_(before)


class CorruptsOneElement(Engine):
    """The last bit of one element flips in the copy."""

    def load_bucket(self, index):
        super().load_bucket(index)
        if VICTIM in self.names[index]:
            self.parameters[VICTIM].view(torch.int32)[3, 4] ^= 1


class SwapsTwoElements(Engine):
    """Two elements swap places, which a sum of the values would not detect."""

    def load_bucket(self, index):
        super().load_bucket(index)
        if VICTIM in self.names[index]:
            flat = self.parameters[VICTIM].view(-1)
            flat[[10, 20]] = flat[[20, 10]]


class DoesNotCount(Engine):
    """Finishes a weight sync without counting it."""

    def finish_sync(self):
        super().finish_sync()
        self.weights_version = 0


class CountsTwice(Engine):
    """Counts a weight sync that did not happen."""

    def finish_sync(self):
        super().finish_sync()
        self.weights_version += 1


def test_dropped_tensor_is_named(tiny, trainer):
    # Either the engine or the verification raises; both name the tensor.
    with pytest.raises(RuntimeError, match=re.escape(VICTIM)):
        make_sync(trainer, DropsOne(tiny / "policy")).sync()


@pytest.mark.parametrize("fault", [CorruptsOneElement, SwapsTwoElements])
def test_corrupted_tensor_is_named(tiny, trainer, fault):
    with pytest.raises(SyncError, match=re.escape(f"tensor {VICTIM} differs between trainer and engine worker 0")):
        make_sync(trainer, fault(tiny / "policy")).sync()


def test_stale_tensor_is_named_within_one_rotation(tiny, trainer, train_step):
    sync = make_sync(trainer, KeepsOneStale(tiny / "policy"), num_verified=5)
    sync.sync()
    train_step(trainer)
    with pytest.raises(SyncError, match=re.escape(f"tensor {VICTIM} differs")):
        for _ in range(4):  # 20 tensors, 5 at a time
            sync.sync()


@pytest.mark.parametrize("fault, counted", [(DoesNotCount, 0), (CountsTwice, 2)])
def test_a_wrong_count_of_weight_syncs_is_an_error(tiny, trainer, fault, counted):
    with pytest.raises(SyncError, match=f"engine counts weight sync {counted}, expected 1"):
        make_sync(trainer, fault(tiny / "policy")).sync()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_trainer_weight_that_is_not_finite_is_named(tiny, world, value):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    dict(actor.model.named_parameters())[VICTIM].data[2, 3] = value
    trainer = DeepSpeedEngine(actor, OptimizerConfig(), zero_stage=2, total_steps=9, world=world)
    with pytest.raises(SyncError, match=re.escape(f"trainer tensor {VICTIM} holds NaN or infinity")):
        make_sync(trainer, Engine(tiny / "policy")).sync()


def test_tensor_that_the_engine_lacks_is_named(tiny, trainer):
    engine = Engine(tiny / "policy")
    del engine.parameters[VICTIM]
    with pytest.raises(RuntimeError, match=re.escape(f"no engine parameter takes these trainer tensors: {VICTIM}")):
        make_sync(trainer, engine).sync()


def test_engine_parameter_without_a_source_is_named(tiny, trainer):
    engine = Engine(tiny / "policy")
    engine.parameters["model.extra.weight"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"engine parameter model\.extra\.weight: nothing comes from the trainer"):
        make_sync(trainer, engine).sync()


# Alias


def test_an_aliasing_engine_follows_without_copies(aliasing, train_step):
    trainer, engine, sync = aliasing
    with pytest.raises(RuntimeError, match="sync the trainer's first"):
        engine.generate([[5, 9]], Sampling(temperature=0.0, max_tokens=3, stop_token_ids=()), None)
    before = [p.clone() for p in engine.parameters.values()]
    report = sync.sync()
    assert (report.version, report.num_bytes, report.num_verified) == (1, 0, 20)
    train_step(trainer)
    assert same_weights(trainer, engine)
    assert all(not torch.equal(p, old) for p, old in zip(engine.parameters.values(), before, strict=True))
    assert sync.sync().num_verified == 7
    assert engine.calls == ["finish", "checksums", "checksums", "finish", "checksums"]


def test_a_tied_head_is_aliased_once(aliasing):
    _, engine, _ = aliasing
    head, embedding = engine.model.lm_head.weight, engine.model.model.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr()


def test_weight_that_left_the_buffer_is_named(aliasing):
    trainer, _, sync = aliasing
    sync.sync()
    parameter = trainer.model.get_parameter(VICTIM)
    parameter.data = parameter.data.clone()
    with pytest.raises(
        SyncError, match=re.escape(f"trainer tensor {VICTIM} has left the buffer that the engine aliases")
    ):
        sync.sync()


def test_an_engine_with_a_copy_instead_of_an_alias_is_named_within_one_rotation(aliasing, train_step):
    trainer, engine, sync = aliasing
    sync.sync()
    engine.parameters[VICTIM].data = engine.parameters[VICTIM].data.clone()
    train_step(trainer)
    with pytest.raises(SyncError, match=re.escape(f"tensor {VICTIM} differs")):
        for _ in range(3):  # 20 tensors, 7 at a time
            sync.sync()
