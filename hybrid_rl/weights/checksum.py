"""Checksums of tensors, the same on every device and for every memory layout."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_ROW = 1 << 20  # words of 4 bytes with a random number each, 8 MiB on the device


_ROWS_AT_ONCE = 8  # bounds a checksum's temporaries to 64 MiB


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return a 64-bit checksum of each tensor's bits in logical order, [len(tensors)] int64 on their device.

    The same on every device and for every memory layout: the sum, modulo 2**64, of each 4 bytes times a random odd
    number of their place, plus one times the number of elements. A single bit changes it, and so do elements that swap
    their places. Nothing is read back from the device here.
    """
    return torch.stack([_checksum(tensor) for tensor in tensors])


def checksum(tensor: Tensor) -> int:
    """Return the checksum of one tensor, see checksums."""
    return int(_checksum(tensor))


@functools.cache
def _multipliers(device: torch.device) -> Tensor:
    """Return [_ROW] random odd int64."""
    numbers = torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=torch.Generator().manual_seed(0x5EED))
    return (numbers | 1).to(device)


def _checksum(tensor: Tensor) -> Tensor:
    """Return the checksum as a scalar on the tensor's device; words stand in rows, and each row has a number, too."""
    words, odd = _words(tensor), _multipliers(tensor.device)
    total = odd[-1] * tensor.numel()
    num_rows = len(words) // _ROW
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, num_rows)
        rows = words[first * _ROW : last * _ROW].view(-1, _ROW)
        total = total + ((rows * odd).sum(1) * odd[first:last]).sum()
    rest = words[num_rows * _ROW :]
    return total + (rest * odd[: len(rest)]).sum() * odd[num_rows]


def _words(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes as int32, the last ones padded with zeros; shares its memory where it can."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if len(flat) % 4:
        flat = F.pad(flat, (0, -len(flat) % 4))
    elif flat.storage_offset() % 4:
        flat = flat.clone()
    return flat.view(torch.int32)
