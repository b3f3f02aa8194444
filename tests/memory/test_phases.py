"""The memory manager: which tenant moves when, and every order of phases that it forbids."""

import json
from dataclasses import dataclass, field

import pytest
import torch

from hybrid_rl.errors import EngineLostError
from hybrid_rl.memory.phases import MemoryManager, PhaseError
from hybrid_rl.memory.residency import RESIDENCY, Phase
from hybrid_rl.memory.tenants import Resident
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


@pytest.mark.parametrize("before", [SYNC, ROLLOUT, SCORE])
def test_tenants_are_made_anew_while_all_others_are_released(before):
    run, engine = FakeRun(), ["engine_weights", "engine_kv_cache"]
    for phase in Phase:
        run.visit(phase, 1)
        if phase is before:
            break
    others = [name for name, tenant in run.tenants.items() if tenant.is_resident and name not in engine]

    def make():
        assert run.take_log() == [f"-{name}" for name in others]
        for name in engine:
            run.tenants[name].is_resident = True

    run.manager.replace(engine, make, step=1)
    assert run.take_log() == [f"-{name}" for name in engine]
    assert run.used() == 0
    assert run.visit(SYNC, 1) == ["+engine_weights", "+actor_parameters"]


def test_a_failure_to_make_tenants_anew_can_be_repeated():
    run, engine = FakeRun(), ["engine_weights", "engine_kv_cache"]
    run.visit(SYNC, 1)

    def fail():
        raise EngineLostError("lost while it starts")

    with pytest.raises(EngineLostError):
        run.manager.replace(engine, fail, step=1)
    run.tenants["engine_kv_cache"].is_resident = True
    run.manager.replace(engine, lambda: None, step=1)
    assert run.used() == 0


def test_tenants_are_not_made_anew_inside_a_phase():
    run = FakeRun()
    with run.manager.phase(SYNC), pytest.raises(PhaseError, match="inside phase sync"):
        run.manager.replace(["engine_weights"], lambda: None, step=1)


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
