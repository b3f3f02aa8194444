"""Elementwise maths of the losses, which keeps NaN and inf out of the gradient of slots that are masked out.

Wherever the incoming gradient is 0, as in every slot that `loss.aggregate` masks out, the outgoing one is 0 too, even
if the slot holds NaN or inf: bounds are clamps and bad slots are filled, and both *select* their gradient.
"""

import torch
from torch import Tensor

from hybrid_rl_kernels.reference import at_least_float32

MAX_LOG_RATIO = 20.0
"""Bound of an exponent before exp(); float32 overflows above 88."""


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x), x bounded to +-MAX_LOG_RATIO; beyond the bounds, and for NaN, the gradient is 0."""
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def half_square(x: Tensor) -> Tensor:
    """Return x^2 / 2; the clamp changes no x with a finite square, and keeps 0 * inf out of the gradient."""
    limit = torch.finfo(x.dtype).max / 4
    return 0.5 * x.clamp(-limit, limit).square()


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Return a - b in at least float32: in float16 its exponential would overflow above 11."""
    dtype = at_least_float32(a.dtype)
    return a.to(dtype) - b.to(dtype)
