"""Makes DeepSpeed update the alias buffer instead of a flat copy of the parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import deepspeed.runtime.bf16_optimizer
import deepspeed.runtime.zero.stage_1_and_2
import torch
from torch import Tensor

from hybrid_rl.weights.alias import AliasBuffer

# The optimizers of ZeRO 1 and 2, and of ZeRO 1 in bfloat16; both look up PyTorch's function in their own module.
_FLATTENING_MODULES = (deepspeed.runtime.zero.stage_1_and_2, deepspeed.runtime.bf16_optimizer)
_FUNCTION = "_flatten_dense_tensors"


@contextmanager
def flat_parameters_in(buffer: AliasBuffer) -> Iterator[None]:
    """Make the DeepSpeed engine that the body creates use the buffer as its flat parameters.

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
