"""The numeric kernels of hybrid_rl; imports nothing of it, so the package can be used alone."""

from hybrid_rl_kernels.reference import fused_logprobs, gae

__all__ = ["fused_logprobs", "gae"]
