"""Sequence parallelism: the ranks of a group each compute a slice of the tokens of every packed micro-batch.

The ranks of a group have the same sequences. Each runs the model on its slice; attention exchanges tokens for heads
(engines/deepspeed/ulysses.py), and the head runs on the response tokens of the slice. Log-probs and values are then
joined, so that every rank computes the same loss. Backward gives each rank the gradient that flows through its own
tokens; the sum over the ranks is the gradient of the micro-batch.

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


SUPPORTED_ATTENTION = ("varlen", "flash_attention_2", "sdpa")
"""Values of models.attention whose functions take the bounds of sequences as arguments and can be wrapped."""


def check_slices(config: PretrainedConfig, attention: str, *, is_padded: bool, where: str) -> None:
    """Check that the tokens of a model's micro-batches can be sliced.

    Args:
        config: of the model.
        attention: its attention implementation.
        is_padded: whether its sequences are padded, see PackedModel.
        where: setting, its value and the model, for messages.
    Raises:
        ConfigError: they cannot.
    """
    check(not is_padded, f"{where} pads its sequences, and only packed tokens can be sliced; use 1")
    check(
        attention in SUPPORTED_ATTENTION,
        f"{where} runs with models.attention = {attention}; tokens can be sliced with {', '.join(SUPPORTED_ATTENTION)}",
    )
    check(
        attention != "sdpa" or getattr(config.get_text_config(), "sliding_window", None) is None,
        f"{where} has a sliding window, for which models.attention = sdpa masks only this rank's tokens; "
        "use varlen or flash_attention_2",
    )


def check_heads(config: PretrainedConfig, size: int, *, where: str) -> None:
    """Check that the attention heads of a model divide over `size` ranks.

    Args:
        config: of the model.
        size: update.sequence_parallel_size.
        where: field and folder of the model, for messages.
    Raises:
        ConfigError: the heads do not divide.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    check_head_counts(heads, getattr(text, "num_key_value_heads", None) or heads, size, where=where)


def check_head_counts(heads: int, key_heads: int, size: int, *, where: str) -> None:
    """Check that `heads` query heads and `key_heads` key heads divide over `size` ranks; see check_heads."""
    field = f"update.sequence_parallel_size = {size}"
    check(heads % size == 0, f"{field}: must divide the {heads} attention heads of {where}")
    check(
        key_heads % size == 0 or size % key_heads == 0,
        f"{field}: must divide the {key_heads} key heads of {where}, or be a multiple of them",
    )


def pad_to_ranks(
    input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int, num_ranks: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the packed tokens with one more sequence of padding, if that is needed to divide them by num_ranks.

    Args:
        input_ids, position_ids, cu_seqlens, max_length: see Packed.
        num_ranks: size of the sequence-parallel group.
    Returns:
        The first four arguments, with the padding.
    """
    missing = -input_ids.shape[1] % num_ranks
    if not missing:
        return input_ids, position_ids, cu_seqlens, max_length
    positions = torch.arange(missing, device=position_ids.device, dtype=position_ids.dtype)
    return (
        nn.functional.pad(input_ids, (0, missing)),
        torch.cat([position_ids, positions[None]], dim=1),
        torch.cat([cu_seqlens, cu_seqlens[-1:] + missing]),
        max(max_length, missing),
    )


class _Join(torch.autograd.Function):
    """Places each rank's rows in one tensor, which is summed over the ranks, so that every rank has all rows.

    Backward returns this rank's rows of the gradient without a collective, because every rank computes the same loss
    from the joined tensor.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, local_rows: slice, num_rows: int, group: World) -> Tensor:
        ctx.local_rows = local_rows
        joined = rows.new_zeros(num_rows, *rows.shape[1:])
        joined[local_rows] = rows
        dist.all_reduce(joined, group=group.group)
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0][ctx.local_rows], None, None, None


class TokenSlice:
    """This rank's slice of the N tokens of a micro-batch, and the r of R positions read by the head that lie in it."""

    def __init__(self, group: World, num_tokens: int, index: Tensor) -> None:
        """Compute the slice; this synchronizes with the device.

        Args:
            group: sequence-parallel group.
            num_tokens: N, without padding.
            index: [R] int64, ascending positions in N that the head reads.
        """
        length = -(-num_tokens // group.size)
        first = group.rank * length
        start, stop = torch.searchsorted(index, index.new_tensor([first, first + length])).tolist()
        self.read = slice(start, stop)
        """The entries of R whose positions lie in this rank's slice."""
        self.index = index[self.read] - first
        """[r] int64, their positions in this rank's slice of N."""
        self._num_read = len(index)
        self._group = group

    def join(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return [R] float32 tensors, equal on all ranks, of the [r] values of each rank."""
        return _Join.apply(torch.stack(values, dim=1), self.read, self._num_read, self._group).unbind(1)

    def total(self, loss: Tensor) -> Tensor:
        """Return the sum of the ranks' scalar losses."""
        return _Join.apply(loss[None], slice(0, 1), 1, self._group)[0]

    def localize(self, loss: Callable[[Tensor, Tensor, slice], Tensor] | None) -> Any:
        """Return a loss that takes slices of r, given one that takes slices of R; see heads.LossOfLogprobs."""
        if loss is None:
            return None
        start = self.read.start
        return lambda logprobs, entropy, tokens: loss(
            logprobs, entropy, slice(tokens.start + start, tokens.stop + start)
        )


def apply_together(
    group: World | None, items: Sequence[T], compute: Callable[[list[T]], Tensor], *classes: type
) -> Tensor:
    """Return the rows that `compute` gives for this rank's items, computed by all ranks of a group together.

    Args:
        group: sequence-parallel group; None computes on this rank alone.
        items: of this rank; their number may differ between the ranks.
        compute: maps items to a tensor with one row each; every rank calls it with the items of all ranks.
        classes: dataclasses that may occur in the items, see World.all_gather.
    """
    if group is None:
        return compute(list(items))
    parts = group.all_gather(list(items), *classes)
    rows = compute([item for part in parts for item in part])
    return rows.split([len(part) for part in parts])[group.rank]
