"""The numeric kernels of hybrid_rl; imports nothing of it, so the package can be used alone.

Tensors on a GPU go to Triton, others to PyTorch, where float32 weights and float64 advantages stay on a GPU too. With
HYBRID_RL_KERNELS=reference in the environment everything goes to PyTorch, so that a run can be compared with itself.
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
