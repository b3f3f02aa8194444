"""Metrics of an evaluation: pass@k by hand, and the sums and names of several sets."""

import itertools

import pytest

from hybrid_rl.steps.judging import evaluation_sums, metric_name, pass_at_k, sums_of_sets, with_accuracy
from tests.conftest import make_rollout


@pytest.mark.parametrize(
    "num_samples, num_correct, k, expected",
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the right response
        (4, 2, 2, 5 / 6),  # 1 of the 6 pairs holds no right one
        (5, 2, 3, 9 / 10),  # 1 of the 10 triples holds no right one
        (4, 1, 4, 1.0),
        (4, 3, 2, 1.0),
        (4, 0, 4, 0.0),
        (200, 100, 1, 0.5),
    ],
)
def test_pass_at_k_is_the_fraction_of_choices_with_a_right_response(num_samples, num_correct, k, expected):
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_counts_the_choices_of_k_responses():
    for num_samples in range(1, 7):
        for num_correct in range(num_samples + 1):
            is_correct = [number < num_correct for number in range(num_samples)]
            for k in range(1, num_samples + 1):
                choices = [any(choice) for choice in itertools.combinations(is_correct, k)]
                assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(choices) / len(choices))


def responses(*lengths, truncated=()):
    return [
        make_rollout(response_ids=[4] * length, is_truncated=number in truncated)
        for number, length in enumerate(lengths)
    ]


def test_one_response_per_prompt_has_neither_mean_nor_pass():
    found = evaluation_sums(responses(2, 3, 4, truncated=[2]), [1.0, 0.5, 2.0], [False, True, False], num_samples=1)
    assert found == {"accuracy": 2, "score": 3.5, "response_length": 9, "truncated": 1, "num_failed": 1}


def test_several_responses_have_pass_at_every_k_that_is_asked_for():
    scores = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5]  # 1 and 2 of 4 are right
    found = evaluation_sums(responses(*[3] * 8), scores, [False] * 8, num_samples=4, pass_at=[1, 2, 4])
    assert found["accuracy"] == found["mean@4"] == found["pass@1"] == 3 / 4
    assert found["pass@2"] == pytest.approx(1 / 2 + 5 / 6) and found["pass@4"] == 2
    assert found["score"] == 3.5 / 4 and found["response_length"] == 6
    default = evaluation_sums(responses(*[3] * 8), scores, [False] * 8, num_samples=4)
    assert {name for name in default if name.startswith("pass@")} == {"pass@4"}


def test_the_sets_of_an_evaluation_have_sums_of_their_own():
    sums, counts = sums_of_sets(
        {"a": 1, "b": 2}, responses(1, 2, 3, 4, 5, 6), [1, 1, 0, 0, 0, 1], {3}, num_samples=2, pass_at=[1, 2]
    )
    assert (sums["eval/a/accuracy"], sums["eval/b/accuracy"]) == (1, 0.5)
    assert (sums["eval/a/pass@2"], sums["eval/b/pass@2"]) == (1, 1)
    assert (sums["eval/a/response_length"], sums["eval/b/response_length"]) == (1.5, 9)
    assert (sums["eval/a/num_failed"], sums["eval/b/num_failed"]) == (0, 0.5)
    assert counts == {name: 1 if name.startswith("eval/a/") else 2 for name in sums}


def test_one_set_keeps_the_names_without_a_prefix():
    assert metric_name("", "accuracy") == "accuracy" and metric_name("", "pass@4") == "eval/pass@4"
    assert metric_name("gsm8k", "accuracy") == "eval/gsm8k/accuracy"
    assert with_accuracy({"accuracy": 0.25, "eval/score": 1.0}, [""], None) == {"accuracy": 0.25, "eval/score": 1.0}


def test_accuracy_is_the_mean_over_the_sets_or_the_target_sets():
    metrics = {"eval/a/accuracy": 0.5, "eval/b/accuracy": 0.1}
    assert with_accuracy(metrics, ["a", "b"], None) == {"accuracy": 0.3, **metrics}
    assert with_accuracy(metrics, ["a", "b"], "b") == {"accuracy": 0.1, **metrics}
