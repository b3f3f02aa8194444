"""The residency table: whom a tenant belongs to, what a release does, and that the table imports quickly."""

import subprocess
import sys
from pathlib import Path

from hybrid_rl.memory.residency import RESIDENCY, always_resident

ROOT = Path(__file__).parents[2]


def test_specs_declare_the_owner_of_a_tenant_and_what_a_release_does():
    trained = {"critic_parameters", "critic_optimizer", "actor_parameters", "actor_optimizer"}
    assert {name for name, spec in RESIDENCY.items() if spec.is_trained} == trained
    assert {name for name, spec in RESIDENCY.items() if spec.model == "engine"} == {"engine_weights", "engine_kv_cache"}
    for name, spec in RESIDENCY.items():
        assert spec.on_release == ("drop" if spec.model == "engine" else "copy" if name in trained else "copy_once")
        assert not spec.is_always_resident and spec.in_every_phase().is_always_resident
    resident = {**RESIDENCY, "reference": RESIDENCY["reference"].in_every_phase()}
    assert always_resident(resident) == {"reference"}


def test_the_residency_table_imports_without_pytorch():
    program = "import sys; import hybrid_rl.memory.residency; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
