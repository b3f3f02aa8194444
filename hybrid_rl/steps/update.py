"""Updates of actor and critic: one optimizer step per mini-batch, one forward and backward per micro-batch."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algorithms.kl import kl_loss
from hybrid_rl.algorithms.loss import token_weights, value_loss
from hybrid_rl.algorithms.policy_loss import policy_loss
from hybrid_rl.algorithms.specs import POLICY_LOSSES
from hybrid_rl.batch import Packed, TrainBatch, balance, join, pack, split, to_device
from hybrid_rl.config import UpdateConfig
from hybrid_rl.distributed import World
from hybrid_rl.engines import TrainEngine
from hybrid_rl.models.packed import packed_inputs

Sums = dict[str, Tensor]
"""Weighted sums over the tokens of a micro-batch; over a whole mini-batch and all ranks they are means."""

MicroBatchLoss = Callable[[TrainBatch, Packed, Tensor], tuple[Tensor, Sums]]
"""From this rank's batch, a micro-batch of it, and the loss weights [R] of its response tokens, to the loss, a scalar
with gradient, and the sums for the metrics."""

PtxBackward = Callable[[TrainEngine], float]
"""Adds the gradient of a language-model loss on other data, once per optimizer step, and returns the loss."""


def num_optimizer_steps(step_sizes: Iterable[int], config: UpdateConfig) -> int:
    """Return the optimizer steps of some steps of the loop, given the number of responses of each."""
    return sum(config.num_epochs * -(-size // config.mini_batch_size) for size in step_sizes)


# Mini-batches


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
        batch = join(world.all_to_all([batch.select(rows) for rows in rows_for]))
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


# Optimizer steps


class _Totals:
    """Sums of metrics over optimizer steps. They stay on the device, because reading one waits for the device."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums: Sums = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=world.device))

    def add(self, sums: Sums) -> None:
        """Add this rank's sums."""
        for name, value in sums.items():
            self._sums[name] += value.detach().double()

    def add_common(self, name: str, value: float) -> None:
        """Add a value that all ranks have, which counts once."""
        self._sums[name] += value / self._world.size

    def means(self, num_steps: int) -> dict[str, float]:
        """Return the sums over all ranks, divided by the number of optimizer steps."""
        names = sorted(self._sums)
        summed = self._world.sum(torch.stack([self._sums[name] for name in names]).cpu())
        return {name: float(value) / num_steps for name, value in zip(names, summed, strict=True)}


def _update(
    engine: TrainEngine,
    batch: TrainBatch,
    config: UpdateConfig,
    world: World,
    *,
    seed: int,
    max_response_tokens: int,
    compute_loss: MicroBatchLoss,
    ptx: PtxBackward | None = None,
) -> dict[str, float]:
    """Take one optimizer step per mini-batch, in every epoch; return metrics averaged over the optimizer steps."""
    totals, num_steps = _Totals(world), 0
    for epoch in range(config.num_epochs):
        local, mini_batches = balance_mini_batches(batch, config.mini_batch_size, seed=seed + epoch, world=world)
        for rows in mini_batches:
            weights = mini_batch_weights(local, rows, config, world, max_response_tokens)
            if ptx is not None:
                totals.add_common("ptx_loss", ptx(engine))
            pieces = world.pad_to_longest(split(local.sequence_lengths, config.micro_batch_tokens, rows))
            mini_batch = _MiniBatch(batch=local, weights=weights, pieces=pieces)
            _backward(engine, mini_batch, compute_loss, totals, world.device)
            totals.add_common("lr", engine.lr)
            totals.add_common("grad_norm", engine.step())
            num_steps += 1
    return totals.means(num_steps)


@dataclass(frozen=True, kw_only=True)
class _MiniBatch:
    """This rank's sequences of one optimizer step."""

    batch: TrainBatch
    """All sequences of this rank in the epoch."""
    weights: Tensor
    """[B, T] float32; see `mini_batch_weights`."""
    pieces: list[list[int]]
    """Rows of each micro-batch. Every rank has equally many pieces, the last ones perhaps without rows."""


def _backward(
    engine: TrainEngine, mini_batch: _MiniBatch, compute_loss: MicroBatchLoss, totals: _Totals, device: torch.device
) -> None:
    """Accumulate the gradients of a mini-batch, micro-batch by micro-batch, and add its sums to the totals.

    Raises:
        FloatingPointError: the loss of a micro-batch is not finite; names its sequences.
    """
    batch, pieces = mini_batch.batch, mini_batch.pieces
    losses: list[Tensor] = []
    for place, rows in enumerate(pieces):
        packed = pack(batch, rows, device)
        loss, sums = compute_loss(batch, packed, packed.gather(mini_batch.weights))
        losses.append(loss.detach())
        engine.backward(loss, is_last=place == len(pieces) - 1)
        totals.add(sums)
    is_bad = ~torch.stack(losses).isfinite()
    if is_bad.any():
        place = int(is_bad.nonzero()[0])
        ids = batch.sequence_ids[pieces[place]].tolist()
        raise FloatingPointError(f"loss is {float(losses[place])} in a micro-batch of the sequences {ids}")


# Actor and critic


@dataclass(frozen=True, kw_only=True)
class KlInLoss:
    """The KL to the reference as a part of the actor's loss."""

    coef: float
    estimator: str
    """A name in specs.KL_ESTIMATORS."""
    is_unbiased: bool
    """Weight by the ratio to the old policy; see `kl_loss`."""


class ActorLoss:
    """The actor's loss of one micro-batch, token by token; [R] are its response tokens."""

    def __init__(
        self, packed: Packed, batch: TrainBatch, weights: Tensor, config: UpdateConfig, kl: KlInLoss | None
    ) -> None:
        """Gather the fields that the loss reads, [R] each; `mini_batch_weights` gives the weights [R]."""
        assert batch.old_logprobs is not None and batch.advantages is not None
        self._config = config
        self._kl = kl
        self._weights = weights
        self._policy_weights = weights if batch.loss_weights is None else weights * packed.gather(batch.loss_weights)
        self._old = packed.gather(batch.old_logprobs)
        self._advantages = packed.gather(batch.advantages)
        self._ref: Tensor | None = None
        if kl is not None:
            assert batch.ref_logprobs is not None
            self._ref = packed.gather(batch.ref_logprobs)
        self._sequences = to_device(packed.token_rows, weights.device)
        self._num_sequences = len(batch)

    @property
    def is_elementwise(self) -> bool:
        """Whether a token's loss depends on no other token, so that it can be computed in slices."""
        return not POLICY_LOSSES[self._config.policy_loss].is_sequence_level

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
        """Return the weighted losses [n] of some tokens, given their log-probs and entropies [n]."""
        loss = self._policy_weights[tokens] * self._policy_loss(logprobs, tokens)[0]
        if self._config.entropy_coef:
            loss = loss - self._config.entropy_coef * self._weights[tokens] * entropy
        if self._kl is not None:
            loss = loss + self._kl.coef * self._weights[tokens] * self._kl_loss(self._kl, logprobs, tokens)
        return loss

    def _policy_loss(self, logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        config = self._config
        return policy_loss(
            logprobs,
            self._old[tokens],
            self._advantages[tokens],
            kind=config.policy_loss,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            sequence_index=self._sequences[tokens],
            num_sequences=self._num_sequences,
        )

    def _kl_loss(self, kl: KlInLoss, logprobs: Tensor, tokens: slice) -> Tensor:
        assert self._ref is not None
        return kl_loss(logprobs, self._old[tokens], self._ref[tokens], kl.estimator, unbiased=kl.is_unbiased)

    @torch.no_grad()
    def sums(self, logprobs: Tensor, entropy: Tensor) -> Sums:
        """Return the sums for the metrics over all tokens, given their log-probs and entropies [R]."""
        everything, log_ratio = slice(0, len(logprobs)), logprobs - self._old
        token_loss, is_clipped = self._policy_loss(logprobs, everything)
        found = {
            "loss": (self._policy_weights * token_loss).sum(),
            "clip_fraction": (self._weights * is_clipped).sum(),
            "ratio": (self._weights * log_ratio.exp()).sum(),
            "log_ratio": (self._weights * log_ratio.abs()).sum(),
            "entropy": (self._weights * entropy).sum(),
        }
        if self._kl is not None:
            found["kl_loss"] = (self._weights * self._kl_loss(self._kl, logprobs, everything)).sum()
        return found


def update_actor(
    engine: TrainEngine,
    batch: TrainBatch,
    config: UpdateConfig,
    world: World,
    *,
    seed: int,
    temperature: float,
    max_response_tokens: int,
    kl: KlInLoss | None = None,
    ptx: PtxBackward | None = None,
    ptx_coef: float = 0.0,
) -> dict[str, float]:
    """Take the optimizer steps of the actor on a batch with advantages; return metrics averaged over them.

    loss = (1 - ptx_coef) * (policy loss - entropy_coef * entropy + kl.coef * KL) + the loss of ptx, weighted by itself.

    Args:
        batch:               this rank's sequences; their old_logprobs and advantages, with kl also ref_logprobs.
        world:               the ranks that hold different sequences.
        seed:                draws the mini-batches.
        temperature:         divides the logits, as in the rollout.
        max_response_tokens: normaliser of the aggregation sequence_sum_constant.
    Raises:
        FloatingPointError: a loss is not finite.
    """

    def compute_loss(local: TrainBatch, packed: Packed, weights: Tensor) -> tuple[Tensor, Sums]:
        inputs = packed_inputs(packed) | {"index": packed.response_index, "targets": packed.targets}
        token_loss = ActorLoss(packed, local, weights, config, kl)
        if token_loss.is_elementwise:
            loss, logprobs, entropy = engine.forward(**inputs, temperature=temperature, loss_of_logprobs=token_loss)
        else:
            logprobs, entropy = engine.forward(**inputs, temperature=temperature)
            loss = token_loss(logprobs, entropy, slice(0, len(logprobs))).sum()
        return (1 - ptx_coef) * loss if ptx_coef else loss, token_loss.sums(logprobs, entropy)

    return _update(
        engine,
        batch,
        config,
        world,
        seed=seed,
        max_response_tokens=max_response_tokens,
        compute_loss=compute_loss,
        ptx=ptx,
    )


def update_critic(
    engine: TrainEngine, batch: TrainBatch, config: UpdateConfig, world: World, *, seed: int, max_response_tokens: int
) -> dict[str, float]:
    """Take the optimizer steps of the critic on a batch with values and returns; return metrics averaged over them.

    Args and Raises: see `update_actor`.
    """

    def compute_loss(local: TrainBatch, packed: Packed, weights: Tensor) -> tuple[Tensor, Sums]:
        assert local.values is not None and local.returns is not None
        values = engine.forward(**packed_inputs(packed), index=packed.response_index)
        old_values, returns = packed.gather(local.values), packed.gather(local.returns)
        token_loss, is_clipped = value_loss(values, old_values, returns, value_clip=config.value_clip)
        loss = (weights * token_loss).sum()
        return loss, {"loss": loss, "clip_fraction": (weights * is_clipped).sum(), "value": (weights * values).sum()}

    return _update(
        engine, batch, config, world, seed=seed, max_response_tokens=max_response_tokens, compute_loss=compute_loss
    )
