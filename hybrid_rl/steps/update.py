"""One batch of rollouts becomes optimizer steps of critic and actor."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
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

PtxBackward = Callable[[TrainEngine], float]
"""Back-propagates a language-model loss on its own data, once per optimizer step, and returns it."""


def num_optimizer_steps(step_sizes: Iterable[int], config: UpdateConfig) -> int:
    """Return the optimizer steps of some steps, given how many responses each has: what a schedule runs over."""
    return sum(config.num_epochs * -(-size // config.mini_batch_size) for size in step_sizes)


def balance_mini_batches(
    batch: TrainBatch, size: int, *, seed: int, world: World
) -> tuple[TrainBatch, list[list[int]]]:
    """Draw mini-batches, and let the ranks exchange sequences until each has as many tokens of every mini-batch.

    Ranks wait for each other in every micro-batch. With the sequences left where they were scored, a mini-batch of 128
    of equal length, packed by 32, would take two ranks 2.9 micro-batches on average instead of 2.

    Returns:
        This rank's sequences, and its rows of each mini-batch. Every global mini-batch has `size` sequences but perhaps
        the last, and the same ones for any number of ranks. A rank may hold none of one.
    """
    ids = batch.sequence_ids.tolist()
    found = world.all_gather(dict(zip(ids, batch.sequence_lengths, strict=True)))
    lengths = {sequence_id: length for part in found for sequence_id, length in part.items()}
    order = sorted(lengths)
    random.Random(seed).shuffle(order)
    chunks = [order[first : first + size] for first in range(0, len(order), size)]
    ranks: dict[int, int] = {}
    for chunk in chunks:
        ranks |= zip(chunk, balance([lengths[i] for i in chunk], world.size), strict=True)
    rows_of = [[row for row, i in enumerate(ids) if ranks[i] == rank] for rank in range(world.size)]
    share = batch if world.size == 1 else join(world.all_to_all([batch.select(rows) for rows in rows_of]))
    row_of = {sequence_id: row for row, sequence_id in enumerate(share.sequence_ids.tolist())}
    return share, [[row_of[i] for i in chunk if i in row_of] for chunk in chunks]


def mini_batch_weights(
    batch: TrainBatch, rows: list[int], config: UpdateConfig, world: World, max_response_tokens: int
) -> Tensor:
    """Return the loss weight of every token, [B, T]: normalised over the mini-batch on all ranks, 0 outside it."""
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


def _micro_batches(
    batch: TrainBatch, rows: list[int], config: UpdateConfig, world: World
) -> Iterator[tuple[Packed, bool]]:
    """Yield (packed, is_last) over some rows; every rank yields equally often, a rank's last ones may be dummies."""
    pieces = world.pad_to_longest(split(batch.sequence_lengths, config.micro_batch_tokens, rows))
    for place, piece in enumerate(pieces):
        yield pack(batch, piece, world.device), place == len(pieces) - 1


def _check_finite(losses: list[tuple[Tensor, Packed]], batch: TrainBatch) -> None:
    """Raise FloatingPointError that names the sequences of the first micro-batch with a bad loss."""
    is_bad = ~torch.stack([loss for loss, _ in losses]).isfinite()
    if is_bad.any():
        loss, packed = losses[int(is_bad.nonzero()[0])]
        ids = batch.sequence_ids[packed.rows].tolist()
        raise FloatingPointError(f"loss is {float(loss)} in a micro-batch of the sequences {ids}")


def _update(
    engine: TrainEngine,
    batch: TrainBatch,
    config: UpdateConfig,
    world: World,
    *,
    seed: int,
    max_response_tokens: int,
    compute_loss: Callable[[TrainBatch, Packed, Tensor], tuple[Tensor, Sums]],
    ptx: PtxBackward | None = None,
) -> dict[str, float]:
    """Run all epochs and mini-batches with a loss per micro-batch; return its sums, averaged over optimizer steps.

    Losses and sums stay on the device until the step: reading one waits for the device.
    """
    totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=world.device))
    num_steps = 0
    for epoch in range(config.num_epochs):
        share, mini_batches = balance_mini_batches(batch, config.mini_batch_size, seed=seed + epoch, world=world)
        for rows in mini_batches:
            weights = mini_batch_weights(share, rows, config, world, max_response_tokens)
            losses: list[tuple[Tensor, Packed]] = []
            if ptx is not None:
                totals["ptx_loss"] += ptx(engine) / world.size
            for packed, is_last in _micro_batches(share, rows, config, world):
                loss, sums = compute_loss(share, packed, packed.gather(weights))
                losses.append((loss.detach(), packed))
                engine.backward(loss, is_last=is_last)
                for name, value in sums.items():
                    totals[name] += value.detach().double()
            _check_finite(losses, share)
            totals["lr"] += engine.lr / world.size
            totals["grad_norm"] += engine.step() / world.size
            num_steps += 1
    names = sorted(totals)
    summed = world.sum(torch.stack([totals[name] for name in names]).cpu())
    return {name: float(value) / num_steps for name, value in zip(names, summed, strict=True)}


@dataclass(frozen=True, kw_only=True)
class KlInLoss:
    """The KL to the reference as a part of the actor's loss."""

    coef: float
    estimator: str
    is_unbiased: bool


class ActorLoss:
    """The actor's loss of one micro-batch, token by token; [R] are its response tokens."""

    def __init__(
        self, packed: Packed, batch: TrainBatch, weights: Tensor, config: UpdateConfig, kl: KlInLoss | None
    ) -> None:
        assert batch.old_logprobs is not None and batch.advantages is not None
        self._config = config
        self._kl = kl
        self._weights = weights
        self._factor = weights if batch.loss_weights is None else weights * packed.gather(batch.loss_weights)
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
        """Whether a token's loss depends on no other token, as all but those of a sequence's ratio."""
        return not POLICY_LOSSES[self._config.policy_loss].is_sequence_level

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
        """Return the weighted losses [n] of some tokens, given their log-probs and entropies [n]."""
        loss = self._factor[tokens] * self._policy(logprobs, tokens)[0]
        if self._config.entropy_coef:
            loss = loss - self._config.entropy_coef * self._weights[tokens] * entropy
        if self._kl is not None:
            loss = loss + self._kl.coef * self._weights[tokens] * self._kl_loss(self._kl, logprobs, tokens)
        return loss

    def _policy(self, logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
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
        """Return what to log of all tokens, given their log-probs and entropies [R]."""
        everything, log_ratio = slice(0, len(logprobs)), logprobs - self._old
        token_loss, is_clipped = self._policy(logprobs, everything)
        found = {
            "loss": (self._factor * token_loss).sum(),
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

    loss = (1 - ptx_coef) (policy loss - entropy_coef * entropy + kl.coef * KL), and what ptx back-propagates itself.
    """

    def compute_loss(share: TrainBatch, packed: Packed, weights: Tensor) -> tuple[Tensor, Sums]:
        inputs = packed_inputs(packed) | {"index": packed.response_index, "targets": packed.targets}
        token_loss = ActorLoss(packed, share, weights, config, kl)
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
    """Take the optimizer steps of the critic on a batch with value targets; return metrics averaged over them."""

    def compute_loss(share: TrainBatch, packed: Packed, weights: Tensor) -> tuple[Tensor, Sums]:
        assert share.values is not None and share.returns is not None
        values = engine.forward(**packed_inputs(packed), index=packed.response_index)
        old_values, returns = packed.gather(share.values), packed.gather(share.returns)
        token_loss, is_clipped = value_loss(values, old_values, returns, value_clip=config.value_clip)
        loss = (weights * token_loss).sum()
        return loss, {"loss": loss, "clip_fraction": (weights * is_clipped).sum(), "value": (weights * values).sum()}

    return _update(
        engine, batch, config, world, seed=seed, max_response_tokens=max_response_tokens, compute_loss=compute_loss
    )
