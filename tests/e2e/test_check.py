"""`colocated.py check`: the real command, beside a start that finds the same."""

import pytest


def test_the_command_prints_one_line_per_mistake_and_a_start_prints_the_same(run_forked, make_config, tmp_path):
    config = make_config(tmp_path)
    missing = str(tmp_path / "missing.jsonl")
    models, prompts = config.models, config.prompts  # without the demo, which is built at its first use
    arguments = [f"--models.actor={models.actor}", f"--models.reward={models.reward}", f"--run.dir={tmp_path}"]
    arguments += [f"--prompts.path={missing}", f"--prompts.eval_path={prompts.eval_path}"]
    arguments += ["--update.mini_batch_size=7"]
    sentences = run_forked("launch/colocated.py", "check", *arguments).error_sentences()
    assert any("update.mini_batch_size = 7" in sentence for sentence in sentences)
    assert any(missing in sentence for sentence in sentences)
    assert run_forked("launch/colocated.py", *arguments).error_sentences() == sentences
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
def test_the_command_describes_a_run_without_mistakes(run_forked, tmp_path):
    ended = run_forked("launch/colocated.py", "check", f"--run.dir={tmp_path}", "--num_processes=2")
    assert ended.code == 0, ended.output
    lines = ended.output.splitlines()
    first = lines.index("settings, models, data and machine: no mistakes")
    assert lines[first + 1] == "ranks: 2, with a CPU each; nodes: 1"
    assert "rollout engine: vLLM, one per rank, shared weights" in lines[first:]
    assert not list(tmp_path.iterdir())
    elsewhere = run_forked("launch/colocated.py", "check", f"--run.dir={tmp_path}", "--gpus=3", "--nodes=2")
    assert elsewhere.code == 0, elsewhere.output
    assert "ranks: 6, with a GPU each; nodes: 2" in elsewhere.output.splitlines()
