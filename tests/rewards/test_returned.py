"""What a reward function may return, and the score that it is."""

import json
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from hybrid_rl.rewards.returned import Returned, pack, read_response, score_of, split_batch, unpack


class Half(float):
    """A float whose own repr is no number."""

    def __repr__(self):
        return "one half"


class Broken:
    """An object that cannot be shown."""

    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    "value, score",
    [
        (True, 1.0),
        (False, 0.0),
        (-3, -3.0),
        (0.1, 0.1),
        (Half(0.5), 0.5),
        (Fraction(1, 3), 1 / 3),
        (Decimal("0.1"), 0.1),
        (2**53 + 1, 2.0**53),
        (10**308, 1e308),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float16(0.5), 0.5),
        (np.longdouble(0.25), 0.25),
        (np.int64(-7), -7.0),
        (np.bool_(True), 1.0),
        (np.array([[0.5]]), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor([True]), 1.0),
    ],
)
def test_a_real_number_is_its_score_as_float64(value, score):
    found = score_of(value)
    assert found == score and type(found) is float


@pytest.mark.parametrize(
    "value, message",
    [
        (None, "returned None, not a number"),
        ("1.0", "returned str '1.0', not a number"),
        ({"score": 1}, "returned dict {'score': 1}, not a number"),
        ((1.0,), r"returned tuple \(1.0,\), not a number"),
        (1 + 0j, r"returned complex \(1\+0j\), not a number"),
        (np.complex64(1), "returned complex64 .*, not a number"),
        (np.str_("1"), "returned str_ .*, not a number"),
        (np.ones(2), "returned ndarray .*, not a number"),
        (np.array([]), "returned ndarray .*, not a number"),
        (torch.ones(2), "returned Tensor .*, not a number"),
        (torch.tensor(1j), "returned Tensor .*, not a number"),
        pytest.param(Broken(), "returned a value of type Broken, not a number", id="broken"),
        (float, "returned type <class 'float'>, not a number"),
        (math.nan, "returned float nan, which is not finite as float64"),
        (-math.inf, "returned float -inf, which is not finite"),
        (np.float32("nan"), r"returned float32 .*nan.*, which is not finite"),
        (10**400, r"returned int 1000.*\.\.\., which is not finite"),
        pytest.param(10**5000, "returned a value of type int, which is not finite", id="huge"),
        (Decimal("sNaN"), "returned Decimal .*sNaN.*, which is not finite"),
        (Decimal("1e999"), "returned Decimal .*, which is not finite"),
        (Fraction(10**400, 3), "returned Fraction .*, which is not finite"),
    ],
)
def test_everything_else_is_no_score(value, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        score_of(value)
    assert len(str(caught.value)) < 150 and "\n" not in str(caught.value)


def read(value, *, num_tokens=2, num_characters=6, score_keys=("score", "reward", "rewards"), may_abstain=False):
    return read_response(
        value, num_tokens=num_tokens, num_characters=num_characters, score_keys=score_keys, may_abstain=may_abstain
    )


@pytest.mark.parametrize(
    "value, expected",
    [
        (0.5, Returned(score=0.5)),
        ([0.25, -1], Returned(score=-0.75, token_rewards=[(0, 0.25), (1, -1.0)])),
        (torch.tensor([0.0, 0.5]), Returned(score=0.5, token_rewards=[(1, 0.5)])),
        (np.array([[0.5]]), Returned(score=0.5)),
        ({"score": True}, Returned(score=1.0)),
        ({"reward": 2, "acc": np.float32(1)}, Returned(score=2.0, extras={"acc": 1.0})),
        ({"rewards": 2, "scores": 1, "extra_logs": {"a": 3}}, Returned(score=2.0, filter_score=1.0, extras={"a": 3.0})),
        (
            {"score": 1, "pred": "x" * 600, "bad": math.nan},
            Returned(score=1.0, extras={"pred": "x" * 500, "bad": "float nan"}),
        ),
        ({"token_rewards": [1, 0]}, Returned(score=1.0, token_rewards=[(0, 1.0)])),
        (
            {"score": 1, "step_rewards": [(3, 0.5), [6, 0.25]]},
            Returned(score=1.75, step_rewards=[(3, 0.5), (6, 0.25)]),
        ),
    ],
)
def test_what_a_function_returned_for_a_response(value, expected):
    assert read(value) == expected


def test_the_scores_of_a_dictionary_are_a_further_value_for_verl():
    assert read({"score": 1, "scores": 2}, score_keys=("score",)) == Returned(score=1.0, extras={"scores": 2.0})


def test_none_abstains_where_it_may():
    assert read(None, may_abstain=True) == read({"score": None}, may_abstain=True) == Returned(score=None)


@pytest.mark.parametrize(
    "value, message",
    [
        ([1.0], "returned 1 rewards for a response of 2 tokens: return one reward per token"),
        ([1.0, math.inf], "returned float inf, which is not finite"),
        ([1.0, None], "returned None, not a number"),
        ({"acc": 1}, "returned a dictionary without 'score' or 'reward' or 'rewards': dict {'acc': 1}"),
        ({"score": None}, "returned None, not a number"),
        ({"score": math.nan}, "returned float nan"),
        ({"rewards": 1, "scores": "a"}, "returned str 'a', not a number"),
        ({"step_rewards": [3]}, "returned the step int 3, not a pair of its end and its reward"),
        ({"step_rewards": [(7, 1)]}, "returned a step that ends after 7 characters, of 6 in the response"),
        ({"step_rewards": [(0.5, 1)]}, "returned a step that ends after 0.5 characters"),
        ({"token_rewards": 3}, "returned int 3 for a response of 2 tokens"),
    ],
)
def test_what_is_no_score_of_a_response(value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        read(value)


def test_a_batch_is_a_list_or_a_dictionary_of_lists():
    assert split_batch(torch.tensor([1.0, 2.0]), 2) == [1.0, 2.0]
    assert split_batch((1, None), 2) == [1, None]
    assert split_batch(0.5, 1) == [0.5]
    found = split_batch({"rewards": [1, 2], "extra_logs": {"a": [3, 4], "mean": torch.tensor(3.5)}}, 2)
    assert found == [
        {"rewards": 1, "extra_logs": {"a": 3, "mean": 3.5}},
        {"rewards": 2, "extra_logs": {"a": 4, "mean": 3.5}},
    ]
    for value, message in {
        (1, 2, 3): "returned 3 values for 2 responses",
        0.5: "returned float 0.5 for 2 responses",
        None: "returned None for 2 responses",
    }.items():
        with pytest.raises(ValueError, match=f"{message}: return a list with one entry for each"):
            split_batch(value, 2)


@pytest.mark.parametrize(
    "returned",
    [
        Returned(score=0.5),
        Returned(score=None),
        Returned(
            score=0.0, token_rewards=[(0, 0.5)], step_rewards=[(3, -0.5)], filter_score=0.0, extras={"a": 1.0, "b": "x"}
        ),
    ],
)
def test_what_a_process_sends_is_what_the_pool_receives(returned):
    assert unpack(json.loads(json.dumps(pack(returned)))) == returned


@pytest.mark.parametrize(
    "message",
    [
        math.nan,
        {"score": math.inf},
        [1.0],
        {},
        {"score": 1.0, "more": 1},
        {"score": 1.0, "token_rewards": [1]},
        {"score": []},
    ],
)
def test_no_other_message_is_a_result(message):
    with pytest.raises(ValueError, match="no result"):
        unpack(message)
