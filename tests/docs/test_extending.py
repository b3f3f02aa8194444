"""The code of docs/extending.md works where the page says that it goes."""

import math
import re
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl.algorithms import estimators, policy_loss, specs
from hybrid_rl.config import AdvantageConfig
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.rewards import ScorerPool
from hybrid_rl.rewards.given import giving
from hybrid_rl.weights.bucket import IpcBucket, bucket_bytes, plan_buckets
from tests.conftest import make_rollout

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


def block(place: str) -> str:
    """Return the Python of the page whose first line names a place, without that line."""
    (found,) = re.findall(rf"```python\n# {re.escape(place)}\n(.*?)```", PAGE, re.DOTALL)
    return found


def spec(module: types.ModuleType, table: str) -> dict:
    """Return the line of a table as a dictionary."""
    return eval(f"{{{block(f'hybrid_rl/algorithms/specs.py, in {table}')}}}", vars(module))


def test_reward_functions_are_found_in_their_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(block("my_rewards.py"))
    names = [f"{path}:is_short", f"{path}:names_topic"]
    texts = ["word " * 50, "word " * 51, "It was raining.", "Sun."]
    rollouts = [
        replace(r, text=text, prompt=replace(r.prompt, metadata={"topic": "Rain"}))
        for r, text in zip([make_rollout() for _ in texts], texts, strict=True)
    ]
    with ScorerPool(names, timeout_s=60, num_workers=1, on_error="raise") as pool:
        found = pool.score(rollouts).per_function
    assert found == {names[0]: [1, 0, 1, 1], names[1]: [0, 0, 1, 0]}


def test_reward_functions_of_other_trainers_work_as_they_are(tmp_path):
    path = tmp_path / "rewards_of_others.py"
    path.write_text(block("rewards_of_others.py"))
    names = [f"{path}:{name}" for name in ("reward_func", "solves", "compute_score")]
    rollouts = [
        replace(r, text=text, prompt=replace(r.prompt, metadata={"solution": gold}))
        for r, text, gold in zip([make_rollout(answer="7") for _ in "12"], ["is 7", "is 8"], ["7", None], strict=True)
    ]
    with ScorerPool(names, timeout_s=60, num_workers=1, on_error="raise") as pool:
        result = pool.score(rollouts)
    assert [result.per_function[names[0]], result.per_function[names[2]]] == [[1, -1], [1, 0]]
    right, does_not_apply = result.per_function[names[1]]
    assert right == 1 and math.isnan(does_not_apply)
    assert [one.extras for one in result.returned[names[2]]] == [{"pred": "is 7"}, {"pred": "is 8"}]


def test_steps_are_rewarded_at_their_ends(tmp_path):
    path = tmp_path / "step_rewards.py"
    path.write_text(block("step_rewards.py"))
    rollout = make_rollout(answer="7", text="one\n" + "two " * 11 + "7")
    with ScorerPool([f"{path}:few_words"], timeout_s=60, num_workers=1, on_error="raise") as pool:
        ((found,),) = pool.score([rollout]).returned.values()
    assert found.step_rewards == [(4, 0.1), (49, 0.0)] and found.score == 1.1


def test_the_function_of_the_program_is_taken_as_an_object():
    exec(block("train.py"), namespace := {"__name__": "train"})
    rollout = make_rollout(text="rain falls")
    rollout = replace(rollout, prompt=replace(rollout.prompt, metadata={"topic": "rain"}))
    with (
        giving({"reward_functions": [namespace["says_topic"]]}) as names,
        ScorerPool(names["reward_functions"], timeout_s=60, num_workers=1, on_error="raise") as pool,
    ):
        assert pool.score([rollout]).per_function == {"given:says_topic": [1.0]}


def test_an_estimator_is_one_function_and_one_line(monkeypatch):
    for name, value in spec(specs, "ESTIMATORS").items():
        monkeypatch.setitem(specs.ESTIMATORS, name, value)
    exec(block("hybrid_rl/algorithms/estimators.py"), namespace := dict(vars(estimators)))
    monkeypatch.setattr(estimators, "grpo_median", namespace["grpo_median"], raising=False)
    rewards, groups = torch.tensor([0.0, 1.0, 5.0]), torch.zeros(3, dtype=torch.int64)
    advantages = estimators.group_advantages(rewards, groups, estimator="grpo_median")
    assert advantages.tolist() == [-1.0, 0.0, 4.0]
    assert AdvantageConfig(estimator="grpo_median").estimator in specs.ESTIMATORS


def test_a_policy_loss_is_one_function_and_one_line(monkeypatch):
    for name, value in spec(specs, "POLICY_LOSSES").items():
        monkeypatch.setitem(specs.POLICY_LOSSES, name, value)
    exec(block("hybrid_rl/algorithms/policy_loss.py"), namespace := dict(vars(policy_loss)))
    monkeypatch.setattr(policy_loss, "square", namespace["square"], raising=False)
    old = torch.zeros(3)
    new = torch.tensor([0.0, 2.0, torch.nan]).log().nan_to_num(neginf=-1e9, nan=torch.nan).requires_grad_()
    advantages = torch.tensor([1.0, 3.0, 1.0])
    loss, is_clipped = policy_loss.policy_loss(new, old, advantages, kind="square", clip_low=0.2, clip_high=0.2)
    # Ratios exp(-20) (bounded) and 2: (0 - 1)^2 / 2 - 0, (2 - 1)^2 / 2 - 2 * 3.
    assert loss[:2].tolist() == pytest.approx([0.5, -5.5], abs=1e-6) and not is_clipped.any()
    loss[:2].sum().backward()
    assert new.grad is not None and new.grad[2] == 0


def synced(engine: HuggingFaceEngine, folder: str) -> HuggingFaceEngine:
    """Bring the weights of a folder into an engine, as weight sync does."""
    tensors = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    plan = plan_buckets([(name, tuple(p.shape), p.dtype) for name, p in tensors.items()], 1 << 30)
    bucket = IpcBucket(bucket_bytes(plan), torch.device("cpu"))
    with torch.no_grad():
        for slot in plan[0]:
            slot.view(bucket.tensor).copy_(tensors[slot.name])
    engine.open_bucket(bucket.handle(), plan)
    engine.load_bucket(0)
    engine.finish_sync()
    return engine


def test_an_engine_generates_what_the_one_it_is_made_of_does(tiny):
    exec(block("hybrid_rl/engines/chunked.py"), namespace := {})
    sampling = Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(0,))
    prompts, folder = [[1 + i % 3] for i in range(10)], str(tiny / "policy")
    whole, chunked = (
        synced(kind(folder, dtype=torch.float32, device=torch.device("cpu")), folder).generate(
            prompts, sampling, list(range(10))
        )
        for kind in (HuggingFaceEngine, namespace["ChunkedEngine"])
    )
    assert [g.token_ids for g in whole] == [g.token_ids for g in chunked] and len(whole) == 10
    for one, other in zip(whole, chunked, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
