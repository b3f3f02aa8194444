"""Checksums of tensors, the same on every device and for every memory layout."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_ROW = 1 << 20  # words of 4 bytes; each word of a row has its own random number
_ROWS_AT_ONCE = 8  # bounds the temporary memory to 64 MiB


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return a 64-bit checksum of each tensor's bits in logical order, [len(tensors)] int64 on their device.

    It is the sum, modulo 2**64, of each word of 4 bytes times a random odd number of its position, plus the number of
    elements times one such number. A single changed bit changes it, and so do two elements that swap places. Nothing
    is read back from the device.
    """
    return torch.stack([_checksum(tensor) for tensor in tensors])


def checksum(tensor: Tensor) -> int:
    """Return the checksum of one tensor; see checksums."""
    return int(_checksum(tensor))


@functools.cache
def _multipliers(device: torch.device) -> Tensor:
    """Return random odd numbers, [_ROW] int64."""
    numbers = torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=torch.Generator().manual_seed(0x5EED))
    return (numbers | 1).to(device)


def _checksum(tensor: Tensor) -> Tensor:
    """Return the checksum as a scalar on the tensor's device; each row of words has a random number too."""
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
    """Return the tensor's bytes as int32, padded with zeros; a view where the layout allows."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if len(flat) % 4:
        flat = F.pad(flat, (0, -len(flat) % 4))
    elif flat.storage_offset() % 4:
        flat = flat.clone()
    return flat.view(torch.int32)
