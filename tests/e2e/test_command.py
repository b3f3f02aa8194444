"""The demo as `make run` starts it, with small sizes: a first run, and a second one that continues it."""

import json
import re
from pathlib import Path

import pytest

SMALL = [
    "--rollout.rollout_batch_size=32",
    "--update.mini_batch_size=16",
    "--prompts.max_eval_samples=64",
    "--run.eval_every_steps=2",
    "--checkpoint.every_steps=1",
]


def steps_of(output: str) -> list[str]:
    return re.findall(r"^step (\d+/\d+)  reward -?[\d.]+  KL -?[\d.]+  accuracy [\d.]+%  tokens/s", output, re.M)


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_demo_trains_without_a_warning_and_continues(run_python, tmp_path):
    command = ["launch/colocated.py", "--run.dir", str(tmp_path), *SMALL]
    ended = run_python(*command, "--run.num_steps=2", timeout_s=400)  # the first time, it builds its models
    assert ended.code == 0, ended.output
    assert not ended.survivors
    assert "warning" not in ended.output.lower(), ended.output
    lines_with_triton = [line for line in ended.output.splitlines() if "triton" in line.lower()]
    assert all(line.startswith("hybrid_rl ") for line in lines_with_triton), ended.output  # its version, no complaint
    assert steps_of(ended.output) == ["1/2", "2/2"]
    assert re.search(r"^ *metric +before +after +change *$", ended.output, re.M), ended.output
    table = re.search(r"^ *accuracy +(0\.\d+|1) +(0\.\d+|1) +[+-][\d.e-]+ *$", ended.output, re.M)
    assert table, ended.output
    rows = rows_of(tmp_path / "demo")
    assert [row["step"] for row in rows] == [1, 2]
    assert 0.2 < rows[0]["accuracy"] < 0.7
    assert float(table[1]) == float(format(rows[0]["accuracy"], ".4g"))
    assert (tmp_path / "demo" / "export" / "config.json").exists()

    # hf instead of vLLM: it starts at once, and a run does not depend on which engine generates.
    ended = run_python(*command, "--run.num_steps=3", "--rollout.engine=hf")
    assert ended.code == 0, ended.output
    assert steps_of(ended.output) == ["3/3"]
    again = rows_of(tmp_path / "demo")
    assert again[:2] == rows and [row["step"] for row in again] == [1, 2, 3]
