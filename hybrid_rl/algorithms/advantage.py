"""From rewards to advantages. Pure functions of tensors; a group estimator is one function and a line in ESTIMATORS.

KlController alone holds a state, one number.

Every input is read only where its mask is 1, and a NaN or inf read there is an error that names the row.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hybrid_rl_kernels as kernels
from hybrid_rl_kernels import Advantages, gae_with_moments
from hybrid_rl_kernels.reference import at_least_float32, check_same_shape


def overlong_penalty(lengths: Tensor, *, max_response_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Return what a long response adds to its reward: 0 up to the buffer, then down to -penalty at the limit.

    Args:
        lengths:             [B] int64; sampled tokens of each response.
        max_response_tokens: limit of a response; longer ones get -penalty.
        buffer:              tokens before the limit over which the penalty grows, in 1..max_response_tokens.
        penalty:             at least 0.
    Returns:
        added: [B] float32, in [-penalty, 0].
    Raises:
        ValueError: buffer or penalty is out of range.
    Source: Yu et al. 2025 (DAPO), eq. 13, there with penalty 1.
    """
    if not 0 < buffer <= max_response_tokens:
        raise ValueError(f"buffer must lie in 1..max_response_tokens = {max_response_tokens}, got {buffer}")
    if not penalty >= 0:
        raise ValueError(f"penalty must not be negative, got {penalty}")
    tokens_left = max_response_tokens - buffer - lengths
    return tokens_left.clamp(-buffer, 0).float() / buffer * penalty


def length_adaptive_lambda(response_mask: Tensor, alpha: float) -> Tensor:
    """Return GAE's lambda for each response, 1 - 1 / (alpha * length): long responses carry their reward further.

    The weights lambda^k of all steps back then add up to alpha * length.

    Args:
        response_mask: [B, T] bool; the length is the number of sampled tokens.
        alpha:         greater than 0.
    Returns:
        gae_lambda: [B] float32, in [0, 1]; 0 where alpha * length is at most 1.
    Raises:
        ValueError: alpha is not greater than 0.
    Source: Yue et al. 2025 (VAPO), Length-Adaptive GAE; alpha is 0.05 there.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be greater than 0, got {alpha}")
    lengths = response_mask.bool().sum(1).double()
    return (1 - 1 / (alpha * lengths)).clamp(0, 1).float()


def discounted_returns(
    rewards: Tensor, response_mask: Tensor, *, gamma: float, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Advantages:
    """Return, as advantages, the discounted reward still to come at each token, G_t = R_t + gamma * G_{t+1}.

    Slots masked between two tokens are skipped, they neither discount nor end the sum: as in verl's GAE, where verl's
    own REINFORCE++ starts a new sum at each gap.

    Args:
        rewards, kl, kl_coef: see gae_advantages.
        response_mask: [B, T] bool.
        gamma:         in [0, 1].
    Returns:
        advantages and returns [B, T] float32, the same, 0 outside the mask; their moments; without gradient.
    Raises:
        ValueError: shapes differ, gamma leaves [0, 1], or a reward or kl that is read is missing or not finite.
    Source: REINFORCE++ (Hu et al. 2025) and ReMax (Li et al. 2024) build on it.
    """
    _check_unit("gamma", gamma)
    mask = response_mask.bool()
    return gae_with_moments(
        None, mask, gamma=gamma, gae_lambda=1.0, mode="carry", **_payments(rewards, mask, kl, kl_coef)
    )


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    bootstrap_values: Tensor | None = None,
) -> Advantages:
    """Return generalized advantage estimates, value targets, and what whitening needs of the estimates.

    The reward paid after a token is its entry of rewards [B, T], or on the last sampled one the response's score
    [B]; minus kl_coef * kl on every one.

    Args:
        rewards:           [B] or [B, T] float32. Scores are not read in rows without tokens.
        values:            [B, T] float32; critic's estimate before token t is emitted.
        response_mask:     [B, T] bool; slots masked between two tokens count as states of value 0.
        gamma:             in [0, 1].
        gae_lambda:        in [0, 1]; one number, or one per row [B].
        kl:                [B, T] float32 or None; KL estimate per token.
        kl_coef:           factor on kl.
        bootstrap_values:  [B] float32 or None; value after the last token, for truncated rows; 0 when None.
    Returns:
        advantages and returns [B, T] float32, 0 outside the mask; not whitened, without gradient.
    Raises:
        ValueError: shapes differ, a coefficient leaves [0, 1], kl is missing, or what is read is not finite.
    Source: Schulman et al. 2016, eq. 16.
    """
    _check_unit("gamma", gamma)
    _check_unit("gae_lambda", gae_lambda)
    mask = response_mask.bool()
    check_same_shape(values=values, response_mask=mask)
    check_finite("values", values, mask)
    if bootstrap_values is not None:
        check_same_shape(bootstrap_values=bootstrap_values, rows=mask.any(1))
        check_finite("bootstrap_values", bootstrap_values, mask.any(1))
    return gae_with_moments(
        values,
        mask,
        gamma=gamma,
        gae_lambda=gae_lambda,
        bootstrap_values=bootstrap_values,
        **_payments(rewards, mask, kl, kl_coef),
    )


def _payments(rewards: Tensor, mask: Tensor, kl: Tensor | None, kl_coef: float) -> dict[str, Any]:
    """Return the arguments of gae_with_moments that say what is paid after each token, checked."""
    is_score = rewards.dim() == 1
    is_read = mask.any(1) if is_score else mask
    check_same_shape(rewards=rewards, **{"rows" if is_score else "response_mask": is_read})
    check_finite("rewards", rewards, is_read)
    paid: dict[str, Any] = {"scores" if is_score else "token_rewards": rewards}
    if kl_coef == 0:
        return paid
    if kl is None:
        raise ValueError(f"kl_coef is {kl_coef} but kl is None: give the KL estimate of every token")
    check_same_shape(kl=kl, response_mask=mask)
    check_finite("kl", kl, mask)
    return paid | {"kl": kl, "kl_coef": kl_coef}


def masked_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Return [3] float64: the number of masked-in entries, their sum and their sum of squares; ranks add theirs up."""
    check_same_shape(x=x, mask=mask)
    selected = torch.where(mask.bool(), x, 0).double()
    return torch.stack([mask.bool().sum().double(), selected.sum(), selected.square().sum()])


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Return [3] float64: number, mean and sum of squared deviations of x [B, T] in the mask, without gradient.

    Ranks put theirs together by `hybrid_rl_kernels.merge_moments`, without the cancellation of sums of squares.
    """
    return gae_with_moments(None, mask.bool(), gamma=0.0, gae_lambda=1.0, token_rewards=x).moments


def whiten(x: Tensor, mask: Tensor, all_moments: Tensor | None = None) -> Tensor:
    """Return x with mean 0 and population variance 1 over the mask.

    Args:
        x:           [B, T] float32.
        mask:        [B, T] bool.
        all_moments: [3] float64 or None; `moments` of this x merged with the other ranks', this x alone when None.
    Returns:
        whitened: as x, 0 outside the mask; all 0 if the entries are equal up to rounding or there is only one.
    Raises:
        ValueError: shapes differ.
    Source of the pass and its merging: Chan et al. 1979.
    """
    return kernels.whiten(x, mask, moments(x, mask) if all_moments is None else all_moments)


def group_advantages(rewards: Tensor, group_ids: Tensor, *, estimator: str, lengths: Tensor | None = None) -> Tensor:
    """Return each response's reward compared with the other responses to its prompt.

    Args:
        rewards:   [B] float32.
        group_ids: [B] int64; responses to one prompt share it, in any order.
        estimator: a name in ESTIMATORS.
        lengths:   [B] int64, sampled tokens of each response; read by opo alone.
    Returns:
        advantages: [B] float32, not whitened; exactly 0 in a group whose rewards are equal.
    Raises:
        ValueError: shapes differ, the estimator is unknown, a group has one response, a reward is not finite, or opo
            lacks the lengths.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    if lengths is None:
        if estimator == "opo":
            raise ValueError("lengths is None: opo weights the rewards by the lengths of the responses")
        lengths = torch.ones_like(group_ids)
    check_same_shape(rewards=rewards, group_ids=group_ids, lengths=lengths)
    check_finite("rewards", rewards, torch.ones_like(rewards, dtype=torch.bool))
    groups, sizes = group_ids.unique(return_counts=True)
    if (sizes == 1).any():
        group = int(groups[sizes == 1][0])
        raise ValueError(f"group {group} has one response, {estimator} compares at least 2")
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    for rows in group_ids.argsort(stable=True).split(sizes.tolist()):
        group_rewards = rewards[rows].double()
        if group_rewards.min() < group_rewards.max():
            advantages[rows] = ESTIMATORS[estimator](group_rewards, lengths[rows].double())
    return advantages.to(at_least_float32(rewards.dtype))


def _grpo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Standard scores, unbiased std. Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; eps as in verl."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def _rloo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the mean of the others, r_i - sum_{j != i} r_j / (n - 1). Source: Ahmadian et al. 2024."""
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


def _centered(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the group mean. Source: Liu et al. 2025 (Dr. GRPO); Hu et al. 2025 (REINFORCE++), which whitens."""
    return rewards - rewards.mean()


def _opo(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Reward minus the mean over the group's tokens, sum_j l_j r_j / sum_j l_j. Source: Hao et al. 2025 (OPO).

    It has the least variance if a response's squared gradient grows with its length. Without any token it is 0.
    """
    return rewards - lengths @ rewards / lengths.sum().clamp_min(1)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "dr_grpo": _centered,
    "opo": _opo,
    "reinforce_pp_baseline": _centered,
}
"""From the rewards of one group, not all equal, and the lengths of its responses, [n] float64, to its advantages."""


class KlController:
    """The KL coefficient, moved after every step so that the KL per response approaches a target.

    Attributes:
        coef: the factor on the KL estimate in the next step.
    Source: Ziegler et al. 2019, section 2.2: coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * K. Here K, 0.1 in the
    paper, is num_responses / horizon as in its code, so that the pace does not depend on the size of a step.
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
        """Move the coefficient, given the mean over this step's num_responses of each one's summed token KL.

        Raises:
            ValueError: kl is not finite, or the step is so large that the coefficient could fall to 0 or below.
        """
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise ValueError(f"kl is {kl}: must be finite")
        share = num_responses / self.horizon
        if self.MAX_ERROR * share >= 1:
            raise ValueError(f"num_responses must be less than 5 times horizon = {self.horizon}, got {num_responses}")
        error = kl / self.target - 1
        self.coef *= 1 + max(-self.MAX_ERROR, min(self.MAX_ERROR, error)) * share

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint must hold."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint; without a target the coefficient stays the configured one."""
        if self.target is not None:
            self.coef = state["coef"]


def _check_unit(name: str, coefficient: float | Tensor) -> None:
    """Raise ValueError unless the number, or every row of [B], lies in [0, 1]."""
    if not isinstance(coefficient, Tensor):
        if not 0 <= coefficient <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {coefficient}")
        return
    is_good = (coefficient >= 0) & (coefficient <= 1)
    if not is_good.all():
        row = int((~is_good).nonzero()[0, 0])
        raise ValueError(f"{name} must lie in [0, 1], got {coefficient[row].item()} in row {row}")


def check_finite(name: str, x: Tensor, mask: Tensor) -> None:
    """Raise ValueError naming the first row of [B] or [B, T] x that holds a NaN or inf inside the mask."""
    is_bad = mask & ~x.isfinite()
    if is_bad.any():
        place = tuple(is_bad.nonzero()[0].tolist())
        column = f", token {place[1]}" if len(place) > 1 else ""
        raise ValueError(f"{name} is {x[place].item()} in row {place[0]}{column}: must be finite")
