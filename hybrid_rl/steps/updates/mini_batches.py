"""The mini-batches of an epoch, the ranks of their sequences, and the weights of their tokens in the loss."""

import random
from collections.abc import Iterable

import torch
from torch import Tensor

from hybrid_rl.algorithms.loss import token_weights
from hybrid_rl.batch import TrainBatch, balance, join
from hybrid_rl.config import UpdateConfig
from hybrid_rl.distributed import World


def num_optimizer_steps(step_sizes: Iterable[int], config: UpdateConfig) -> int:
    """Return the optimizer steps of some steps of the loop, given the number of responses of each."""
    return sum(config.num_epochs * -(-size // config.mini_batch_size) for size in step_sizes)


def balance_mini_batches(
    batch: TrainBatch, size: int, *, seed: int, world: World
) -> tuple[TrainBatch, list[list[int]]]:
    """Draw mini-batches, and exchange sequences so that each rank has about as many tokens of every mini-batch.

    Ranks wait for each other in every micro-batch, so a rank with more tokens of a mini-batch than others delays them.

    Args:
        batch: this rank's sequences.
        size:  sequences of a mini-batch, all ranks.
        seed:  draws the mini-batches; the result is the same for any number of ranks.
        world: the ranks that exchange; a collective.
    Returns:
        batch: the sequences of this rank after the exchange.
        rows:  for each mini-batch its rows in that batch, perhaps none. All mini-batches have `size` sequences over all
               ranks, the last one possibly fewer.
    """
    ids = batch.sequence_ids.tolist()
    found = world.all_gather(dict(zip(ids, batch.sequence_lengths, strict=True)))
    lengths = {sequence_id: length for part in found for sequence_id, length in part.items()}
    order = sorted(lengths)
    random.Random(seed).shuffle(order)
    mini_batches = [order[first : first + size] for first in range(0, len(order), size)]
    rank_of: dict[int, int] = {}
    for mini_batch in mini_batches:
        rank_of |= zip(mini_batch, balance([lengths[i] for i in mini_batch], world.size), strict=True)
    if world.size > 1:
        rows_for = [[row for row, i in enumerate(ids) if rank_of[i] == rank] for rank in range(world.size)]
        batch = join(world.all_to_all([batch.select(rows) for rows in rows_for], TrainBatch))
    row_of = {sequence_id: row for row, sequence_id in enumerate(batch.sequence_ids.tolist())}
    return batch, [[row_of[i] for i in mini_batch if i in row_of] for mini_batch in mini_batches]


def mini_batch_weights(
    batch: TrainBatch, rows: list[int], config: UpdateConfig, world: World, max_response_tokens: int
) -> Tensor:
    """Return the loss weight of every token, [B, T] float32: normalised over the mini-batch on all ranks.

    Args:
        rows: rows of the mini-batch on this rank; the weights of other rows are 0.
    """
    counted = batch.response_mask if batch.loss_mask is None else batch.loss_mask
    mask = torch.zeros_like(counted)
    mask[rows] = counted[rows]
    counts = world.sum(torch.tensor([mask.sum(), mask.any(dim=1).sum()], dtype=torch.float64))
    return token_weights(
        mask,
        config.aggregation,
        num_tokens=float(counts[0]),
        num_sequences=float(counts[1]),
        max_response_tokens=max_response_tokens,
    )
