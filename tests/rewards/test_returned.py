"""What a reward function may return, and the score that it is."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from hybrid_rl.rewards.returned import score_of


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
