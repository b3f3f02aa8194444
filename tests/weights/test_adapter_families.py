"""vLLM computes with adapters as the trainer does, for every family whose base it can alias."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weights.adapter_families import load_with_adapters
from tests.weights.alias_families import FAMILIES, PROMPTS
from tests.weights.family_programs import logprob_gaps, run_families

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
DENSE = [name for name in FAMILIES if name not in ("deepseek2", "qwen3-moe", "olmoe", "glm4")]
"""Families whose adapters vLLM serves; the others get merged weights."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    return run_families("tests.weights.adapter_families", str(folder), "cpu", *DENSE, timeout_s=580)


@pytest.mark.parametrize("name", DENSE)
def test_engine_and_trainer_agree_and_the_base_stays(results, folder, name):
    found = results[name]
    assert found["same"] and found["is_base_unchanged"] and found["num_matrices"] >= 8
    actor, _ = load_with_adapters(folder / name, CPU)
    assert logprob_gaps(actor, PROMPTS, found["responses"], CPU).max() < 1e-3
