"""Forwards without gradient over a whole batch: log-probs of actor and reference, values of critic and reward model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybrid_rl.batch import Packed, TrainBatch, pack, split
from hybrid_rl.distributed import World
from hybrid_rl.memory.micro_batches import Attempt, TokenLimit, free_memory
from hybrid_rl.models.packed import actor_inputs, packed_inputs


class ActorForward(Protocol):
    """Call of an Actor, plain or inside a training engine."""

    def __call__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_length: int,
        index: Tensor,
        targets: Tensor,
        temperature: float,
        routed_experts: Tensor | None = ...,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, both [R] float32; see `models.packed.Actor`."""
        ...


class ValueForward(Protocol):
    """Call of a ValueModel, plain or inside a training engine."""

    def __call__(
        self, *, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int, index: Tensor
    ) -> Tensor:
        """Return the values at positions index [R], [R] float32; see `models.packed.ValueModel`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How a batch is split into forwards without gradient."""

    limit: TokenLimit
    """Maximum tokens that are packed into one forward of this rank."""
    world: World
    """Ranks that make the same number of forwards."""
    do_others_wait: bool = False
    """Whether ranks wait for each other in the middle of a forward, because weights or activations are sharded."""


class LogprobGapError(RuntimeError):
    """Engine and trainer disagree on the probability of the sampled tokens."""


@torch.no_grad()
def run_packed(batch: TrainBatch, packing: Packing, run: Callable[[Packed], Tensor]) -> list[tuple[Packed, Tensor]]:
    """Return the packed pieces of the whole batch, each with the result of run, which stays on the device.

    Every rank makes the same number of calls. Results are not read in between, because reading waits for the device.
    Where a piece of any rank runs out of memory, all ranks start again with smaller pieces.

    Raises:
        RunError: a piece runs out of memory and cannot be smaller, or other ranks wait for this one.
    """
    while True:
        attempt, done = Attempt(packing.limit, packing.world), list[tuple[Packed, Tensor]]()
        _try(batch, packing, run, attempt, done)
        if packing.do_others_wait or attempt.succeeded():
            return done
        done.clear()
        free_memory(packing.world.device)


def _try(
    batch: TrainBatch,
    packing: Packing,
    run: Callable[[Packed], Tensor],
    attempt: Attempt,
    done: list[tuple[Packed, Tensor]],
) -> None:
    """Run one piece after the other, until one does not fit."""
    lengths, world = batch.sequence_lengths, packing.world
    for rows in world.pad_to_longest(split(lengths, packing.limit.tokens)):
        with attempt.micro_batch([lengths[row] for row in rows], do_others_wait=packing.do_others_wait):
            packed = pack(batch, rows, world.device)
            done.append((packed, run(packed)))
        if not attempt.has_room:
            return


def token_logprobs(actor: ActorForward, batch: TrainBatch, packing: Packing, *, temperature: float) -> Tensor:
    """Return the log-probs of all response tokens, [B, T] float32, without gradient; 0 outside the response mask."""

    def run(packed: Packed) -> Tensor:
        return actor(**actor_inputs(packed), temperature=temperature)[0]

    return _padded(batch, run_packed(batch, packing, run))


def token_values(critic: ValueForward, batch: TrainBatch, packing: Packing) -> Tensor:
    """Return the critic's value before each response token, [B, T] float32, without gradient; 0 outside the mask."""

    def run(packed: Packed) -> Tensor:
        return critic(**packed_inputs(packed), index=packed.response_index)

    return _padded(batch, run_packed(batch, packing, run))


def sequence_values(model: ValueForward, batch: TrainBatch, packing: Packing) -> Tensor:
    """Return the value at each sequence's last token, [B] float32, without gradient: a reward model's score."""

    def run(packed: Packed) -> Tensor:
        return model(**packed_inputs(packed), index=packed.last_index)

    result = torch.zeros(len(batch))
    for packed, values in run_packed(batch, packing, run):
        result[packed.rows] = values.to(result)
    return result


def _padded(batch: TrainBatch, pieces: list[tuple[Packed, Tensor]]) -> Tensor:
    """Return [B, T] float32 on the CPU, of packed pieces and their response tokens' values [R]."""
    result = torch.zeros(batch.response_mask.shape)
    for packed, values in pieces:
        packed.scatter(values, result)
    return result


def check_logprob_gap(batch: TrainBatch, *, limit: float, world: World) -> float:
    """Return the mean |engine - trainer| log-prob over all sampled tokens of all ranks.

    Engine and trainer have the same weights, so the gap checks every weight sync on the tokens that are trained on.

    Raises:
        LogprobGapError: the mean is above the limit.
    """
    assert batch.old_logprobs is not None
    difference = (batch.rollout_logprobs - batch.old_logprobs).abs()
    total = torch.where(batch.response_mask, difference, 0).sum()
    sums = world.sum(torch.stack([total.double(), batch.response_mask.sum().double()]))
    gap = float(sums[0] / sums[1].clamp(min=1))
    if not gap <= limit:
        raise LogprobGapError(
            f"mean |engine - trainer| log-prob is {gap:.3g}, above {limit:.3g} (rollout.max_logprob_gap): "
            "the engine does not run the trainer's weights, or computes them differently"
        )
    return gap
