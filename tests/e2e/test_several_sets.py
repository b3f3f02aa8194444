"""A run on a mixture with several named evaluations: metrics, the target, best/, resume, ranks and both engines."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import Config
from tests.e2e.test_ranks import assert_close

NAMES = ("sums", "words")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return name -> path of rows of three formats."""
    folder = tmp_path_factory.mktemp("rows")
    rows: dict[str, list[dict[str, Any]]] = {
        "plain": [{"prompt": f"{n}+0=", "answer": n} for n in range(8)],
        "gsm8k": [{"question": f"{n}+1=", "answer": f"so\n#### {n + 1}"} for n in range(6)],
        "verl": [
            {"data_source": "mine", "prompt": f"{n}=", "reward_model": {"ground_truth": [str(n), "="]}}
            for n in range(5)
        ],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return {name: str(folder / f"{name}.jsonl") for name in rows}


@pytest.fixture
def mixed(make_config, paths, tmp_path):
    """Return a function that makes settings of a run on a mixture; keywords replace fields of a section."""

    def make(folder: Path = tmp_path, **sections: dict[str, Any]) -> Config:
        prompts = {
            "path": [{"path": paths["plain"], "weight": 1}, {"path": paths["verl"], "weight": 1}],
            "eval_path": {"sums": {"path": paths["gsm8k"], "data_source": "gsm8k"}, "words": paths["verl"]},
        }
        reward = {"functions": ["exact_match"], "by_source": {"mine": "exact_match"}, "on_error": "zero"}
        run = {"eval_function": "by_source", "eval_samples": 4, "eval_pass_at": [1, 2, 4], "eval_top_p": 0.9}
        run |= {"eval_max_response_tokens": 6, "eval_temperature": 0.7}
        given = {"prompts": prompts, "reward": reward, "run": run}
        return make_config(folder, **{**sections, **{n: v | sections.get(n, {}) for n, v in given.items()}})

    return make


def evaluations(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of the evaluations in metrics.jsonl and summary.json."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    after = json.loads((folder / "run" / "summary.json").read_text())["after"]
    return [{k: v for k, v in row.items() if k == "accuracy" or k.startswith("eval/")} for row in [*rows, after]]


def test_every_set_has_metrics_of_its_own_and_the_target_decides(mixed, train_here, tmp_path, capsys):
    train_here(mixed(run={"num_steps": 2, "eval_target": "words"}, checkpoint={"keep_best": True, "every_steps": 1}))
    found = evaluations(tmp_path)
    assert len(found) == 3
    metrics = (
        "accuracy",
        "score",
        "response_length",
        "truncated",
        "num_failed",
        "mean@4",
        "pass@1",
        "pass@2",
        "pass@4",
    )
    for row in found:
        assert row.keys() == {"accuracy", *(f"eval/{name}/{metric}" for name in NAMES for metric in metrics)}
        assert row["accuracy"] == row["eval/words/accuracy"]
        for name in NAMES:
            assert row[f"eval/{name}/pass@1"] == pytest.approx(row[f"eval/{name}/mean@4"])
            assert row[f"eval/{name}/pass@1"] <= row[f"eval/{name}/pass@2"] <= row[f"eval/{name}/pass@4"]
            assert 0 < row[f"eval/{name}/response_length"] <= 6
    best = json.loads((tmp_path / "run" / "best" / "best.json").read_text())
    assert best["accuracy"] == max(row["accuracy"] for row in found)
    shown = capsys.readouterr().out
    assert "in the format plain, 50.0% of the mixture" in shown and "in the format gsm8k, evaluation sums" in shown
    assert "eval/sums/pass@4" in shown and shown.index("in the format verl") < shown.index("step 1/2")


def test_a_run_on_a_mixture_that_continues_is_the_run_that_was_never_stopped(mixed, train_here, tmp_path):
    whole = train_here(mixed(tmp_path / "whole", run={"num_steps": 4}))
    drawn = [sorted(row["prompt_id"] >= 8 for row in rows) for rows in whole.rollouts]
    assert drawn == [[False] * 4 + [True] * 4] * 4  # groups of two responses
    train_here(mixed(tmp_path / "parts", run={"num_steps": 2}))
    parts = train_here(mixed(tmp_path / "parts", run={"num_steps": 4, "resume": "must"}))
    assert parts.rollouts == whole.rollouts and parts.metrics == whole.metrics
    assert parts.state["loader"] == whole.state["loader"]


def test_greedy_evaluations_are_the_default_and_do_not_depend_on_the_sets(
    mixed, make_config, train_here, paths, tmp_path
):
    greedy = {"eval_samples": 1, "eval_pass_at": None, "eval_top_p": 1.0, "eval_temperature": None}
    one = {"eval_path": paths["verl"]}
    settings = {**greedy, "eval_max_response_tokens": None, "num_steps": 1}
    train_here(mixed(tmp_path / "several", run=settings))
    train_here(mixed(tmp_path / "one", run=settings, prompts=one))
    several, alone = evaluations(tmp_path / "several"), evaluations(tmp_path / "one")
    for row, other in zip(several, alone, strict=True):
        assert row["eval/words/accuracy"] == other["accuracy"]
        assert row["eval/words/response_length"] == other["eval/response_length"]
        assert row["accuracy"] == pytest.approx((row["eval/words/accuracy"] + row["eval/sums/accuracy"]) / 2)


@pytest.mark.slow
def test_two_ranks_evaluate_and_train_what_one_does(mixed, train_here, read_run, launch, tmp_path):
    """Five held-out prompts of one set and six of the other, in batches of three prompts of the mixture."""
    sections = {"rollout": {"rollout_batch_size": 3}, "update": {"mini_batch_size": 2}, "run": {"num_steps": 2}}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    ended = launch(mixed(tmp_path / "two", **sections), "--num_processes", "2")
    assert ended.code == 0, ended.output
    assert ended.output.count("in the format plain, 50.0% of the mixture") == 1  # rank 0 alone
    assert_close(read_run(mixed(tmp_path / "two", **sections)), train_here(mixed(tmp_path / "one", **sections)))
    for row, wanted in zip(evaluations(tmp_path / "two"), evaluations(tmp_path / "one"), strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6) and len(row) == 19


@pytest.mark.slow
def test_vllm_samples_an_evaluation_as_it_is_set(mixed, train_here, tmp_path):
    """A nucleus of one token is greedy decoding, also for longer responses than in training."""
    narrow = {"eval_samples": 2, "eval_pass_at": [1, 2], "eval_temperature": 1.5, "eval_top_p": 1e-6}
    greedy = {"eval_samples": 1, "eval_pass_at": None, "eval_temperature": None, "eval_top_p": 1.0}
    found = {}
    for name, settings in {"narrow": narrow, "greedy": greedy}.items():
        run = {**settings, "num_steps": 1, "eval_max_response_tokens": 20}
        train_here(mixed(tmp_path / name, run=run, rollout={"engine": "vllm", "max_response_tokens": 12}))
        found[name] = evaluations(tmp_path / name)[0]
    for metric in ("accuracy", "score", "response_length", "truncated"):
        assert all(found["narrow"][f"eval/{n}/{metric}"] == found["greedy"][f"eval/{n}/{metric}"] for n in NAMES)
    assert max(found["greedy"][f"eval/{n}/response_length"] for n in NAMES) > 12
    assert all(found["narrow"][f"eval/{n}/pass@2"] == found["narrow"][f"eval/{n}/pass@1"] for n in NAMES)
