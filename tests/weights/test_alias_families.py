"""Engines that alias the trainer's weights equal those with copies, bit for bit, for every known family."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.config import ModelsConfig
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.weights.layout import KNOWN
from tests.conftest import make_rollout
from tests.programs import PATHS, ROOT
from tests.weights.alias_families import FAMILIES, PROMPTS


def run_families(folder: Path, names: list[str], *, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Return the results of the program for each family; vLLM changes classes of transformers in its process."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.weights.alias_families", str(folder), *names],
        cwd=ROOT,
        env=os.environ | PATHS,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@torch.no_grad()
def mean_gap(folder: Path, responses: list[dict[str, Any]], device: torch.device) -> float:
    """Return the mean |engine - trainer| log-prob of an engine's responses."""
    rollouts = [
        make_rollout(ids, found["token_ids"], prompt_id=row, rollout_logprobs=found["logprobs"], is_truncated=True)
        for row, (ids, found) in enumerate(zip(PROMPTS, responses, strict=True))
    ]
    packed = pack(make_train_batch(rollouts), list(range(len(rollouts))), device)
    actor = load_actor(str(folder), ModelsConfig(), device)
    ours, _ = actor(**packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0)
    theirs = torch.tensor([value for found in responses for value in found["logprobs"]], device=device)
    return float((ours - theirs).abs().mean())


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
    gaps = [mean_gap(folder / str(step), found["aliased"][step], device) for step in (0, 1)]
    print(name, "mean |engine - trainer| log-prob:", gaps)
    assert max(gaps) < largest_gap, (name, gaps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    return run_families(folder, list(FAMILIES), timeout_s=580)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_with_aliases_equals_one_with_copies(results, folder, name):
    check_family(results[name], folder / name, torch.device("cpu"), largest_gap=1e-4)


@pytest.mark.slow
def test_every_known_architecture_is_compared(results):
    assert {found["architecture"] for found in results.values()} == KNOWN
