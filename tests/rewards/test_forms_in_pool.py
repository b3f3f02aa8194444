"""Functions in all signatures, batched and asynchronous ones among them, in scorer processes with their limits."""

import math
import re
import time
from dataclasses import replace

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.errors import RewardLostError
from hybrid_rl.rewards import ScorerPool
from tests.conftest import make_rollout

FUNCTIONS = """
import asyncio, os, time
def own(prompt, response): return {"score": len(response), "acc": True, "pred": response}
def reward_func(queries, prompts, labels, **kwargs):
    import torch
    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    right = torch.tensor([float(text == label) for text, label in zip(texts, labels)])
    return {"rewards": right - 0.5, "scores": right, "extra_logs": {"calls": len(queries), "right": right.mean()}}
def trl(prompts, completions, answer, **kwargs):
    kwargs["log_metric"]("size", len(completions))
    return [None if gold == "skip" else float(text == gold) for text, gold in zip(completions, answer)]
def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "pred": solution_str}
async def judge(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.5)
    return 1.0
async def sleeps(completions, **kwargs): await asyncio.sleep(60)
def short(completions, **kwargs): return [1.0]
def none(completions, **kwargs): return None
def nan(completions, **kwargs): return [float("nan") if text == "8" else 1.0 for text in completions]
def raises(completions, **kwargs): raise KeyError("gold")
def exits(completions, **kwargs): os._exit(3)
async def one_raises(prompt, response):
    if response == "8": raise KeyError("gold")
    return 1.0
def abstains(prompt, response): return None
def process(prompt, response): return [0, 0.25, 0]
def steps(prompt, response): return {"score": 1, "step_rewards": [(1, 0.5)]}
"""


@pytest.fixture
def make_pool(tmp_path):
    """Return a function that makes a pool of functions in FUNCTIONS."""
    (tmp_path / "f.py").write_text(FUNCTIONS)

    def make(*names, on_error="zero", timeout_s=30.0, num_workers=1, **arguments):
        paths = [f"{tmp_path}/f.py:{name}" for name in names]
        return ScorerPool(paths, on_error=on_error, timeout_s=timeout_s, num_workers=num_workers, **arguments)

    return make


def responses(*texts, answer="7", num_prompts=1, **metadata):
    """Return responses with three tokens, which belong to the prompts 0, 1, ... in turn."""
    made = [
        make_rollout(response_ids=[4, 5, 6], prompt_id=n % num_prompts, sequence_id=n, text=text, answer=answer)
        for n, text in enumerate(texts)
    ]
    return [replace(rollout, prompt=replace(rollout.prompt, metadata=metadata)) for rollout in made]


def by_name(found):
    return {name.rpartition(":")[2]: values for name, values in found.items()}


def test_functions_of_all_trainers_score_the_same_responses(make_pool):
    with make_pool("own", "reward_func", "trl", "verl", on_error="raise") as pool:
        signatures, result = by_name(pool.signatures), pool.score(responses("7", "8", data_source="x"))
    assert [signatures[name].split("(")[0] for name in ("own", "reward_func", "trl", "verl")] == [
        "f",
        "OpenRLHF's reward_func",
        "TRL's f",
        "verl's compute_score",
    ]
    assert by_name(result.per_function) == {"own": [1, 1], "reward_func": [0.5, -0.5], "trl": [1, 0], "verl": [1, 0]}
    assert result.scores == [3.5, 0.5]
    returned = {name: [one.extras for one in found] for name, found in by_name(result.returned).items()}
    assert returned == {
        "own": [{"acc": 1, "pred": "7"}, {"acc": 1, "pred": "8"}],
        "reward_func": [{"calls": 1, "right": 1}, {"calls": 1, "right": 0}],
        "trl": [{"size": 2}, {"size": 2}],
        "verl": [{"length": 1, "pred": "7"}, {"length": 1, "pred": "8"}],
    }
    assert [one.filter_score for one in by_name(result.returned)["reward_func"]] == [1, 0]


def test_none_of_trl_means_that_the_function_does_not_apply(make_pool):
    with make_pool("trl", "own", on_error="raise") as pool:
        result = pool.score(responses("7", answer="skip"))
    assert result.scores == [1] and math.isnan(by_name(result.per_function)["trl"][0]) and not result.failures


def test_none_of_any_other_signature_is_a_failure(make_pool):
    with make_pool("abstains") as pool:
        assert "returned None, not a number" in pool.score(responses("7")).failures[0]


def test_rewards_of_tokens_and_steps_sum_to_the_score(make_pool):
    with make_pool("process", "steps", on_error="raise") as pool:
        result = pool.score(responses("7"))
    assert by_name(result.per_function) == {"process": [0.25], "steps": [1.5]}
    (process,), (steps,) = result.returned.values()
    assert process.token_rewards == [(1, 0.25)] and steps.step_rewards == [(1, 0.5)]


@pytest.mark.parametrize("prompts_per_call, sizes", [(1, [2, 1, 2, 1]), (2, [3, 3, 3, 1]), (9, [4, 4, 4, 4])])
def test_a_batched_function_gets_all_responses_of_some_prompts(make_pool, prompts_per_call, sizes):
    """Responses 0 and 2 belong to prompt 0, 1 to prompt 1, 3 to prompt 2."""
    rollouts = responses("7", "7", "7", "7")
    order = [0, 1, 0, 2]
    rollouts = [
        replace(r, prompt=replace(r.prompt, prompt_id=prompt)) for r, prompt in zip(rollouts, order, strict=True)
    ]
    with make_pool("trl", on_error="raise", prompts_per_call=prompts_per_call) as pool:
        (returned,) = pool.score(rollouts).returned.values()
    assert [one.extras["size"] for one in returned] == sizes


def test_calls_of_an_asynchronous_function_run_at_the_same_time(make_pool):
    with make_pool("judge", on_error="raise", timeout_s=5) as pool:
        start = time.monotonic()
        assert pool.score(responses(*["7"] * 20)).scores == [1.0] * 20
    assert time.monotonic() - start < 9  # one after the other they would take 10 s


@pytest.mark.parametrize(
    "name, reason",
    [
        ("short", "returned 1 values for 2 responses: return a list with one entry for each"),
        ("none", "returned None for 2 responses"),
        ("raises", r"KeyError: 'gold' \(f.py, line \d+: def raises"),
        ("exits", r"the scorer process \d+ ended with exit code 3"),
        ("sleeps", r"the scorer process \d+ took longer than reward\.timeout_s = 0\.5 for each of 2 responses"),
    ],
)
def test_a_failure_of_a_batched_function_is_one_of_all_its_responses(make_pool, name, reason):
    with make_pool("own", name, timeout_s=0.5 if name == "sleeps" else 30) as pool:
        result = pool.score(responses("7", "8"))
        assert by_name(result.per_function) == {"own": [1, 1], name: [0, 0]} and result.scores == [1, 1]
        assert all(re.search(reason, message) for message in result.failures.values()) and len(result.failures) == 2
    error = RewardLostError if "process" in reason else ConfigError
    with (
        make_pool(name, on_error="raise", timeout_s=0.5 if name == "sleeps" else 30) as pool,
        pytest.raises(error, match=rf"prompt_id 0, sequence_id 0: .*{reason}"),
    ):
        pool.score(responses("7", "8"))


@pytest.mark.parametrize("name, reason", [("nan", "returned float nan"), ("one_raises", "KeyError: 'gold'")])
def test_a_failure_of_one_response_leaves_the_others_their_scores(make_pool, name, reason):
    with make_pool(name) as pool:
        result = pool.score(responses("7", "8", "9"))
    assert result.scores == [1, 0, 1] and list(result.failures) == [1] and reason in result.failures[1]


def test_a_column_that_a_function_asks_for_and_a_row_lacks_is_found_before_a_response(make_pool):
    with make_pool("own", "trl") as pool:
        pool.check_columns([r.prompt for r in responses("7", level=1)])
        with pytest.raises(ConfigError, match=r"trl' has the parameter answer, which is no column of row 0; its col"):
            pool.check_columns([r.prompt for r in responses("7", answer=None, level=1)])


def test_functions_score_only_the_prompts_that_they_apply_to(make_pool):
    def applies(prompt):
        return [name for name in pool.signatures if name.endswith(":own") or prompt.prompt_id == 1]

    with make_pool("own", "trl", applies=applies) as pool:
        result = pool.score(responses("7", "7", num_prompts=2))
    assert result.scores == [1, 2] and math.isnan(by_name(result.per_function)["trl"][0])
