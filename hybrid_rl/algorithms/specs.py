"""One declaration per algorithm and its needs. Imports no torch, so that config can read it in every process.

The name of an algorithm is also the name of its function: of an estimator in `estimators.py`, of a policy loss in
`policy_loss.py`, of a KL estimator in `kl.py`, of a correction in `correction.py`. A new algorithm is one function
there and one line here: the settings, their rules and the steps of the loop derive from it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EstimatorSpec:
    """What an advantage estimator needs of a run."""

    compares_group: bool = False
    """Whether it compares the responses of a group, which needs rollout.group_size of 2 or more. It gives all tokens
    of a response one advantage; other estimators give every token its own."""
    reads_lengths: bool = False
    """Whether it reads the lengths of a group's responses."""
    needs_critic: bool = False
    """Whether it reads the values of a critic, which the run trains then."""
    needs_greedy: bool = False
    """Whether it reads the reward of each prompt's greedy response, which the run generates then."""
    is_whitened: bool = False
    """Whether advantage.whiten applies; other estimators are never whitened."""


ESTIMATORS: dict[str, EstimatorSpec] = {
    "gae": EstimatorSpec(needs_critic=True, is_whitened=True),
    "grpo": EstimatorSpec(compares_group=True),
    "rloo": EstimatorSpec(compares_group=True),
    "dr_grpo": EstimatorSpec(compares_group=True),
    "opo": EstimatorSpec(compares_group=True, reads_lengths=True),
    "reinforce_pp": EstimatorSpec(is_whitened=True),
    "reinforce_pp_baseline": EstimatorSpec(compares_group=True, is_whitened=True),
    "remax": EstimatorSpec(needs_greedy=True),
}


@dataclass(frozen=True, kw_only=True)
class PolicyLossSpec:
    """What a policy loss reads, and which settings it takes."""

    is_sequence_level: bool = False
    """Whether a token's loss depends on the other tokens of its sequence."""
    takes_dual_clip: bool = False
    """Whether it takes update.dual_clip."""
    is_lower_bound_optional: bool = False
    """Whether it takes update.clip_low = 1, which is no lower bound."""


POLICY_LOSSES: dict[str, PolicyLossSpec] = {
    "clip": PolicyLossSpec(takes_dual_clip=True),
    "gspo": PolicyLossSpec(is_sequence_level=True, takes_dual_clip=True),
    "cispo": PolicyLossSpec(is_lower_bound_optional=True),
    "pg": PolicyLossSpec(),
}

KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "tis", "icepop", "sequence_mask")
