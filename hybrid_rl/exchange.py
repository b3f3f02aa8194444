"""Values that ranks exchange: serialized, so that a rank runs no code that another rank, or a stranger, has sent.

Every function is a collective of the process group, over CPU tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_rl import errors
from hybrid_rl.config import ConfigError
from hybrid_rl.serialization import decode, encode

_ERRORS: dict[str, type[Exception]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.RunError)
} | {"ConfigError": ConfigError, "RuntimeError": RuntimeError}
"""Name -> class of the errors that reach other ranks as what they are; each is built from sentences."""


def all_gather(value: Any, *classes: type, size: int, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks in rank order, on every rank.

    Args:
        value: see serialization.encode.
        classes: dataclasses that may occur in the values, see serialization.decode.
        size: number of ranks.
        group: None is the default group of all ranks.
    """
    content = _bytes_of(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(content)]), group=group)
    longest = int(torch.cat(lengths).max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(content)] = content
    received = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(received, padded, group=group)
    return [_value_of(part[: int(length)], classes) for part, length in zip(received, lengths, strict=True)]


def all_to_all(values: Sequence[Any], *classes: type, group: dist.ProcessGroup | None) -> list[Any]:
    """Send value i to rank i, and return the values sent to this rank, in rank order; see all_gather."""
    outgoing = [_bytes_of(value) for value in values]
    sizes = torch.tensor([len(part) for part in outgoing])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    incoming = torch.empty(int(coming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(incoming, torch.cat(outgoing), coming.tolist(), sizes.tolist(), group=group)
    return [_value_of(part, classes) for part in incoming.split(coming.tolist())]


def broadcast(value: Any, *classes: type, is_sender: bool, group: dist.ProcessGroup | None) -> Any:
    """Return the value of the group's first rank, on every rank; see all_gather.

    Args:
        is_sender: whether this is the first rank; the others' values are ignored.
    """
    content = _bytes_of(value) if is_sender else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(content)])
    dist.broadcast(length, group=group, group_src=0)
    if not is_sender:
        content = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(content, group=group, group_src=0)
    return value if is_sender else _value_of(content, classes)


def describe_error(error: Exception) -> tuple[str, list[str]]:
    """Return name and sentences of an error for other ranks; most classes become a RuntimeError."""
    if isinstance(error, ConfigError):
        return "ConfigError", list(error.messages)
    name = type(error).__name__
    if _ERRORS.get(name) is type(error):
        return name, [str(error)]
    return "RuntimeError", [f"{name}: {error}"]


def make_error(name: str, sentences: Sequence[str]) -> Exception:
    """Return the error that describe_error has described on another rank."""
    return _ERRORS[name](*sentences)


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)


def _value_of(content: Tensor, classes: tuple[type, ...]) -> Any:
    return decode(content.numpy().tobytes(), *classes)
