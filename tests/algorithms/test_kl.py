"""KL estimates, the KL loss and its gradients, and the controller of the coefficient."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybrid_rl.algorithms.kl import KlController, kl_estimate, kl_loss
from hybrid_rl.algorithms.specs import KL_ESTIMATORS


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


@pytest.mark.parametrize(
    "d, k1, k2, k3",
    [
        (0.5, 0.5, 0.125, math.exp(-0.5) - 1 + 0.5),  # 0.106531
        (-1.0, -1, 0.5, math.exp(1) - 1 - 1),  # 0.718282
        (0.0, 0, 0, 0),
        (1e-4, 1e-4, 5e-9, 5e-9),  # d^2 / 2 to first order, where exp(-d) - 1 + d is 0 in float32
    ],
)
def test_kl_by_hand(d, k1, k2, k3):
    for estimator, expected in {"k1": k1, "k2": k2, "k3": k3}.items():
        kl = kl_estimate(torch.tensor([d - 2]), torch.tensor([-2.0]), estimator)
        assert kl.item() == pytest.approx(expected, rel=1e-2 if d == 1e-4 else 1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kl_of_extreme_ratios_is_finite(estimator, dtype):
    logprobs = torch.tensor([0.0, -100], dtype=dtype)
    kl, gradient = value_and_gradient(lambda x: kl_estimate(x, logprobs.flip(0), estimator), logprobs)
    assert kl.dtype == torch.float32 and kl.isfinite().all() and gradient.isfinite().all()
    if estimator == "k3":
        assert kl[0].item() == 99 and gradient.tolist() == [1, 0]  # d = 100: exp(-100) - 1 + 100, slope 1 - exp(-100)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_passes_nan_on(estimator):
    assert kl_estimate(torch.tensor([math.nan]), torch.zeros(1), estimator).isnan().all()


def test_kl_has_the_gradient_of_finite_differences():
    logprobs = torch.tensor([-3.0, -0.5, 0.1, 4.0], dtype=torch.float64, requires_grad=True)
    for estimator in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(lambda x, e=estimator: kl_estimate(x, torch.zeros_like(x), e), (logprobs,))


THETA = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
REF = torch.tensor([0.1, 0.5, 0.4], dtype=torch.float64).log_softmax(0)
OLD = torch.tensor([-0.4, 0.2, 0.3], dtype=torch.float64).log_softmax(0)


def expected_kl_loss_gradient(old: Tensor, estimator: str, *, unbiased: bool) -> Tensor:
    """Return the expected gradient of kl_loss in the three logits THETA, over one token from the old policy."""

    def expectation(theta: Tensor) -> Tensor:
        return old.exp() * kl_loss(theta.log_softmax(0), old, REF, estimator, unbiased=unbiased)

    return value_and_gradient(expectation, THETA)[1]


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


def test_plain_kl_loss_has_the_gradients_of_its_docstring():
    policy = THETA.log_softmax(0)
    reverse, forward = (
        value_and_gradient(lambda x: divergence(x.log_softmax(0), REF), THETA)[1],
        value_and_gradient(lambda x: divergence(REF, x.log_softmax(0)), THETA)[1],
    )
    for estimator, expected in {"k1": torch.zeros(3, dtype=torch.float64), "k2": reverse, "k3": forward}.items():
        torch.testing.assert_close(expected_kl_loss_gradient(policy, estimator, unbiased=False), expected)
    assert (reverse - forward).abs().max() > 0.01


@pytest.mark.parametrize("old", [OLD, THETA.log_softmax(0)])
def test_unbiased_kl_loss_has_the_gradient_of_kl_from_any_old_policy(old):
    _, reverse = value_and_gradient(lambda x: divergence(x.log_softmax(0), REF), THETA)
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(expected_kl_loss_gradient(old, estimator, unbiased=True), reverse)
    _, half_square = value_and_gradient(
        lambda x: x.softmax(0) * (x.log_softmax(0) - REF).square() / 2, THETA
    )  # of E_p[d^2] / 2
    torch.testing.assert_close(expected_kl_loss_gradient(old, "k2", unbiased=True), half_square)


def test_kl_loss_by_hand():
    # d = 0.5 and rho = 2. k1: 2 * 0.5; k2: 2 * 0.125; k3: 2 * (exp(-0.5) - 0.5).
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    old = logprobs - math.log(2)
    for estimator, value in {"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 0.5}.items():
        # The slope of d itself: 1, d, 1 - exp(-d); of rho: rho.
        slope = {"k1": 1, "k2": 0.5, "k3": 1 - math.exp(-0.5)}[estimator]
        plain, gradient = value_and_gradient(lambda x, e=estimator: kl_loss(x, old, ref, e, unbiased=False), logprobs)
        assert (plain.item(), gradient.item()) == pytest.approx((value, slope))
        unbiased, gradient = value_and_gradient(lambda x, e=estimator: kl_loss(x, old, ref, e, unbiased=True), logprobs)
        assert (unbiased.item(), gradient.item()) == pytest.approx((2 * value, 2 * (value + slope)))


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
def test_kl_loss_of_extreme_ratios_is_finite(estimator):
    logprobs, old, ref = torch.tensor([[-80.0, 0, 0], [0, -80, 0], [0, -80, -80], [-80, 0, -80]]).unbind(1)
    kl, gradient = value_and_gradient(lambda x: kl_loss(x, old, ref, estimator, unbiased=True), logprobs)
    assert kl.isfinite().all() and gradient.isfinite().all()
    assert kl[1].item() == kl[3].item() == 0  # d = 0, whatever the ratio


@pytest.mark.parametrize("place", range(3))
def test_kl_loss_passes_nan_on(place):
    inputs = [torch.zeros(2), torch.zeros(2), torch.ones(2)]
    inputs[place][1] = math.nan
    assert kl_loss(*inputs, "k3", unbiased=True).isnan().tolist() == [False, True]


def test_kl_loss_has_the_gradient_of_finite_differences():
    x = torch.tensor([-0.9, -0.1, 0.05, 0.7], dtype=torch.float64, requires_grad=True)
    y = torch.zeros_like(x)
    for z in (torch.ones_like(x), -torch.ones_like(x)):
        for estimator in KL_ESTIMATORS:
            assert torch.autograd.gradcheck(lambda x, z=z, e=estimator: kl_loss(x, y, z, e, unbiased=True), (x,))


def test_kl_of_other_shapes_or_an_unknown_estimator_is_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(x, x, "k4")
    with pytest.raises(ValueError, match=r"ref_logprobs \[2, 1\]"):
        kl_estimate(x, x[:, :1], "k1")
    with pytest.raises(ValueError, match=r"old_logprobs \[2, 1\]"):
        kl_loss(x, x[:, :1], x, "k1", unbiased=False)
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_loss(x, x, x, "k4", unbiased=True)


def test_kl_coefficient_by_hand():
    controller = KlController(0.1, target=4.0, horizon=1000)
    controller.update(kl=4.4, num_responses=100)  # 10% too high: 1 + 0.1 * 0.1
    assert controller.coef == pytest.approx(0.101)
    controller.update(kl=40.0, num_responses=500)  # clamped to 0.2: 1 + 0.2 * 0.5
    assert controller.coef == pytest.approx(0.101 * 1.1)
    controller.update(kl=-1.0, num_responses=500)  # k1 can be negative; clamped to -0.2
    assert controller.coef == pytest.approx(0.101 * 1.1 * 0.9)
    controller.update(kl=4.0, num_responses=500)
    assert controller.coef == pytest.approx(0.101 * 1.1 * 0.9)


def test_kl_coefficient_converges_to_the_target():
    # A policy whose KL per response falls as the penalty rises, kl = 1 / coef: the target of 5 is met at 0.2.
    controller = KlController(0.01, target=5.0, horizon=1000)
    for _ in range(400):
        controller.update(1 / controller.coef, 256)
    assert controller.coef == pytest.approx(0.2, rel=1e-3)


def test_kl_coefficient_continues_from_a_checkpoint():
    controller = KlController(0.1, target=4.0, horizon=1000)
    controller.update(8.0, 500)
    resumed = KlController(0.1, target=4.0, horizon=1000)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coef == controller.coef != 0.1


def test_kl_coefficient_without_a_target_is_the_configured_one():
    controller = KlController(0.3, target=None, horizon=1000)
    controller.update(math.inf, 10**9)
    controller.load_state_dict({"coef": 0.7})
    assert controller.coef == 0.3


def test_kl_controller_names_the_wrong_input():
    with pytest.raises(ValueError, match="target must be greater than 0 or None, got 0"):
        KlController(0.1, target=0.0, horizon=10)
    with pytest.raises(ValueError, match="horizon must be greater than 0, got 0"):
        KlController(0.1, target=1.0, horizon=0)
    controller = KlController(0.1, target=1.0, horizon=10)
    with pytest.raises(ValueError, match="kl is nan"):
        controller.update(math.nan, 1)
    with pytest.raises(ValueError, match="less than 5 times horizon = 10, got 50"):
        controller.update(1.0, 50)
    assert controller.coef == 0.1
