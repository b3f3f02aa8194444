"""The memory manager: which tenant moves when, and every order of phases that it forbids."""

import json
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
    """Occupies `num_bytes` while it is resident, and appends each move to a log."""

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
class FakeRun:
    """A memory manager with a fake tenant for each entry of RESIDENCY, admitted in the order of the build."""

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


def test_each_tenant_is_released_before_the_next_is_admitted():
    run = FakeRun()
    assert run.take_log() == [f"-{name}" for name in run.tenants]
    assert run.used() == 0
    assert run.peak == 16  # the largest tenant alone, never two at once


def test_moves_of_every_phase_in_two_steps():
    run = FakeRun()
    run.take_log()
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
    assert {phase: run.visit(phase, 1) for phase in Phase} == first
    second = {**first, SYNC: ["-actor_optimizer", "+engine_weights"]}
    assert {phase: run.visit(phase, 2) for phase in Phase} == second


def test_peak_is_that_of_the_largest_phase():
    run = FakeRun()
    residents = {}
    for phase in [*Phase, *Phase]:
        run.visit(phase, 1)
        residents[phase] = run.used()
    # These are bytes inside phases; during moves the order release before restore bounds the peak.
    assert residents == {SYNC: 5, ROLLOUT: 8, SCORE: 7, UPDATE_CRITIC: 13, UPDATE_ACTOR: 18}
    assert run.peak == 18


def test_the_timeline_has_each_move_with_its_bytes(tmp_path):
    run = FakeRun()
    run.visit(SYNC, 4)
    run.timeline.write(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    restore = next(e for e in events if e["name"] == "restore engine_weights")
    assert restore["args"]["bytes"] == 3 and restore["args"]["step"] == 4 and restore["cat"] == "sync"
    phase, transition = (next(e for e in events if e["name"] == name) for name in ("sync", "transition"))
    assert phase["ts"] <= transition["ts"] <= restore["ts"] and restore["dur"] <= transition["dur"] <= phase["dur"]
    assert transition["args"] == {"step": 4, "phase": "sync"}


def test_current_is_the_open_phase():
    run = FakeRun()
    assert run.manager.current is None
    with run.manager.phase(SYNC):
        assert run.manager.current is SYNC
    assert run.manager.current is None


@pytest.mark.parametrize("outer", Phase)
@pytest.mark.parametrize("inner", Phase)
def test_no_phase_opens_inside_another(outer, inner):
    run = FakeRun()
    run.visit(SYNC, 1)
    with (
        run.manager.phase(outer),
        pytest.raises(PhaseError, match=f"{inner.value} opened inside phase {outer.value}"),
    ):
        run.manager.phase(inner).__enter__()
    assert run.manager.current is None


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("phase", Phase)
def test_every_pair_of_phases(before, phase):
    """The engine's weights are dropped outside of SYNC and ROLLOUT, and only SYNC fills them again."""
    run = FakeRun()
    run.visit(SYNC, 1)
    run.visit(before, 1)
    if phase is ROLLOUT and before not in (SYNC, ROLLOUT):
        with pytest.raises(PhaseError, match=r"engine_weights was dropped and would enter rollout .*sync fills it"):
            run.visit(phase, 1)
        assert run.take_log() == []  # refused before anything moved
        run.visit(SYNC, 2)  # the manager is still usable
        phase = SYNC
    else:
        run.visit(phase, 1)
    assert {n for n, t in run.tenants.items() if t.is_resident} == {
        n for n in RESIDENCY if phase in RESIDENCY[n].phases
    }


def test_rollout_before_the_first_sync_is_refused():
    with pytest.raises(PhaseError, match="engine_weights"):
        FakeRun().visit(ROLLOUT, 1)


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("phase", Phase)
def test_error_names_a_tenant_that_moved_outside_of_the_manager(name, phase):
    run = FakeRun()
    run.visit(SYNC, 1)
    run.visit(phase, 1)
    tenant = run.tenants[name]
    tenant.is_resident = not tenant.is_resident
    with pytest.raises(PhaseError, match=f"tenant {name} is_resident={tenant.is_resident}"):
        run.visit(SYNC, 2)


def test_error_names_a_tenant_that_did_not_move():
    class Stuck(FakeTenant):
        def release(self) -> int:
            return 0

    manager = MemoryManager(RESIDENCY, CPU, Timeline())
    with pytest.raises(PhaseError, match="tenant reference says is_resident=True after release"):
        manager.admit("reference", Stuck("reference", []))


def test_unknown_and_duplicate_tenants_are_refused():
    manager = MemoryManager(RESIDENCY, CPU, Timeline())
    with pytest.raises(PhaseError, match="no tenant named optimizer"):
        manager.admit("optimizer", Resident())
    manager.admit("reference", Resident())
    with pytest.raises(PhaseError, match="reference was admitted before"):
        manager.admit("reference", Resident())


def test_phase_closes_when_its_body_fails():
    run = FakeRun()
    run.visit(SYNC, 1)
    with pytest.raises(ZeroDivisionError), run.manager.phase(SCORE):
        raise ZeroDivisionError
    assert run.manager.current is None
    run.take_log()
    assert run.visit(UPDATE_CRITIC, 1) == ["-actor_parameters", "-reference", "-reward_model", "+critic_optimizer"]


def test_resident_tenant_follows_the_table_and_copies_nothing():
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


def test_resident_tenant_that_is_filled_in_one_phase_is_checked_too():
    manager = MemoryManager(RESIDENCY, CPU, Timeline())
    manager.admit("engine_weights", Resident(filled_in=SYNC))
    with pytest.raises(PhaseError, match="sync fills it"):
        manager.phase(ROLLOUT).__enter__()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_module_is_restored_bit_for_bit(device):
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
def test_frozen_module_is_copied_to_the_host_again_after_a_change(device):
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
    tenant.parameters()["weight"].fill_(5.0)  # like a checkpoint loaded while the module is released
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
def test_expandable_segments_keep_the_users_allocator_settings(monkeypatch, name, value, kept):
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


def test_specs_say_whom_a_tenant_belongs_to_and_what_a_release_does():
    trained = {"critic_parameters", "critic_optimizer", "actor_parameters", "actor_optimizer"}
    assert {name for name, spec in RESIDENCY.items() if spec.is_trained} == trained
    assert {name for name, spec in RESIDENCY.items() if spec.model == "engine"} == {"engine_weights", "engine_kv_cache"}
    for name, spec in RESIDENCY.items():
        assert spec.on_release == ("drop" if spec.model == "engine" else "copy" if name in trained else "copy_once")
        assert not spec.is_always_resident and spec.in_every_phase().is_always_resident
    resident = {**RESIDENCY, "reference": RESIDENCY["reference"].in_every_phase()}
    assert MemoryManager(resident, CPU, Timeline()).always_resident == {"reference"}
