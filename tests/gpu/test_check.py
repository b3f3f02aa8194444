"""`colocated.py check` on a machine with a GPU: forms of CUDA_VISIBLE_DEVICES, and what they select."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid_rl.machine.gpus import driver_uuids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROOT = Path(__file__).parents[2]


def check(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "launch/colocated.py", "check", f"--run.dir={folder}", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200)


def test_visible_gpus_are_one_rank_each_and_hidden_ones_leave_the_cpu(tmp_path):
    uuids = driver_uuids()
    assert uuids
    for value, line in {
        "0": "ranks: 1, with a GPU each; nodes: 1",
        f" {uuids[0]} ,": "ranks: 1, with a GPU each; nodes: 1",
        uuids[0][:12]: "ranks: 1, with a GPU each; nodes: 1",
        "": "ranks: 1, with a CPU each; nodes: 1",
        "-1": "ranks: 1, with a CPU each; nodes: 1",
    }.items():
        ended = check(tmp_path, CUDA_VISIBLE_DEVICES=value)
        assert ended.returncode == 0, (value, ended.stdout, ended.stderr)
        assert line in ended.stdout, (value, ended.stdout)
    assert not list(tmp_path.iterdir())


def test_what_cuda_would_ignore_is_refused_together_with_other_mistakes(tmp_path):
    many = len(driver_uuids() or [])
    for value in ("0,0", f"0,{many}", "GPU-00000000", "0,-1", "zero"):
        ended = check(tmp_path, "--update.mini_batch_size=7", CUDA_VISIBLE_DEVICES=value)
        assert ended.returncode == 2, (value, ended.stdout, ended.stderr)
        lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        assert sum("CUDA_VISIBLE_DEVICES" in line for line in lines) == 1, (value, lines)
        assert any("update.mini_batch_size = 7" in line for line in lines), (value, lines)


def test_an_allocator_that_cannot_share_memory_is_refused(tmp_path):
    ended = check(tmp_path, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert ended.returncode == 2 and "remove the backend" in ended.stderr, ended.stderr


def test_more_processes_than_gpus_are_refused(tmp_path):
    ended = check(tmp_path, "--num_processes=9")
    assert ended.returncode == 2 and "--num_processes 9: only" in ended.stderr, ended.stderr
