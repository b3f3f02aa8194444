"""The numeric kernels of hybrid_rl; imports nothing of it, so the package can be used alone.

Tensors on a GPU go to Triton, but for float32 weights and float64 advantages; all others go to PyTorch, and everything
does with HYBRID_RL_KERNELS=reference in the environment, which is read once, at import.
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
