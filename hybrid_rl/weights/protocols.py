"""What weight sync needs of the two sides: a source of named tensors, and a receiver that holds copies or aliases."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from hybrid_rl.weights.bucket import Slot

NamedShape = tuple[str, tuple[int, ...], torch.dtype]
"""Name, full shape and dtype of a tensor."""

TensorSlice = tuple[tuple[int, ...], tuple[int, ...], int]
"""Part of a tensor: size, stride and storage offset, in elements of the contiguous tensor."""


class WeightSource(Protocol):
    """The side whose weights are synchronized: a training engine."""

    def named_shapes(self) -> list[NamedShape]:
        """Return name, full shape and dtype of every weight; tied weights appear once."""
        ...

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Yield the named weights unsharded; a collective where ranks hold shards of them."""
        ...


class WeightReceiver(Protocol):
    """The side that takes the weights: a rollout engine."""

    weights_version: int
    """Number of completed weight syncs; 0 means that the weights are not the trainer's yet."""

    def open_bucket(self, handle: bytes, plan: list[list[Slot]]) -> None:
        """Map the trainer's bucket and remember what each fill of it holds."""
        ...

    def load_bucket(self, index: int) -> None:
        """Start to copy bucket `index` of the plan, which is filled, into the weights.

        When the call returns, every bucket before it is copied, so that all buckets but this one may be overwritten.
        An error of a copy is raised here, by a later call, or by finish_sync.
        """
        ...

    def finish_sync(self) -> None:
        """Wait for the last copy, drop everything computed with older weights and increment weights_version.

        Raises:
            RuntimeError: an engine parameter that no tensor of the plan fills; the message names it.
        """
        ...

    def checksums(self, names: Sequence[str]) -> list[dict[str, list[tuple[TensorSlice, int]]]]:
        """Return, per engine worker and tensor, the checksum of each slice of the tensor that the worker holds."""
        ...
