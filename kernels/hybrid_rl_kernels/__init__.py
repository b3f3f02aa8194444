"""Numeric kernels for RLHF training: fused log-probs and entropies, a one-pass token loss, and advantages.

The package does not import hybrid_rl and can be used alone. Triton computes on a GPU, except for float32 weights and
float64 advantages; PyTorch computes everything else. The environment variable HYBRID_RL_KERNELS=reference, read once at
import, selects PyTorch for everything.
"""

from hybrid_rl_kernels.dispatch import (
    Advantages,
    fused_logprobs,
    gae,
    gae_with_moments,
    merge_moments,
    token_loss_one_pass,
    whiten,
)

__all__ = ["Advantages", "fused_logprobs", "gae", "gae_with_moments", "merge_moments", "token_loss_one_pass", "whiten"]
