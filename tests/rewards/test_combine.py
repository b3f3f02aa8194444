"""Scores of several sources as one score, by hand: weights, gates, sources that do not apply, and rewards of tokens."""

import math

import pytest
import torch

from hybrid_rl.batch import Turn
from hybrid_rl.config import ConfigError
from hybrid_rl.rewards.combine import Weighing, extra_values, filter_parts, sampled_positions, token_rewards
from hybrid_rl.rewards.returned import Returned
from tests.conftest import make_rollout

NAN = math.nan


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_without_gates_the_score_is_the_weighted_sum():
    weighing = Weighing(weights={"model": 0.5, "f": 2.0})
    assert weighing.score({"model": column(1, 4), "f": column(1, 0)}).tolist() == [2.5, 2.0]


def test_a_right_answer_counts_only_in_a_valid_form():
    """ColossalChat's rewards: 0 in a wrong form, 1 for the form alone, 10 for a right answer in it."""
    weighing = Weighing(weights={"form": 1.0, "right": 9.0}, gates=["form"], optional=["form", "right"])
    parts = {"form": column(0, 0, 1, 1), "right": column(0, 1, 0, 1)}
    assert weighing.score(parts).tolist() == [0, 0, 1, 10]


def test_a_gate_without_weight_makes_the_score_a_product():
    weighing = Weighing(weights={"form": 0.0, "right": 1.0}, gates=["form"])
    assert weighing.score({"form": column(0, 0.5, 1), "right": column(1, 1, 1)}).tolist() == [0, 0.5, 1]


def test_gates_multiply_each_other_and_all_other_sources():
    weighing = Weighing(
        weights=dict.fromkeys(["a", "b", "model", "c"], 1.0), gates=["a", "b"], optional=["a", "b", "c"]
    )
    parts = {"model": column(2, 2), "a": column(0.5, 1), "b": column(0.5, 0), "c": column(2, 2)}
    assert weighing.gate_factor(parts).tolist() == [0.25, 0]
    assert weighing.score(parts).tolist() == [0.5 + 0.5 + 0.25 * 4, 1.0]


def test_a_function_that_does_not_apply_is_left_out_of_sum_and_product():
    weighing = Weighing(weights={"a": 2.0, "b": 1.0, "gate": 1.0}, gates=["gate"], optional=["a", "b", "gate"])
    parts = {"a": column(1, NAN, NAN, 1), "b": column(NAN, 3, NAN, 1), "gate": column(1, 0.5, NAN, NAN)}
    assert weighing.score(parts).tolist() == [1 + 2, 0.5 + 1.5, 0, 3]
    assert weighing.is_unscored(parts).tolist() == [False, False, True, False]


def test_a_nan_of_a_model_is_no_abstention():
    weighing = Weighing(weights={"model": 1.0, "f": 1.0}, optional=["f"])
    parts = {"model": column(NAN), "f": column(1)}
    assert weighing.score(parts).isnan().all() and not weighing.is_unscored(parts).any()


def test_scores_for_the_filter_replace_those_of_their_function():
    given = [Returned(score=5.0, filter_score=1.0), Returned(score=7.0), Returned(score=None)]
    found = filter_parts({"f": given, "g": [Returned(score=1.0)] * 3})
    assert found.keys() == {"f"} and found["f"].tolist()[:2] == [1.0, 7.0] and found["f"][2].isnan()


def test_further_values_are_columns_and_texts():
    given = [Returned(score=1.0, extras={"acc": 1.0, "pred": "7"}), Returned(score=1.0, extras={"length": 3.0})]
    numbers, texts = extra_values({"f": given}, 2)
    assert texts == [{"f/pred": "7"}, {}]
    assert {name: values.nan_to_num(-1).tolist() for name, values in numbers.items()} == {
        "f/acc": [1, -1],
        "f/length": [-1, 3],
    }


def test_rewards_of_tokens_and_steps_are_paid_at_their_tokens():
    """Tokens end after 2, 4, 6 and 6 characters; the steps end after 3 and 6."""
    rollout = make_rollout(response_ids=[4, 5, 6, 0], text="abcdef")
    tokens, steps = (
        Returned(score=1.0, token_rewards=[(0, 1.0)]),
        Returned(score=3.0, step_rewards=[(3, 1.0), (6, 2.0)]),
    )
    found = token_rewards(rollout, [(2.0, tokens), (0.5, steps)], lambda _: [2, 4, 6, 11])
    assert found == [(0, 2.0), (1, 0.5), (2, 1.0)]
    assert token_rewards(rollout, [(0.0, tokens)], None) == []
    with pytest.raises(ConfigError, match="step_rewards: the tokens of steps are not known here"):
        token_rewards(rollout, [(1.0, steps)], None)


def test_a_response_without_tokens_is_paid_at_its_end_alone():
    rollout = make_rollout(response_ids=[], text="<think>")
    assert token_rewards(rollout, [(1.0, Returned(score=1.0, step_rewards=[(7, 1.0)]))], lambda _: []) == []


def test_a_reward_at_an_observation_is_paid_at_the_sampled_token_before_it():
    turns = [Turn(role=role, num_tokens=2) for role in ("assistant", "tool", "assistant")]
    rollout = make_rollout(response_ids=range(6), turns=turns)
    assert sampled_positions(rollout) == [0, 1, 4, 5]
    paid = Returned(score=1.0, token_rewards=[(0, 1.0), (3, 2.0), (4, 3.0)])
    assert token_rewards(rollout, [(1.0, paid)], None) == [(0, 1.0), (1, 2.0), (4, 3.0)]
