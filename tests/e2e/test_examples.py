"""The guessing game as its settings have it, with fewer steps, on real vLLM."""

import json

import pytest


@pytest.mark.slow
def test_a_policy_learns_the_guessing_game(run_python, tmp_path):
    command = ["launch/colocated.py", "--config", "launch/configs/guessing.yaml", "--run.dir", str(tmp_path)]
    ended = run_python(*command, "--run.num_steps=5", timeout_s=500)  # the first time, it builds its policy
    assert ended.code == 0, ended.output
    rows = [json.loads(line) for line in (tmp_path / "guessing" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["accuracy"] < 0.4
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.15
    assert rows[-1]["environment/turns"] > 1 and rows[-1]["rollout/logprob_gap"] < 1e-3
