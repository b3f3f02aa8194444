"""Engines that alias the trainer's weights equal those with copies, bit for bit, for every known family."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.config import ModelsConfig
from hybrid_rl.models.loading import load_actor
from hybrid_rl.weights.layout import KNOWN
from tests.weights.alias_families import FAMILIES, PROMPTS
from tests.weights.family_programs import logprob_gaps, run_families

PROGRAM = "tests.weights.alias_families"


def check_family(found: dict[str, Any], folder: Path, device: torch.device, *, largest_gap: float) -> None:
    """Check the results of the program for one family.

    Args:
        folder: the family's folder, with the trainer's models before and after its weights change.
        largest_gap: bound of the mean |engine - trainer| log-prob.
    """
    name = folder.name
    assert found["reason"] is None and found["architecture"] in KNOWN, name
    assert found["held"], name
    assert found["aliased"][0] != found["aliased"][1], name
    assert found["aliased"][1] == found["copied"], name
    gaps = []
    for step in (0, 1):
        actor = load_actor(str(folder / str(step)), ModelsConfig(), device)
        gaps.append(float(logprob_gaps(actor, PROMPTS, found["aliased"][step], device).mean()))
    print(name, "mean |engine - trainer| log-prob:", gaps)
    assert max(gaps) < largest_gap, (name, gaps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    return run_families(PROGRAM, str(folder), *FAMILIES, timeout_s=580)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_with_aliases_equals_one_with_copies(results, folder, name):
    check_family(results[name], folder / name, torch.device("cpu"), largest_gap=1e-4)


@pytest.mark.slow
def test_every_known_architecture_is_compared(results):
    assert {found["architecture"] for found in results.values()} == KNOWN
