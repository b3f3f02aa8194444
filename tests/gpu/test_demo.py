"""The demo on one GPU: the command of `make run`, from building the models to the final table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROOT = Path(__file__).parents[2]


def test_the_demo_reaches_its_accuracy(tmp_path: Path) -> None:
    # varlen: a flash-attn that is built for some head sizes only may lack the demo's 32.
    settings = ["--run.dir", str(tmp_path), "--models.attention", "varlen", "--rollout.enforce_eager", "true"]
    command = [sys.executable, "launch/colocated.py", *settings, "--num_processes", "1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    print(summary)
    assert 0.3 <= summary["before"]["accuracy"] <= 0.6
    assert summary["after"]["accuracy"] >= 0.85
    assert "Producer process has been terminated" not in ended.stderr  # every CUDA IPC handle is closed
