"""Makes DeepSpeed step on the alias buffer instead of on a flat copy of its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import deepspeed.runtime.bf16_optimizer
import deepspeed.runtime.zero.stage_1_and_2
import torch
from torch import Tensor

from hybrid_rl.weights.alias import AliasBuffer

# ZeRO 1 and 2, and ZeRO 1's optimizer in bfloat16: both look PyTorch's function up in their own module.
_FLATTENING_MODULES = (deepspeed.runtime.zero.stage_1_and_2, deepspeed.runtime.bf16_optimizer)
_FUNCTION = "_flatten_dense_tensors"


@contextmanager
def flat_parameters_in(buffer: AliasBuffer) -> Iterator[None]:
    """Make a DeepSpeed engine that is created in the body use the buffer as its flat parameters.

    Raises:
        RuntimeError: this version of DeepSpeed moved a parameter out of the buffer.
    """
    original = getattr(torch._utils, _FUNCTION)

    def flatten(tensors: Sequence[Tensor]) -> Tensor:
        return buffer.flat_view(tensors) if buffer.contains(tensors[0]) else original(tensors)

    for module in _FLATTENING_MODULES:
        setattr(module, _FUNCTION, flatten)
    try:
        yield
    finally:
        for module in _FLATTENING_MODULES:
            setattr(module, _FUNCTION, original)
    if buffer.moved():
        raise RuntimeError(f"DeepSpeed {deepspeed.__version__} moved {buffer.moved()[0]} out of the alias buffer")
