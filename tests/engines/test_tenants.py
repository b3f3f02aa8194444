"""DeepSpeed trains on bit for bit while its tensors move: real engines, and a pool that leaves NaN behind.

The native pool itself is tested in tests/kernels/test_vmm_pool.py and tests/gpu/test_vmm_pool.py.
"""

import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid_rl.batch import Packed
from hybrid_rl.config import Config, ConfigError, MemoryConfig, ModelsConfig, OptimizerConfig, UpdateConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import tenants
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.tenants import OptimizerTenant
from hybrid_rl.memory.phases import MemoryManager
from hybrid_rl.memory.phases import phases as memory
from hybrid_rl.memory.residency import RESIDENCY, Phase
from hybrid_rl.memory.tenants import FrozenModule, PooledModule, PooledTenant, Resident
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl_kernels.vmm_pool import VmmOutOfMemoryError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ADAM = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
CASES = [(0, "float32"), *((stage, dtype) for stage in (1, 2, 3) for dtype in ("float32", "bfloat16"))]


@dataclass
class HostRegion:
    """Storages that keep their place; while they are released, every number in them is NaN."""

    tag: str
    policy: str
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    is_resident: bool = True
    is_full: bool = False

    def __enter__(self) -> None:
        assert self.is_resident

    def __exit__(self, *error: object) -> None:
        pass

    def _bytes(self) -> Iterator[Tensor]:
        return (torch.empty(0, dtype=torch.uint8).set_(storage) for storage in self.storages)

    def release(self) -> int:
        assert self.is_resident
        self.is_resident, copied = False, 0
        if self.policy == "copy" or (self.policy == "copy_once" and not self.copies):
            self.copies = [data.clone() for data in self._bytes()]
            copied = sum(data.nbytes for data in self.copies)
        for data in self._bytes():
            data.fill_(0xFF)
        return copied

    def restore(self) -> int:
        assert not self.is_resident
        if self.is_full:
            raise VmmOutOfMemoryError(self.tag, wanted_bytes=2, free_bytes=1)
        self.is_resident = True
        for data, copy in zip(self._bytes(), self.copies, strict=False):
            data.copy_(copy)
        return sum(data.nbytes for data in self.copies)

    def invalidate(self) -> None:
        self.copies = []

    def host(self, tensor: Tensor) -> Tensor:
        place = [storage.data_ptr() for storage in self.storages].index(tensor.untyped_storage().data_ptr())
        flat = self.copies[place].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class HostPool:
    """Regions of this process's memory."""

    def __init__(self) -> None:
        self.regions: dict[str, HostRegion] = {}

    def region(self, name: str, *, policy: str) -> HostRegion:
        assert name not in self.regions
        return self.regions.setdefault(name, HostRegion(name, policy))

    def exchange(self, out: HostRegion, into: HostRegion) -> tuple[int, int]:
        return out.release(), into.restore()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> HostPool:
    def rehome(tensors: list[Tensor], region: HostRegion) -> None:
        original(tensors, region)
        places = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        region.storages = [storage for storage in places.values() if storage.nbytes()]

    original = memory.rehome
    monkeypatch.setattr(memory, "rehome", rehome)
    pool = HostPool()
    monkeypatch.setattr(tenants, "choose_pool", lambda swap, device: pool)
    return pool


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


def logprobs_of(engine: DeepSpeedEngine, packed: Packed) -> Tensor:
    index = {"index": packed.response_index, "targets": packed.targets, "temperature": 1.0}
    return engine.forward(**packed_inputs(packed), **index)[0]


def take_step(engine: DeepSpeedEngine, pieces: list[Packed]) -> float:
    for place, packed in enumerate(pieces):
        logprobs = logprobs_of(engine, packed)
        engine.backward(-(logprobs * torch.linspace(1, 2, len(logprobs))).sum(), is_last=place == len(pieces) - 1)
    return engine.step()


@dataclass
class Trained:
    """An engine, and who moves it; nobody in the run that the others are held to."""

    engine: DeepSpeedEngine
    states: PooledTenant | None = None
    weights: PooledTenant | None = None

    def visit(self, pieces: list[Packed]) -> list:
        """Score, then learn, everything away before, between and after, and return all that came out."""
        if self.weights:
            self.weights.restore()
        with torch.no_grad():
            scores = logprobs_of(self.engine, pieces[0]).tolist()
        if self.weights and self.states:
            self.weights.release()
            self.weights.restore()
            self.states.restore()
        norm = take_step(self.engine, pieces)
        snapshot = self.engine.snapshot()
        self.leave()
        return [scores, norm, {name: tensor.tolist() for name, tensor in snapshot.tensors.items()}]

    def leave(self) -> None:
        for tenant in (self.states, self.weights):
            if tenant:
                tenant.release()


def make(tiny: Path, world: World, stage: int, dtype: str) -> Trained:
    actor = load_actor(str(tiny / "policy"), ModelsConfig(dtype=dtype), CPU)
    for parameter in actor.parameters():
        parameter.data = parameter.data.clone()  # on a CPU they lie in the mapped file, which cannot move
    return Trained(DeepSpeedEngine(actor, ADAM, zero_stage=stage, total_steps=6, world=world))


def make_moving(tiny: Path, world: World, stage: int, dtype: str, name: str = "actor") -> Trained:
    trained = make(tiny, world, stage, dtype)
    makes = tenants.Tenants(Config(memory=MemoryConfig(swap="vmm")), CPU)
    makes._moves = True  # as on a GPU
    trained.states = makes.optimizer(name, trained.engine)
    trained.weights = makes.parameters(name, trained.engine, is_aliased=False)
    return trained


@pytest.mark.parametrize("stage, dtype", CASES)
def test_training_saving_and_loading_are_the_same_bits(tiny, world, pieces, pool, tmp_path, stage, dtype):
    still = make(tiny, world, stage, dtype)
    expected = [still.visit(pieces) for _ in range(4)]

    moving = make_moving(tiny, world, stage, dtype)
    moving.leave()
    found = [moving.visit(pieces) for _ in range(2)]
    moving.weights.restore()
    moving.states.restore()
    moving.engine.snapshot().write(tmp_path, 0)
    moving.leave()
    found += [moving.visit(pieces) for _ in range(2)]
    assert found == expected

    resumed = make_moving(tiny, world, stage, dtype, "critic")  # it loads into memory of the pool
    places = [tensor.data_ptr() for tensor in resumed.engine.optimizer_tensors()]
    resumed.engine.load(tmp_path)
    assert [tensor.data_ptr() for tensor in resumed.engine.optimizer_tensors()] == places
    resumed.leave()
    assert [resumed.visit(pieces) for _ in range(2)] == expected[2:]


@pytest.mark.parametrize("stage, dtype", CASES)
def test_a_step_leaves_no_gradient_behind_but_in_the_buffers(tiny, world, pieces, stage, dtype):
    engine = make(tiny, world, stage, dtype).engine
    take_step(engine, pieces)
    assert all(p.grad is None and getattr(p, "grad_accum", None) is None for p in engine.module.parameters())
    buffers = {buffer.untyped_storage().data_ptr() for buffer in engine.gradient_buffers()}
    left = [tensor.grad for tensor in engine._states._flat() if tensor.grad is not None]
    assert all(gradient.untyped_storage().data_ptr() in buffers for gradient in left)
    assert not any(getattr(engine._engine.optimizer, "averaged_gradients", {}).values())


@pytest.mark.parametrize("stage, dtype", CASES)
def test_all_that_shares_memory_moves_together(tiny, world, pieces, pool, stage, dtype):
    trained = make(tiny, world, stage, dtype)
    trained.engine.optimizer_tensors()  # the moments are made
    take_step(trained.engine, pieces)
    trained.engine.drop_gathered()
    before = [(tensor, tensor.untyped_storage().data_ptr()) for tensor in live_tensors() if tensor.numel()]
    makes = tenants.Tenants(Config(memory=MemoryConfig(swap="vmm")), CPU)
    makes._moves = True
    makes.optimizer("actor", trained.engine)
    makes.parameters("actor", trained.engine, is_aliased=False)
    new_places: dict[int, set[int]] = {}
    for tensor, place in before:
        new_places.setdefault(place, set()).add(tensor.untyped_storage().data_ptr())
    assert all(len(places) == 1 for places in new_places.values())
    moved = sum(places != {place} for place, places in new_places.items())
    assert moved == sum(len(region.storages) for region in pool.regions.values())


def live_tensors() -> list[Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter)]


def test_the_bytes_of_each_tenant(tiny, world, pieces, pool):
    """12 bytes a weight move as states, 2 as weights; DeepSpeed pads each of two groups to whole pairs."""
    trained = make_moving(tiny, world, 2, "bfloat16")
    numel = sum(p.numel() for p in trained.engine.module.parameters())
    buffers = sum(buffer.nbytes for buffer in trained.engine.module.buffers())
    assert trained.states.release() == pytest.approx(12 * numel, abs=96)
    assert trained.weights.release() == pytest.approx(2 * numel + buffers, abs=64)
    assert pool.regions.keys() == {
        *("actor_optimizer", "actor_optimizer scratch", "actor_parameters", "actor_parameters scratch")
    }


def test_gradients_of_zero_1_are_dropped_and_return_as_zeros(tiny, world, pieces, pool):
    trained = make_moving(tiny, world, 1, "bfloat16")
    buffers = trained.engine.gradient_buffers()
    assert pool.regions["actor_optimizer scratch"].policy == "drop"
    assert sum(buffer.nbytes for buffer in buffers) >= 4 * sum(p.numel() for p in trained.engine.module.parameters())
    take_step(trained.engine, pieces)
    trained.states.release()
    assert all(buffer.isnan().all() for buffer in buffers)
    trained.states.restore()
    assert all((buffer == 0).all() for buffer in buffers)


def test_a_tenant_whose_scratch_finds_no_room_stays_released(tiny, world, pool):
    tenant = PooledTenant(pool, "actor", [torch.ones(4)], scratch=[torch.ones(4)])
    tenant.release()
    for name in ("actor scratch", "actor"):
        pool.regions[name].is_full = True
        with pytest.raises(VmmOutOfMemoryError, match=name):
            tenant.restore()
        pool.regions[name].is_full = False
        assert not tenant.is_resident and not any(region.is_resident for region in pool.regions.values())
    assert tenant.restore() == 16


def test_a_frozen_module_moves_out_once(pool):
    module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    num_bytes = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    tenant = PooledModule(pool, "reference", module)
    assert not any(p.requires_grad for p in module.parameters())
    for expected in (num_bytes, 0, 0):
        assert tenant.release() == expected
        assert all(p.isnan().all() for p in module.parameters())
        assert tenant.restore() == num_bytes
        assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    torch.nn.init.constant_(module[0].weight, 2.0)
    assert tenant.parameters()["0.weight"].data_ptr() == module[0].weight.data_ptr()
    assert tenant.release() == num_bytes  # it was written to
    assert (tenant.parameters()["0.weight"] == 2.0).all()
    tenant.parameters()["0.weight"].fill_(5.0)  # as a checkpoint does that is read while the module is away
    tenant.restore()
    assert (module[0].weight == 5.0).all()


def test_the_manager_exchanges_what_leaves_for_what_enters(pool, tmp_path):
    timeline = Timeline()
    manager = MemoryManager(RESIDENCY, CPU, timeline)
    tensors = {name: torch.full((4,), float(i)) for i, name in enumerate(("actor_optimizer", "critic_optimizer"))}
    parts = {name: PooledTenant(pool, name, [tensor]) for name, tensor in tensors.items()}
    for name, part in parts.items():
        manager.admit(name, part)
    manager.admit("reference", Resident())
    for phase in (Phase.SCORE, Phase.UPDATE_CRITIC, Phase.UPDATE_ACTOR, Phase.SYNC, Phase.UPDATE_ACTOR):
        with manager.phase(phase):
            for name, tensor in tensors.items():
                here = phase in RESIDENCY[name]
                assert parts[name].is_resident == here and tensor.isnan().all() != here
    timeline.write(tmp_path / "timeline.json")
    written = (tmp_path / "timeline.json").read_text()
    assert written.count('"exchange critic_optimizer for actor_optimizer"') == 1
    assert tensors["actor_optimizer"].tolist() == [0.0] * 4


def test_who_moves_is_decided_by_settings_and_device(tiny, world, monkeypatch):
    engine = make(tiny, world, 2, "bfloat16").engine
    offload = replace(Config(), memory=MemoryConfig(swap="deepspeed"))
    on_host = replace(offload, update=UpdateConfig(actor=OptimizerConfig(kind="cpu_adam")))
    off = replace(Config(), memory=MemoryConfig(swap="off"))
    module = torch.nn.Linear(2, 2)
    for config, device, states, frozen in (
        (offload, CUDA, OptimizerTenant, FrozenModule),
        (on_host, CUDA, Resident, FrozenModule),
        (off, CUDA, Resident, type(None)),
        (offload, CPU, Resident, type(None)),
        (replace(Config(), memory=MemoryConfig(swap="vmm")), CPU, Resident, type(None)),
        (Config(), CPU, Resident, type(None)),
    ):
        makes = tenants.Tenants(config, device)
        assert type(makes.optimizer("actor", engine)) is states
        assert makes.is_offloaded("actor") == (states is OptimizerTenant)
        assert type(makes.frozen("reference", module)) is frozen
        assert type(makes.parameters("actor", engine, is_aliased=False)) is Resident


def test_what_no_phase_sends_away_is_not_moved_into_the_pool(tiny, world, pool):
    residency = {**RESIDENCY, **dict.fromkeys(("actor_optimizer", "actor_parameters", "reference"), frozenset(Phase))}
    manager = MemoryManager(residency, CPU, Timeline())
    assert manager.stays == {"actor_optimizer", "actor_parameters", "reference"}
    engine, module = make(tiny, world, 2, "bfloat16").engine, torch.nn.Linear(2, 2)
    makes = tenants.Tenants(Config(), CPU, stays=manager.stays)
    makes._moves = True
    assert (
        type(makes.optimizer("actor", engine)) is type(makes.parameters("actor", engine, is_aliased=False)) is Resident
    )
    assert makes.frozen("reference", module) is None and not pool.regions
    assert type(makes.optimizer("critic", engine)) is PooledTenant and not makes.is_offloaded("critic")


def test_shared_weights_stay(tiny, world, pool):
    engine = make(tiny, world, 2, "bfloat16").engine
    makes = tenants.Tenants(Config(), CPU)
    assert type(makes.parameters("actor", engine, is_aliased=True)) is Resident
    assert type(makes.parameters("actor", engine, is_aliased=False)) is PooledTenant


def test_vmm_without_the_library_is_an_error_and_auto_says_what_serves(monkeypatch, caplog):
    monkeypatch.setattr("hybrid_rl_kernels.vmm_pool.find_library", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"memory.swap = vmm: libvmm_pool.so is not built; .*cmake -S"):
        memory.choose_pool("vmm", CUDA)
    with caplog.at_level(logging.WARNING):
        assert memory.choose_pool("auto", CUDA) is None
    assert "memory.swap = auto: DeepSpeed's offload moves the states, since libvmm_pool.so is not built" in caplog.text
    assert memory.choose_pool("vmm", CPU) is memory.choose_pool("off", CUDA) is None
