"""KL divergence to the reference: its estimate at each token, its loss, and the controller of its coefficient.

Each name in specs.KL_ESTIMATORS is a function of this module, from log-prob differences d (at least float32) to the
estimates.
"""

import math

import torch
from torch import Tensor

from hybrid_rl.algorithms.elementwise import MAX_LOG_RATIO, bounded_exp, difference, half_square
from hybrid_rl.algorithms.specs import KL_ESTIMATORS
from hybrid_rl_kernels.reference import check_same_shape


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return an estimate of the KL divergence from the reference at each token, with d = logprobs - ref_logprobs.

    Args:
        logprobs, ref_logprobs: one shape, any float dtype.
        estimator:              k1: d; k2: d^2 / 2; k3: exp(-d) - 1 + d, whose gradient is 0 beyond d = -20.
    Returns:
        kl: same shape, float32 (float64 stays); NaN where d is NaN.
    Raises:
        ValueError: shapes differ or the estimator is unknown.
    Source: Schulman 2020, Approximating KL Divergence; expm1 avoids the cancellation of exp(-d) - 1 + d for small d.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    kl: Tensor = globals()[estimator](difference(logprobs, ref_logprobs))
    return kl


def k1(d: Tensor) -> Tensor:
    """Return d: unbiased, of high variance."""
    return d


def k2(d: Tensor) -> Tensor:
    """Return d^2 / 2: never negative, and biased."""
    return half_square(d)


def k3(d: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d: unbiased and never negative."""
    d = d.clamp_min(-MAX_LOG_RATIO)  # the exponent -d stays below 20; bounding it alone would leave a slope of +1 there
    return torch.expm1(-d) + d


def kl_loss(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, estimator: str, *, unbiased: bool) -> Tensor:
    """Return the KL penalty of each token for the loss, to be minimised through logprobs.

    An unbiased estimate need not have an unbiased gradient. Over tokens of the policy p itself, with reference q and
    d = log p - log q, the expected gradients are
        k1: 0, because E[grad log p] = 0: noise without a penalty.
        k2: E[d grad log p] = grad KL(p || q), the intended penalty.
        k3: E[(1 - q/p) grad log p] = grad KL(q || p), which pulls p to cover q and is bounded where p > q.
    All three ignore that the tokens come from the old policy, which differs from p after the first optimizer step.
    `unbiased` multiplies the estimate by rho = p / p_old and differentiates through rho too. Over tokens of the old
    policy, given their prefixes, the expected gradients are then
        k1, k3: grad KL(p || q), k3 with less variance.
        k2:     grad E_p[d^2] / 2, which is KL(p || q) to second order in d.

    Args:
        logprobs, old_logprobs, ref_logprobs: one shape; old and ref are constant, and old is read only if unbiased.
        estimator:                            k1, k2 or k3, see `kl_estimate`.
        unbiased:                             weight by rho, bounded to exp(+-20).
    Returns:
        token_kl: same shape, float32 (float64 stays); NaN where an input that is read, or the estimate, is not finite.
    Raises:
        ValueError: shapes differ or the estimator is unknown.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), Unbiased KL Estimate, with k3; Tang and Munos 2025 for the
    gradients of the plain estimates.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
    kl = kl_estimate(logprobs, ref_logprobs, estimator)
    if not unbiased:
        return kl
    log_ratio = difference(logprobs, old_logprobs)
    # Each factor is the other's gradient, and 0 * inf is NaN: a slot that is bad in one is filled in both.
    is_bad = ~(kl.isfinite() & log_ratio.isfinite())
    return bounded_exp(log_ratio.masked_fill(is_bad, torch.nan)) * kl.masked_fill(is_bad, torch.nan)


class KlController:
    """The coefficient of the KL, adapted after every step so that the KL per response approaches a target.

    Attributes:
        coef: factor on the KL estimate in the next step.
    Source: Ziegler et al. 2019, section 2.2: coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * K. K is 0.1 in the paper;
    here it is num_responses / horizon, as in the paper's code, so that the pace does not depend on the size of a step.
    """

    MAX_ERROR = 0.2

    def __init__(self, coef: float, *, target: float | None, horizon: int) -> None:
        """Start at coef; a target of None keeps it. ValueError unless target and horizon are greater than 0."""
        if target is not None and not target > 0:
            raise ValueError(f"target must be greater than 0 or None, got {target}")
        if not horizon > 0:
            raise ValueError(f"horizon must be greater than 0, got {horizon}")
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl: float, num_responses: int) -> None:
        """Adapt the coefficient.

        Args:
            kl:            mean over the responses of this step of the KL summed over a response's tokens.
            num_responses: responses of this step, all ranks.

        Raises:
            ValueError: kl is not finite, or the step is so large that the coefficient could fall to 0 or below.
        """
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise ValueError(f"kl is {kl}: must be finite")
        gain = num_responses / self.horizon
        if self.MAX_ERROR * gain >= 1:
            raise ValueError(f"num_responses must be less than 5 times horizon = {self.horizon}, got {num_responses}")
        error = kl / self.target - 1
        self.coef *= 1 + max(-self.MAX_ERROR, min(self.MAX_ERROR, error)) * gain

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, for a checkpoint."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint; without a target the configured coefficient stays."""
        if self.target is not None:
            self.coef = state["coef"]
