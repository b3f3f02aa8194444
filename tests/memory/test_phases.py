"""The phase machine: which tenant moves when, and every order that it forbids."""

from dataclasses import dataclass, field

import pytest
import torch

from hybrid_rl.memory.device import grow_segments
from hybrid_rl.memory.phases import MemoryManager, PhaseError
from hybrid_rl.memory.residency import RESIDENCY, Phase
from hybrid_rl.memory.tenants import FrozenModule, Resident
from hybrid_rl.monitoring.timeline import Timeline

SYNC, ROLLOUT, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = Phase
CPU = torch.device("cpu")
BYTES = {
    "engine_weights": 3,
    "engine_kv_cache": 5,
    "reference": 2,
    "reward_model": 2,
    "critic_parameters": 1,
    "critic_optimizer": 12,
    "actor_parameters": 2,
    "actor_optimizer": 16,
}


ADMITTED = [
    *("engine_weights", "engine_kv_cache", "actor_optimizer", "actor_parameters"),
    *("critic_optimizer", "critic_parameters", "reference", "reward_model"),
]


@dataclass
class FakeTenant:
    """Takes `num_bytes` while it is resident and writes down each move."""

    name: str
    log: list[str]
    filled_in: Phase | None = None
    is_resident: bool = True
    num_bytes: int = 1

    def release(self) -> int:
        assert self.is_resident
        self.is_resident = False
        self.log.append(f"-{self.name}")
        return self.num_bytes

    def restore(self) -> int:
        assert not self.is_resident
        self.is_resident = True
        self.log.append(f"+{self.name}")
        return self.num_bytes


@dataclass
class House:
    """A manager with a fake tenant for each row of the trainer's table, admitted in the order of the build."""

    log: list[str] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    peak: int = 0

    def __post_init__(self) -> None:
        self.manager = MemoryManager(RESIDENCY, CPU, self.timeline)
        self.tenants: dict[str, FakeTenant] = {}
        for name in ADMITTED:
            filled_in = SYNC if name == "engine_weights" else None
            tenant = FakeTenant(name, self.log, filled_in=filled_in, num_bytes=BYTES[name])
            self.tenants[name] = tenant
            self.peak = max(self.peak, self.used())
            self.manager.admit(name, tenant)

    def used(self) -> int:
        return sum(t.num_bytes for t in self.tenants.values() if t.is_resident)

    def take_log(self) -> list[str]:
        taken, self.log[:] = list(self.log), []
        return taken

    def visit(self, phase: Phase, step: int) -> list[str]:
        with self.manager.phase(phase, step):
            self.peak = max(self.peak, self.used())
        return self.take_log()


def test_each_tenant_leaves_before_the_next_is_built():
    house = House()
    assert house.take_log() == [f"-{name}" for name in house.tenants]
    assert house.used() == 0
    assert house.peak == 16  # the largest alone, never two


def test_moves_of_two_steps():
    house = House()
    house.take_log()
    first = {
        SYNC: ["+engine_weights", "+actor_parameters"],
        ROLLOUT: ["-actor_parameters", "+engine_kv_cache"],
        SCORE: [
            *("-engine_weights", "-engine_kv_cache"),
            *("+actor_parameters", "+critic_parameters", "+reference", "+reward_model"),
        ],
        UPDATE_CRITIC: ["-actor_parameters", "-reference", "-reward_model", "+critic_optimizer"],
        UPDATE_ACTOR: ["-critic_optimizer", "-critic_parameters", "+actor_optimizer", "+actor_parameters"],
    }
    assert {phase: house.visit(phase, 1) for phase in Phase} == first
    second = {**first, SYNC: ["-actor_optimizer", "+engine_weights"]}
    assert {phase: house.visit(phase, 2) for phase in Phase} == second


def test_peak_is_the_largest_phase():
    house = House()
    residents = {}
    for phase in [*Phase, *Phase]:
        house.visit(phase, 1)
        residents[phase] = house.used()
    # Within phases; moves themselves are covered by the order release before restore.
    assert residents == {SYNC: 5, ROLLOUT: 8, SCORE: 7, UPDATE_CRITIC: 13, UPDATE_ACTOR: 18}
    assert house.peak == 18


def test_each_move_is_in_the_timeline_with_its_bytes(tmp_path):
    house = House()
    house.visit(SYNC, 4)
    house.timeline.write(tmp_path / "timeline.json")
    import json

    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    restore = next(e for e in events if e["name"] == "restore engine_weights")
    assert restore["args"]["bytes"] == 3 and restore["args"]["step"] == 4 and restore["cat"] == "sync"
    phase, transition = (next(e for e in events if e["name"] == name) for name in ("sync", "transition"))
    assert phase["ts"] <= transition["ts"] <= restore["ts"] and restore["dur"] <= transition["dur"] <= phase["dur"]
    assert transition["args"] == {"step": 4, "phase": "sync"}


def test_current_phase():
    house = House()
    assert house.manager.current is None
    with house.manager.phase(SYNC):
        assert house.manager.current is SYNC
    assert house.manager.current is None


@pytest.mark.parametrize("outer", Phase)
@pytest.mark.parametrize("inner", Phase)
def test_no_phase_opens_inside_another(outer, inner):
    house = House()
    house.visit(SYNC, 1)
    with (
        house.manager.phase(outer),
        pytest.raises(PhaseError, match=f"{inner.value} opened inside phase {outer.value}"),
    ):
        house.manager.phase(inner).__enter__()
    assert house.manager.current is None


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("phase", Phase)
def test_every_pair_of_phases(before, phase):
    """The engine's weights are dropped in all but SYNC and ROLLOUT, and only SYNC fills them again."""
    house = House()
    house.visit(SYNC, 1)
    house.visit(before, 1)
    if phase is ROLLOUT and before not in (SYNC, ROLLOUT):
        with pytest.raises(PhaseError, match=r"engine_weights was dropped and would enter rollout .*sync fills it"):
            house.visit(phase, 1)
        assert house.take_log() == []  # refused before anything moved
        house.visit(SYNC, 2)  # and the way out is open
        phase = SYNC
    else:
        house.visit(phase, 1)
    assert {n for n, t in house.tenants.items() if t.is_resident} == {n for n in RESIDENCY if phase in RESIDENCY[n]}


def test_rollout_before_the_first_sync_is_refused():
    with pytest.raises(PhaseError, match="engine_weights"):
        House().visit(ROLLOUT, 1)


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("phase", Phase)
def test_tenant_that_moved_by_itself_is_named(name, phase):
    house = House()
    house.visit(SYNC, 1)
    house.visit(phase, 1)
    tenant = house.tenants[name]
    tenant.is_resident = not tenant.is_resident
    with pytest.raises(PhaseError, match=f"tenant {name} is_resident={tenant.is_resident}"):
        house.visit(SYNC, 2)


def test_tenant_that_does_not_move_is_named():
    class Stuck(FakeTenant):
        def release(self) -> int:
            return 0

    manager = MemoryManager(RESIDENCY, CPU, Timeline())
    with pytest.raises(PhaseError, match="tenant reference says is_resident=True after release"):
        manager.admit("reference", Stuck("reference", []))


def test_unknown_and_double_tenants_are_refused():
    manager = MemoryManager(RESIDENCY, CPU, Timeline())
    with pytest.raises(PhaseError, match="no row for optimizer"):
        manager.admit("optimizer", Resident())
    manager.admit("reference", Resident())
    with pytest.raises(PhaseError, match="reference was admitted before"):
        manager.admit("reference", Resident())


def test_phase_closes_when_its_body_fails():
    house = House()
    house.visit(SYNC, 1)
    with pytest.raises(ZeroDivisionError), house.manager.phase(SCORE):
        raise ZeroDivisionError
    assert house.manager.current is None
    house.take_log()
    assert house.visit(UPDATE_CRITIC, 1) == ["-actor_parameters", "-reference", "-reward_model", "+critic_optimizer"]


def test_resident_moves_nothing_and_follows_the_table():
    tenant = Resident()
    assert tenant.filled_in is None
    manager = MemoryManager(RESIDENCY, CPU, Timeline())
    manager.admit("reference", tenant)
    assert not tenant.is_resident
    with manager.phase(SCORE):
        assert tenant.is_resident
    assert tenant.release() == tenant.restore() == 0
    with manager.phase(ROLLOUT):
        assert not tenant.is_resident


def test_dropped_resident_is_held_to_the_table_too():
    manager = MemoryManager(RESIDENCY, CPU, Timeline())
    manager.admit("engine_weights", Resident(filled_in=SYNC))
    with pytest.raises(PhaseError, match="sync fills it"):
        manager.phase(ROLLOUT).__enter__()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_module_comes_back_bit_for_bit(device):
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).to(device)
    before = {name: t.clone().cpu() for name, t in module.state_dict().items()}
    tenant = FrozenModule(module)
    num_bytes = sum(t.nbytes for t in [*module.parameters(), *module.buffers()])
    assert not any(p.requires_grad for p in module.parameters())
    for expected_copied in (num_bytes, 0):
        assert tenant.release() == expected_copied
        assert all(p.numel() == 0 for p in module.parameters()) and not tenant.is_resident
        assert tenant.restore() == num_bytes
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor.cpu(), before[name])


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_module_that_was_written_to_is_copied_out_anew(device):
    module = torch.nn.Linear(2, 1).to(device)
    tenant = FrozenModule(module)
    for value, expected_copied in ((1.0, 12), (2.0, 12), (2.0, 0)):
        if expected_copied:
            torch.nn.init.constant_(module.weight, value)
        assert tenant.parameters()["weight"].data_ptr() == module.weight.data_ptr()
        assert tenant.release() == expected_copied
        assert tenant.parameters()["weight"].tolist() == [[value, value]]
        assert tenant.parameters().keys() == {"weight", "bias"} and module.weight.numel() == 0
        tenant.restore()
        assert module.weight.tolist() == [[value, value]]
    tenant.release()
    tenant.parameters()["weight"].fill_(5.0)  # as a checkpoint does that is read while the module is away
    tenant.restore()
    assert module.weight.tolist() == [[5.0, 5.0]]


@pytest.mark.parametrize(
    "name, value, kept",
    [
        ("PYTORCH_ALLOC_CONF", "", ""),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False,max_split_size_mb:512", "max_split_size_mb:512,"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512, expandable_segments:True", "max_split_size_mb:512,"),
    ],
)
def test_segments_grow_beside_what_the_user_has_set(monkeypatch, name, value, kept):
    given: list[str] = []
    take = torch._C._accelerator_setAllocatorSettings
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: (take(text), given.append(text)))
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    grow_segments(torch.device("cpu"), is_on=True)
    assert given == []
    for is_on in (True, False):
        grow_segments(torch.device("cuda"), is_on=is_on)
    assert given == [f"{kept}expandable_segments:True", f"{kept}expandable_segments:False"]
