"""One engine over two cards: `python -m pytest -m multi_gpu tests/gpu/test_tensor_parallel.py` where there are two."""

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
KV_BYTES, MIB = 2 << 30, 1 << 20


def make_config(small: Path, run_dir: Path, zero_stage: int, swap: Any, size: int) -> Config:
    return validate(
        Config(
            run=RunConfig(name="run", dir=str(run_dir), num_steps=4, eval_every_steps=0, resume="never"),
            models=ModelsConfig(actor=str(small / "policy"), reward=str(small / "reward")),
            prompts=PromptsConfig(path=str(small / "prompts.jsonl"), answer_column=None, max_prompt_tokens=64),
            rollout=RolloutConfig(
                tensor_parallel_size=size,
                rollout_batch_size=64,
                max_response_tokens=64,
                kv_cache_memory_bytes=KV_BYTES,
                enforce_eager=True,
            ),
            advantage=AdvantageConfig(kl_coef=0.05),
            update=UpdateConfig(
                mini_batch_size=32,
                micro_batch_tokens=4096,
                zero_stage=zero_stage,
                actor=OptimizerConfig(lr=1e-4),
                critic=OptimizerConfig(lr=1e-4),
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


@pytest.mark.parametrize("zero_stage, swap", [(2, "vmm"), (3, "deepspeed")])
def test_an_engine_over_two_cards_follows_the_trainer_and_sleeps(small, tmp_path, zero_stage, swap):
    rows = train(make_config(small, tmp_path, zero_stage, swap, size=2))
    assert len(rows) == 4
    gaps = [row["rollout/logprob_gap"] for row in rows]
    print("gap:", gaps, "hand-over in s:", [row["time/sync"] for row in rows])
    assert max(gaps) < 0.02
    # Every tensor of both workers in every step: the policy has 10 layers of 9, an embedding, a norm and a head.
    assert {row["sync/num_verified"] for row in rows} == {93}
    assert rows[-1]["memory/score_bytes"] < rows[-1]["memory/rollout_bytes"] - (KV_BYTES - 150 * MIB)
    used = [row["memory/rollout_bytes"] / MIB for row in rows[1:]]
    assert max(used) - min(used) <= 64, used


def test_it_trains_what_two_engines_do(small, tmp_path):
    """The same prompts; sampled tokens may part where two probabilities are close, in bfloat16."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = (train(make_config(small, tmp_path / name, 2, "off", size)) for name, size in (("one", 1), ("two", 2)))
    print([(a["actor/loss"], b["actor/loss"]) for a, b in zip(one, two, strict=True)])
    assert one[0]["critic/loss"] == pytest.approx(two[0]["critic/loss"], rel=0.1)
    assert [row["rollout/logprob_gap"] for row in two] == pytest.approx(
        [row["rollout/logprob_gap"] for row in one], abs=0.01
    )
