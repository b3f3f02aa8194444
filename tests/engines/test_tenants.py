"""DeepSpeed trains bit for bit the same while its tensors are released and restored, in a pool that leaves NaN behind.

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
from hybrid_rl.memory import tenants as memory_tenants
from hybrid_rl.memory.phases import MemoryManager
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
    """Storages with constant addresses; while they are released, every number in them is NaN."""

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
    """Regions of host memory in place of a VmmPool."""

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

    original = memory_tenants.rehome
    monkeypatch.setattr(memory_tenants, "rehome", rehome)
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
    """An engine with the tenants that move it; without tenants in the run that gives the expected results."""

    engine: DeepSpeedEngine
    optimizer: PooledTenant | None = None
    weights: PooledTenant | None = None

    def visit(self, pieces: list[Packed]) -> list:
        """Compute log-probs and take a step, released before, between and after; return all results."""
        if self.weights:
            self.weights.restore()
        with torch.no_grad():
            scores = logprobs_of(self.engine, pieces[0]).tolist()
        if self.weights and self.optimizer:
            self.weights.release()
            self.weights.restore()
            self.optimizer.restore()
        norm = take_step(self.engine, pieces)
        snapshot = self.engine.snapshot()
        self.leave()
        return [scores, norm, {name: tensor.tolist() for name, tensor in snapshot.tensors.items()}]

    def leave(self) -> None:
        for tenant in (self.optimizer, self.weights):
            if tenant:
                tenant.release()


def make(tiny: Path, world: World, stage: int, dtype: str) -> Trained:
    actor = load_actor(str(tiny / "policy"), ModelsConfig(dtype=dtype), CPU)
    for parameter in actor.parameters():
        parameter.data = parameter.data.clone()  # on a CPU they are in the mapped file, which cannot move
    return Trained(DeepSpeedEngine(actor, ADAM, zero_stage=stage, total_steps=6, world=world))


def make_moving(tiny: Path, world: World, stage: int, dtype: str, name: str = "actor") -> Trained:
    trained = make(tiny, world, stage, dtype)
    makes = tenants.Tenants(Config(memory=MemoryConfig(swap="vmm")), CPU)
    trained.optimizer = makes.optimizer(name, trained.engine)
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
    moving.optimizer.restore()
    moving.engine.snapshot().write(tmp_path, 0)
    moving.leave()
    found += [moving.visit(pieces) for _ in range(2)]
    assert found == expected

    resumed = make_moving(tiny, world, stage, dtype, "critic")  # loads into memory of the pool
    places = [tensor.data_ptr() for tensor in resumed.engine.optimizer_tensors()]
    resumed.engine.load(tmp_path)
    assert [tensor.data_ptr() for tensor in resumed.engine.optimizer_tensors()] == places
    resumed.leave()
    assert [resumed.visit(pieces) for _ in range(2)] == expected[2:]


@pytest.mark.parametrize("stage, dtype", CASES)
def test_a_step_leaves_gradients_in_the_buffers_only(tiny, world, pieces, stage, dtype):
    engine = make(tiny, world, stage, dtype).engine
    take_step(engine, pieces)
    assert all(p.grad is None and getattr(p, "grad_accum", None) is None for p in engine.module.parameters())
    buffers = {buffer.untyped_storage().data_ptr() for buffer in engine.gradient_buffers()}
    left = [tensor.grad for tensor in engine.training_state.stepped_tensors() if tensor.grad is not None]
    assert all(gradient.untyped_storage().data_ptr() in buffers for gradient in left)
    assert not any(getattr(engine.wrapped.optimizer, "averaged_gradients", {}).values())


@pytest.mark.parametrize("stage, dtype", CASES)
def test_tensors_of_one_storage_move_together(tiny, world, pieces, pool, stage, dtype):
    trained = make(tiny, world, stage, dtype)
    trained.engine.optimizer_tensors()  # creates the moments
    take_step(trained.engine, pieces)
    trained.engine.drop_gathered()
    before = [(tensor, tensor.untyped_storage().data_ptr()) for tensor in live_tensors() if tensor.numel()]
    makes = tenants.Tenants(Config(memory=MemoryConfig(swap="vmm")), CPU)
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
    """12 bytes per weight move as optimizer, 2 as parameters; DeepSpeed pads each of two groups to pairs."""
    trained = make_moving(tiny, world, 2, "bfloat16")
    numel = sum(p.numel() for p in trained.engine.module.parameters())
    buffers = sum(buffer.nbytes for buffer in trained.engine.module.buffers())
    assert trained.optimizer.release() == pytest.approx(12 * numel, abs=96)
    assert trained.weights.release() == pytest.approx(2 * numel + buffers, abs=64)
    assert pool.regions.keys() == {
        *("actor_optimizer", "actor_optimizer scratch", "actor_parameters", "actor_parameters scratch")
    }


def test_gradients_of_zero_1_are_dropped_and_restored_as_zeros(tiny, world, pieces, pool):
    trained = make_moving(tiny, world, 1, "bfloat16")
    buffers = trained.engine.gradient_buffers()
    assert pool.regions["actor_optimizer scratch"].policy == "drop"
    assert sum(buffer.nbytes for buffer in buffers) >= 4 * sum(p.numel() for p in trained.engine.module.parameters())
    take_step(trained.engine, pieces)
    trained.optimizer.release()
    assert all(buffer.isnan().all() for buffer in buffers)
    trained.optimizer.restore()
    assert all((buffer == 0).all() for buffer in buffers)


def test_a_tenant_without_room_for_its_scratch_remains_released(tiny, world, pool):
    tenant = PooledTenant(pool, "actor", [torch.ones(4)], scratch=[torch.ones(4)])
    tenant.release()
    for name in ("actor scratch", "actor"):
        pool.regions[name].is_full = True
        with pytest.raises(VmmOutOfMemoryError, match=name):
            tenant.restore()
        pool.regions[name].is_full = False
        assert not tenant.is_resident and not any(region.is_resident for region in pool.regions.values())
    assert tenant.restore() == 16


def test_a_frozen_module_is_copied_to_the_host_once(pool):
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
    tenant.parameters()["0.weight"].fill_(5.0)  # like a checkpoint that is loaded while the module is released
    tenant.restore()
    assert (module[0].weight == 5.0).all()


def test_the_manager_exchanges_leaving_and_entering_tenants(pool, tmp_path):
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
                here = phase in RESIDENCY[name].phases
                assert parts[name].is_resident == here and tensor.isnan().all() != here
    timeline.write(tmp_path / "timeline.json")
    written = (tmp_path / "timeline.json").read_text()
    assert written.count('"exchange critic_optimizer for actor_optimizer"') == 1
    assert tensors["actor_optimizer"].tolist() == [0.0] * 4


def test_settings_and_device_decide_which_tenants_move(tiny, world, monkeypatch):
    engine = make(tiny, world, 2, "bfloat16").engine
    offload = replace(Config(), memory=MemoryConfig(swap="deepspeed"))
    on_host = replace(offload, update=UpdateConfig(actor=OptimizerConfig(kind="cpu_adam")))
    off = replace(Config(), memory=MemoryConfig(swap="off"))
    module = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
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


def test_tenants_that_no_phase_releases_are_not_moved_into_the_pool(tiny, world, pool):
    names = ("actor_optimizer", "actor_parameters", "reference")
    residency = {**RESIDENCY, **{name: RESIDENCY[name].in_every_phase() for name in names}}
    manager = MemoryManager(residency, CPU, Timeline())
    assert manager.always_resident == {"actor_optimizer", "actor_parameters", "reference"}
    engine, module = make(tiny, world, 2, "bfloat16").engine, load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    makes = tenants.Tenants(Config(), CPU, always_resident=manager.always_resident)
    assert (
        type(makes.optimizer("actor", engine)) is type(makes.parameters("actor", engine, is_aliased=False)) is Resident
    )
    assert makes.frozen("reference", module) is None and not pool.regions
    assert type(makes.optimizer("critic", engine)) is PooledTenant and not makes.is_offloaded("critic")


def test_aliased_weights_are_always_resident(tiny, world, pool):
    engine = make(tiny, world, 2, "bfloat16").engine
    makes = tenants.Tenants(Config(), CPU)
    assert type(makes.parameters("actor", engine, is_aliased=True)) is Resident
    assert type(makes.parameters("actor", engine, is_aliased=False)) is PooledTenant


def test_vmm_without_the_library_is_an_error_and_auto_names_the_replacement(monkeypatch, caplog):
    monkeypatch.setattr("hybrid_rl_kernels.vmm_pool.find_library", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"memory.swap = vmm: libvmm_pool.so is not built; .*cmake -S"):
        memory_tenants.choose_pool("vmm", CUDA)
    with caplog.at_level(logging.WARNING):
        assert memory_tenants.choose_pool("auto", CUDA) is None
    message = "memory.swap = auto: DeepSpeed's offload moves the optimizer, because libvmm_pool.so is not built"
    assert message in caplog.text
    assert memory_tenants.choose_pool("vmm", CPU) is memory_tenants.choose_pool("off", CUDA) is None
