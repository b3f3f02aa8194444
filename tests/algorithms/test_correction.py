"""Importance weights between trainer and engine, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.algorithms.correction import importance_weights
from hybrid_rl.algorithms.specs import CORRECTIONS

GARBAGE = [math.nan, math.inf, -math.inf, 3e38, -7.5]
NAN = math.nan
RATIOS = torch.tensor([[0.25, 1, 4, NAN], [4, 2, NAN, NAN], [0.25, 1, NAN, NAN], [NAN] * 4])
"""Trainer over engine; geometric means 1, 8 ** 0.5, 0.5, and an empty row."""


def weights_of(ratios: Tensor, kind: str, low: float = 0.5, high: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return weights and is_out of ratios, where NaN is a masked slot; all log-probs of the engine are -3."""
    rollout_logprobs = torch.full_like(ratios, -3.0)
    return importance_weights(
        ratios.log() + rollout_logprobs, rollout_logprobs, ~ratios.isnan(), kind=kind, low=low, high=high
    )


@pytest.mark.parametrize(
    "kind, weights, is_out",
    [
        ("none", [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0] * 4], [[0] * 4] * 4),
        (
            "tis",
            [[0.5, 1, 2, 0], [2, 2, 0, 0], [0.5, 1, 0, 0], [0] * 4],
            [[1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0] * 4],
        ),
        (
            "icepop",
            [[0, 1, 0, 0], [0, 2, 0, 0], [0, 1, 0, 0], [0] * 4],
            [[1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0] * 4],
        ),
        (
            "sequence_mask",
            [[0.25, 1, 4, 0], [0] * 4, [0.25, 1, 0, 0], [0] * 4],  # 0.5 is inside: (0.25 * 1) ** (1 / 2)
            [[0] * 4, [1, 1, 0, 0], [0] * 4, [0] * 4],
        ),
    ],
)
def test_weights_by_hand(kind, weights, is_out):
    # Bounds a hair outside 0.5 and 2, so that rounding of the logarithms does not decide.
    ours, ours_out = weights_of(RATIOS, kind, low=0.5 - 1e-6, high=2 + 1e-6)
    torch.testing.assert_close(ours, torch.tensor(weights, dtype=torch.float32), rtol=1e-5, atol=0)
    assert ours_out.tolist() == torch.tensor(is_out, dtype=torch.bool).tolist()


@pytest.mark.parametrize("kind", sorted(CORRECTIONS))
def test_every_weight_is_one_if_engine_and_trainer_agree(kind):
    ratios = torch.where(RATIOS.isnan(), NAN, 1.0)
    weights, is_out = weights_of(ratios, kind, low=1.0, high=1.0)  # both bounds are included
    assert torch.equal(weights, (~ratios.isnan()).float())
    assert not is_out.any()


@pytest.mark.parametrize("kind", sorted(CORRECTIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_extreme_ratios_are_finite(kind, dtype):
    logprobs = torch.tensor([[0, -80], [-80, 0], [0, -1000]], dtype=dtype)
    mask = torch.ones(3, 2, dtype=torch.bool)
    weights, is_out = importance_weights(logprobs, logprobs.flip(1), mask, kind=kind, low=0.5, high=2.0)
    assert weights.dtype == torch.float32 and weights.isfinite().all()
    # exp(80) counts 2 in tis and exp(-80) 0.5; the geometric mean of both is 1, so sequence_mask keeps exp(+-20).
    if kind == "tis":
        assert weights.tolist() == [[2, 0.5], [0.5, 2], [2, 0.5]] and is_out.all()
    if kind == "icepop":
        assert not weights.any() and is_out.all()
    if kind == "sequence_mask":
        assert weights[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)]) and not is_out.any()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CORRECTIONS)), st.sampled_from(GARBAGE), st.integers(0, 99))
def test_nothing_is_read_outside_the_mask(kind, garbage, seed):
    generator = torch.Generator().manual_seed(seed)
    old, rollout = torch.randn(2, 4, 6, generator=generator)
    mask = torch.rand(4, 6, generator=generator) < 0.6  # with gaps and, at times, empty rows
    expected, expected_out = importance_weights(old, rollout, mask, kind=kind, low=0.5, high=2.0)
    old, rollout = (torch.where(mask, x, garbage) for x in (old, rollout))
    weights, is_out = importance_weights(old, rollout, mask, kind=kind, low=0.5, high=2.0)
    assert torch.equal(weights, expected) and torch.equal(is_out, expected_out)
    assert not weights[~mask].any() and not is_out[~mask].any()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CORRECTIONS)), st.integers(0, 99))
def test_rows_do_not_depend_on_other_rows_or_padding(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    old, rollout = torch.randn(2, 4, 6, generator=generator)
    mask = torch.arange(6) < torch.randint(0, 7, (4, 1), generator=generator)
    together, _ = importance_weights(old, rollout, mask, kind=kind, low=0.5, high=2.0)
    for b, length in enumerate(mask.sum(1)):
        alone = (x[b : b + 1, :length] for x in (old, rollout, mask))
        assert torch.equal(together[b, :length], importance_weights(*alone, kind=kind, low=0.5, high=2.0)[0][0])


def test_weights_carry_no_gradient():
    old = torch.zeros(1, 2, requires_grad=True)
    weights, _ = importance_weights(old, torch.zeros(1, 2), torch.ones(1, 2), kind="tis", low=0.5, high=2.0)
    assert not weights.requires_grad


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "mis"}, "none, tis, icepop, sequence_mask, got 'mis'"),
        ({"low": 3}, "0 <= low <= high, got low 3 and high 2"),
        ({"low": -0.5}, "0 <= low"),
        ({"high": NAN}, "0 <= low"),
        ({"rollout_logprobs": torch.zeros(2)}, r"rollout_logprobs \[2\]"),
        ({"rollout_logprobs": torch.tensor([[0.0], [-math.inf]])}, "rollout_logprobs is -inf in row 1, token 0"),
        ({"old_logprobs": torch.tensor([[0.0], [NAN]])}, "old_logprobs is nan in row 1, token 0"),
    ],
)
def test_the_wrong_input_is_named(changes, message):
    x = torch.zeros(2, 1)
    good = {"old_logprobs": x, "rollout_logprobs": x, "response_mask": x == 0, "kind": "icepop", "low": 0.5, "high": 2}
    with pytest.raises(ValueError, match=message):
        importance_weights(**{**good, **changes})
