"""Sequence parallelism: consecutive ranks compute each packed micro-batch together, every rank a slice of its tokens.

The ranks of a group have the same sequences. Each takes its slice through the model, whose attention exchanges heads
against tokens (engines/ulysses.py), and the head runs on the response tokens of the slice. Log-probs and values are
then joined, so that all of them compute the same loss; backward gives each rank the gradient by its own tokens, and
the sum over ranks is the gradient of the micro-batch.

Source: Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv 2309.14509).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig

from hybrid_rl.config import check
from hybrid_rl.distributed import World

T = TypeVar("T")


def check_heads(config: PretrainedConfig, size: int, *, where: str) -> None:
    """Check that the attention heads of a model can be dealt out to `size` ranks.

    Args:
        where: field and folder of the model.
    Raises:
        ConfigError: they cannot.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    check_head_counts(heads, getattr(text, "num_key_value_heads", None) or heads, size, where=where)


def check_head_counts(heads: int, key_heads: int, size: int, *, where: str) -> None:
    """Check the same of numbers of attention heads and of key heads; see check_heads."""
    field = f"update.sequence_parallel_size = {size}"
    check(heads % size == 0, f"{field}: must divide the {heads} attention heads of {where}")
    check(
        key_heads % size == 0 or size % key_heads == 0,
        f"{field}: must divide the {key_heads} key heads of {where}, or be a multiple of them",
    )


def pad_to_ranks(
    input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int, num_ranks: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return packed tokens, see Packed, with one more sequence if their number must grow to divide by num_ranks."""
    missing = -input_ids.shape[1] % num_ranks
    if not missing:
        return input_ids, position_ids, cu_seqlens, max_length
    places = torch.arange(missing, device=position_ids.device, dtype=position_ids.dtype)
    return (
        nn.functional.pad(input_ids, (0, missing)),
        torch.cat([position_ids, places[None]], dim=1),
        torch.cat([cu_seqlens, cu_seqlens[-1:] + missing]),
        max(max_length, missing),
    )


class _Join(torch.autograd.Function):
    """Rows of all ranks in one tensor on each of them, and what ranks have at the same place added up.

    Backward takes this rank's rows of the gradient as it is: all ranks compute the same of the joined tensor.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: slice, num_rows: int, ranks: World) -> Tensor:
        ctx.places = places
        joined = rows.new_zeros(num_rows, *rows.shape[1:])
        joined[places] = rows
        dist.all_reduce(joined, group=ranks.group)
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0][ctx.places], None, None, None


class TokenSlice:
    """What this rank computes of one micro-batch: N tokens, of which R are read by the head."""

    def __init__(self, ranks: World, num_tokens: int, index: Tensor) -> None:
        """Find this rank's part of index [R], ascending places in N; it waits for the device."""
        length = -(-num_tokens // ranks.size)
        first = ranks.rank * length
        start, stop = torch.searchsorted(index, index.new_tensor([first, first + length])).tolist()
        self.read = slice(start, stop)
        """The r places of R that this rank reads."""
        self.index = index[self.read] - first
        """[r] int64; where they are in its slice of N."""
        self._num_read = len(index)
        self._ranks = ranks

    def join(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return [R] float32 tensors, the same on all ranks, of the [r] that each rank has."""
        return _Join.apply(torch.stack(values, dim=1), self.read, self._num_read, self._ranks).unbind(1)

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum of the ranks' scalar losses."""
        return _Join.apply(loss[None], slice(0, 1), 1, self._ranks)[0]

    def shifted(self, loss: Callable[[Tensor, Tensor, slice], Tensor] | None) -> Any:
        """Return a loss of slices of R as one of slices of r, see packed.LossOfLogprobs."""
        if loss is None:
            return None
        start = self.read.start
        return lambda logprobs, entropy, tokens: loss(
            logprobs, entropy, slice(tokens.start + start, tokens.stop + start)
        )


def apply_together(ranks: World | None, items: Sequence[T], compute: Callable[[list[T]], Tensor]) -> Tensor:
    """Return compute's rows for this rank's items, when the ranks compute those of all their items together."""
    if ranks is None:
        return compute(list(items))
    parts = ranks.all_gather(list(items))
    rows = compute([item for part in parts for item in part])
    return rows.split([len(part) for part in parts])[ranks.rank]
