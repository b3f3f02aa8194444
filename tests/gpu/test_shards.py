"""Two cards that hold matrices between them: `python -m pytest -m multi_gpu tests/gpu/test_shards.py`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hybrid_rl.config import (
    AdvantageConfig,
    CheckpointConfig,
    Config,
    MemoryConfig,
    ModelsConfig,
    OptimizerConfig,
    PromptsConfig,
    RolloutConfig,
    RunConfig,
    SyncConfig,
    UpdateConfig,
    as_dict,
)
from hybrid_rl.validate import validate

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[2]


def make_config(small: Path, run_dir: Path, zero_stage: int, swap: Any, size: int) -> Config:
    """PPO with four models; every tensor of the hand-over is compared in every step."""
    return validate(
        Config(
            run=RunConfig(name="run", dir=str(run_dir), num_steps=3, eval_every_steps=0, resume="never"),
            models=ModelsConfig(actor=str(small / "policy"), reward=str(small / "reward")),
            prompts=PromptsConfig(path=str(small / "prompts.jsonl"), answer_column=None, max_prompt_tokens=64),
            rollout=RolloutConfig(
                rollout_batch_size=64, max_response_tokens=128, kv_cache_memory_bytes=2 << 30, enforce_eager=True
            ),
            advantage=AdvantageConfig(kl_coef=0.05),
            update=UpdateConfig(
                mini_batch_size=32,
                micro_batch_tokens=4096,
                tensor_parallel_size=size,
                zero_stage=zero_stage,
                actor=OptimizerConfig(lr=1e-5),
                critic=OptimizerConfig(lr=1e-5),
            ),
            sync=SyncConfig(mode="copy", num_verified=1000),
            memory=MemoryConfig(swap=swap),
            checkpoint=CheckpointConfig(every_steps=0, export=False),
        )
    )


def train(config: Config) -> list[dict[str, float]]:
    """Run on two cards and return the rows of metrics.jsonl."""
    path = Path(config.run.dir) / "settings.yaml"
    path.write_text(yaml.safe_dump(as_dict(config)))
    command = [sys.executable, "launch/colocated.py", "--config", str(path), "--num_processes", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=420)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("zero_stage, swap", [(1, "off"), (2, "vmm")])
def test_two_cards_that_share_matrices_train_what_two_that_do_not(small, tmp_path, zero_stage, swap):
    """The first step samples the same tokens; sums over the cards are rounded to bfloat16."""
    rows = []
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        rows.append(train(make_config(small, tmp_path / str(size), zero_stage, swap, size)))
    apart, shared = rows
    for name in (
        "rollout/logprob_gap",
        "actor/grad_norm",
        "critic/loss",
        "time/step",
        "memory/update_actor_peak_bytes",
    ):
        print(name, [row[name] for row in apart], [row[name] for row in shared])
    for name in ("reward", "rollout/response_length"):
        assert shared[0][name] == pytest.approx(apart[0][name], rel=1e-3)
    for name in ("kl", "actor/entropy", "actor/grad_norm", "critic/loss", "critic/grad_norm"):
        assert shared[0][name] == pytest.approx(apart[0][name], rel=0.05, abs=1e-3)
    assert max(row["rollout/logprob_gap"] for row in shared) < 0.02
    assert {row["sync/num_verified"] for row in shared} == {93}  # 10 layers of 9, an embedding, a norm and a head
