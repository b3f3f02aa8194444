"""A rank that runs out of memory while another waits for it ends both with one sentence."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hybrid_rl.config import Config
from launch import colocated, ranks

ROOT = Path(__file__).parents[2]


def run_rank_without_memory(config: Config) -> None:
    """Train; on rank 1 the last layer runs out of memory in the part of an update that OUT_OF_MEMORY_IN names."""
    from hybrid_rl.models.packed import Actor

    forward = Actor.forward

    def exhausted(*_: object) -> None:
        (config.run_dir / "ran_out").touch()
        raise torch.OutOfMemoryError("CUDA out of memory")

    def forward_with_hook(self: Actor, *args: Any, **inputs: Any) -> Any:
        layer = self.model.base_model.layers[-1].mlp
        if torch.is_grad_enabled() and os.environ["RANK"] == "1":
            is_forward = os.environ["OUT_OF_MEMORY_IN"] == "forward"
            (layer.register_forward_pre_hook if is_forward else layer.register_full_backward_hook)(exhausted)
        return forward(self, *args, **inputs)

    Actor.forward = forward_with_hook  # type: ignore[method-assign]
    ranks.run_rank(config)


def main() -> None:
    """Run the launcher's two ranks, the second without memory, with the settings of a file."""
    config, num_processes = colocated.parse()
    colocated.choose_accelerator()
    assert num_processes
    ranks.launch_ranks(colocated.prepare(config), num_processes, run_rank_without_memory)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage, part", [(2, "backward"), (3, "forward")])
def test_both_ranks_end_with_one_sentence_within_30_s(tiny: Path, tmp_path: Path, zero_stage: int, part: str) -> None:
    settings = {
        "run": {"name": "run", "dir": str(tmp_path), "num_steps": 1, "eval_every_steps": 0},
        "models": {"actor": str(tiny / "policy"), "dtype": "float32"},
        "prompts": {"path": str(tiny / "prompts.jsonl"), "max_prompt_tokens": 8},
        "rollout": {"engine": "hf", "rollout_batch_size": 4, "group_size": 2, "max_response_tokens": 8},
        "reward": {"functions": ["exact_match"]},
        "advantage": {"estimator": "grpo"},
        "update": {"mini_batch_size": 8, "micro_batch_tokens": 64, "zero_stage": zero_stage},
        "checkpoint": {"every_steps": 0, "export": False},
    }
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, __file__, "--config", str(tmp_path / "settings.yaml"), "--num_processes", "2"]
    environment = {**os.environ, "OUT_OF_MEMORY_IN": part, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    seconds = time.time() - (tmp_path / "run" / "ran_out").stat().st_mtime
    assert ended.returncode == 5, ended.stderr
    (sentence,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert sentence.startswith("error: out of memory in UPDATE_ACTOR on rank 1: a micro-batch of 4 sequences and ")
    assert "because other ranks wait for this one in a collective; set update.micro_batch_tokens = " in sentence
    assert "Traceback" not in ended.stdout + ended.stderr
    assert seconds < 30


if __name__ == "__main__":
    main()
