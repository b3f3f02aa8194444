"""A phase that takes more of the GPU than its plan and the margin is reported once, or ends the run."""

import pytest

from hybrid_rl.config import MemoryConfig
from hybrid_rl.errors import RunError
from hybrid_rl.memory.enforcement import GIB, Enforcement

PLANNED = {"weights": 10 * GIB, "activations": 5 * GIB, "context": GIB, "optimizer": 24 * GIB}
"""40 GiB, so that a margin of a tenth ends at 44 GiB."""


def compare(enforce: str, *peaks_gib: float, margin: float = 0.1, phases: tuple[str, ...] = ("score",)) -> None:
    enforcement = Enforcement(MemoryConfig(enforce=enforce, enforce_margin=margin), rank=3)
    for phase in phases:
        for peak in peaks_gib:
            enforcement.compare(phase, PLANNED, int(peak * GIB))


def test_the_warning_names_phase_bytes_and_the_largest_parts_of_the_plan(caplog):
    compare("warn", 44.5)
    assert caplog.messages == [
        "phase score took 47,781,511,168 bytes (44.5 GiB) of the GPU of rank 3, more than its plan of 42,949,672,960 "
        "bytes (40.0 GiB) and memory.enforce_margin = 0.1 (memory.enforce = warn); the largest parts of the plan are "
        "optimizer with 24.0 GiB, weights with 10.0 GiB, activations with 5.0 GiB; lower update.micro_batch_tokens or "
        "rollout.kv_cache_memory_bytes, or end what else uses the GPU"
    ]


def test_every_phase_is_reported_once(caplog):
    compare("warn", 45, 50, phases=("score", "update_actor"))
    assert [message.split(" took")[0] for message in caplog.messages] == ["phase score", "phase update_actor"]


@pytest.mark.parametrize(
    "enforce, margin, peak_gib", [("warn", 0.1, 44), ("stop", 0.1, 44), ("stop", 0.5, 60), ("warn", 0, 40)]
)
def test_a_peak_within_plan_and_margin_is_fine(caplog, enforce, margin, peak_gib):
    compare(enforce, peak_gib, margin=margin)
    assert caplog.messages == []


def test_stop_ends_the_run(caplog):
    with pytest.raises(RunError, match=r"^phase score took .* \(memory\.enforce = stop\)"):
        compare("stop", 44.5)
    assert caplog.messages == []


def test_off_says_nothing(caplog):
    compare("off", 400)
    assert caplog.messages == []
