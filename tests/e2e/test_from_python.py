"""hybrid_rl.train with functions and rows of a program, on real DeepSpeed."""

import json
import os
import subprocess
import sys

import pytest

from hybrid_rl.config import as_dict
from tests.programs import PATHS, ROOT

PROGRAM = """
import json, sys
import hybrid_rl

bonus = 0.25
ROWS = [{"prompt": f"{n}+{n % 3}=", "gold": str(n + n % 3), "level": n} for n in range(8)]

def digits(completions, level, **kwargs):
    kwargs["log_metric"]("level", sum(level) / len(level))
    return [None if n > 5 else bonus + text.count("1") for text, n in zip(completions, level)]

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str) > 2), "length": len(solution_str)}

if __name__ == "__main__":
    config = json.loads(open(sys.argv[1]).read())
    config["run"]["num_steps"] = int(sys.argv[2])
    print("evaluation:", hybrid_rl.train(config, reward_functions=[digits, compute_score], dataset=ROWS))
"""


def settings(make_config, folder):
    """Return the settings of a run without prompts and functions as nested dictionaries."""
    config = as_dict(make_config(folder))
    config["prompts"] |= {"path": "", "eval_path": None}
    config["reward"]["functions"] = []
    config["models"]["reward"] = None
    config["checkpoint"]["every_steps"] = 1
    return config


def write_program(make_config, folder):
    (folder / "train.py").write_text(PROGRAM)
    (folder / "settings.json").write_text(json.dumps(settings(make_config, folder)))
    return [str(folder / "train.py"), str(folder / "settings.json")]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_program_trains_with_its_own_functions_and_rows_and_continues(run_forked, make_config, tmp_path):
    words = write_program(make_config, tmp_path)
    ended = run_forked(*words, "1")
    assert ended.code == 0 and not ended.survivors, ended.output
    assert "evaluation: {}" in ended.output
    assert "reward function given:digits is called as TRL's f(prompts, completions, **columns)" in ended.output
    assert "reward function given:compute_score is called as verl's compute_score(" in ended.output
    assert "continues" not in ended.output
    (row,) = rows_of(tmp_path)
    rollouts = [json.loads(line) for line in next((tmp_path / "run" / "rollouts").iterdir()).read_text().splitlines()]
    scores = [rollout["scores"].get("given:digits") for rollout in rollouts]
    applied = [score for score in scores if score is not None]
    assert row["reward/given:digits"] == pytest.approx(sum(applied) / len(applied))
    assert row["reward/given:compute_score/length"] == pytest.approx(
        sum(len(rollout["response"]) for rollout in rollouts) / len(rollouts)
    )
    assert all("given:digits/level" in rollout["extras"] for rollout in rollouts if "given:digits" in rollout["scores"])

    ended = run_forked(*words, "2")
    assert ended.code == 0, ended.output
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2] and rows_of(tmp_path)[0] == row


@pytest.mark.slow
def test_under_torchrun_the_processes_of_a_program_train_together(make_config, tmp_path):
    words = write_program(make_config, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words, "1"]
    environment = {**os.environ, **PATHS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path)
    rollouts = next((tmp_path / "run" / "rollouts").iterdir()).read_text().splitlines()
    assert len(rollouts) == 8 and "reward/given:digits" in row
