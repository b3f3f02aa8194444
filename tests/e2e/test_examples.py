"""Games as their settings have them, with fewer steps, on real vLLM."""

import json

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["guessing", "gridworld"])
def test_a_policy_learns_a_game(name, run_python, tmp_path):
    if name == "gridworld":
        pytest.importorskip("gymnasium")
    command = ["launch/colocated.py", "--config", f"launch/configs/{name}.yaml", "--run.dir", str(tmp_path)]
    ended = run_python(*command, "--run.num_steps=5", timeout_s=500)  # the first time, it builds its policy
    assert ended.code == 0, ended.output
    rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["accuracy"] < 0.4
    assert rows[-1]["reward"] > rows[0]["reward"] + 0.15
    assert rows[-1]["environment/turns"] > 1 and rows[-1]["rollout/logprob_gap"] < 1e-3
