"""vLLM computes with adapters as the trainer does, for every family whose base it can alias."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.models.packed import packed_inputs
from tests.conftest import make_rollout
from tests.programs import PATHS, ROOT
from tests.weights.adapter_families import load_with_adapters
from tests.weights.alias_families import FAMILIES, PROMPTS

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
DENSE = [name for name in FAMILIES if name not in ("deepseek2", "qwen3-moe", "olmoe", "glm4")]
"""Families whose adapters vLLM serves; the others get merged weights."""


def run_families(folder: Path, device: str, names: list[str], *, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Return the results of the program for each family; vLLM changes classes of transformers in its process."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.weights.adapter_families", str(folder), device, *names],
        cwd=ROOT,
        env=os.environ | PATHS,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@torch.no_grad()
def largest_gap(folder: Path, responses: list[dict[str, Any]], device: torch.device) -> float:
    """Return the largest |engine - trainer| log-prob of an engine's responses."""
    rollouts = [
        make_rollout(ids, found["token_ids"], prompt_id=row, rollout_logprobs=found["logprobs"], is_truncated=True)
        for row, (ids, found) in enumerate(zip(PROMPTS, responses, strict=True))
    ]
    packed = pack(make_train_batch(rollouts), list(range(len(rollouts))), device)
    actor, _ = load_with_adapters(folder, device)
    ours, _ = actor(**packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0)
    theirs = torch.tensor([value for found in responses for value in found["logprobs"]], device=device)
    return float((ours - theirs).abs().max())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    return run_families(folder, "cpu", DENSE, timeout_s=580)


@pytest.mark.parametrize("name", DENSE)
def test_engine_and_trainer_agree_and_the_base_stays(results, folder, name):
    found = results[name]
    assert found["same"] and found["is_base_unchanged"] and found["num_matrices"] >= 8
    assert largest_gap(folder / name, found["responses"], CPU) < 1e-3
