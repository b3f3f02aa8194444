"""Updates of actor and critic: one optimizer step per mini-batch, one forward and backward per micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hybrid_rl.algorithms.loss import value_loss
from hybrid_rl.batch import Packed, TrainBatch, pack
from hybrid_rl.config import UpdateConfig
from hybrid_rl.distributed import World
from hybrid_rl.engines import TrainEngine
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.models.packed import actor_inputs, packed_inputs
from hybrid_rl.steps.updates.actor_loss import ActorLoss, KlInLoss
from hybrid_rl.steps.updates.mini_batches import balance_mini_batches, mini_batch_weights, num_optimizer_steps
from hybrid_rl.steps.updates.optimizer_step import LossPart, Sums, Totals, accumulate, take_step

__all__ = ["KlInLoss", "balance_mini_batches", "num_optimizer_steps", "update_actor", "update_critic"]

MicroBatchLoss = Callable[[TrainBatch, Packed, Tensor], tuple[Tensor, Sums]]
"""From this rank's batch, a micro-batch of it, and the loss weights [R] of its response tokens, to the loss, a scalar
with gradient, and the sums for the metrics."""

FurtherPart = Callable[[], LossPart]
"""Draws the sequences, not from the batch, whose losses the next optimizer step adds."""


def update_actor(
    engine: TrainEngine,
    batch: TrainBatch,
    config: UpdateConfig,
    world: World,
    *,
    seed: int,
    temperature: float,
    max_response_tokens: int,
    limit: TokenLimit | None = None,
    kl: KlInLoss | None = None,
    ptx: FurtherPart | None = None,
    ptx_coef: float = 0.0,
) -> dict[str, float]:
    """Take the optimizer steps of the actor on a batch with advantages; return metrics averaged over them.

    loss = (1 - ptx_coef) * (policy loss - entropy_coef * entropy + kl.coef * KL + router_aux_loss_coef * balance)
    + the loss of ptx, weighted by itself. The balance of a micro-batch has the weight of its tokens.

    Args:
        batch:               this rank's sequences; their old_logprobs and advantages, with kl also ref_logprobs.
        world:               the ranks that hold different sequences.
        seed:                draws the mini-batches.
        temperature:         divides the logits, as in the rollout.
        max_response_tokens: normaliser of the aggregation sequence_sum_constant.
        limit:               maximum tokens of a micro-batch; None starts at update.micro_batch_tokens.
    Raises:
        RunError: a micro-batch runs out of memory and cannot be smaller, or other ranks wait for this one.
        FloatingPointError: a loss is not finite.
    """

    aux_coef = config.router_aux_loss_coef

    def compute_loss(local: TrainBatch, packed: Packed, weights: Tensor) -> tuple[Tensor, Sums]:
        inputs = actor_inputs(packed) | ({"measures_balance": True} if aux_coef else {})
        token_loss = ActorLoss(packed, local, weights, config, kl)
        if token_loss.is_elementwise:
            loss, logprobs, entropy = engine.forward(**inputs, temperature=temperature, loss_of_logprobs=token_loss)
        else:
            logprobs, entropy = engine.forward(**inputs, temperature=temperature)
            loss = token_loss(logprobs, entropy, slice(0, len(logprobs))).sum()
        sums = token_loss.sums(logprobs, entropy)
        if aux_coef:
            balance = weights.sum() * engine.module.balance
            loss, sums["router_balance"] = loss + aux_coef * balance, balance.detach()
        return (1 - ptx_coef) * loss if ptx_coef else loss, sums

    return _update(
        engine,
        batch,
        config,
        world,
        seed=seed,
        max_response_tokens=max_response_tokens,
        compute_loss=compute_loss,
        limit=limit,
        further=ptx,
    )


def update_critic(
    engine: TrainEngine,
    batch: TrainBatch,
    config: UpdateConfig,
    world: World,
    *,
    seed: int,
    max_response_tokens: int,
    limit: TokenLimit | None = None,
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
        engine,
        batch,
        config,
        world,
        seed=seed,
        max_response_tokens=max_response_tokens,
        compute_loss=compute_loss,
        limit=limit,
    )


def _update(
    engine: TrainEngine,
    batch: TrainBatch,
    config: UpdateConfig,
    world: World,
    *,
    seed: int,
    max_response_tokens: int,
    compute_loss: MicroBatchLoss,
    limit: TokenLimit | None,
    further: FurtherPart | None = None,
) -> dict[str, float]:
    """Take one optimizer step per mini-batch, in every epoch; return metrics averaged over the optimizer steps."""
    limit = limit or TokenLimit(config.micro_batch_tokens, work="an update")
    totals, num_steps = Totals(world), 0
    for epoch in range(config.num_epochs):
        local, mini_batches = balance_mini_batches(batch, config.mini_batch_size, seed=seed + epoch, world=world)
        for rows in mini_batches:
            weights = mini_batch_weights(local, rows, config, world, max_response_tokens)
            mini_batch = _MiniBatch(batch=local, rows=rows, weights=weights, compute_loss=compute_loss, world=world)
            parts: list[LossPart] = [further(), mini_batch] if further else [mini_batch]
            for sums in accumulate(engine, parts, limit, world):
                totals.add(sums)
            totals.add_common("lr", engine.lr)
            totals.add_common("grad_norm", take_step(engine, limit))
            num_steps += 1
    return totals.means(num_steps)


@dataclass(frozen=True, kw_only=True)
class _MiniBatch:
    """This rank's sequences of one optimizer step; see LossPart."""

    batch: TrainBatch
    """All sequences of this rank in the epoch."""
    rows: list[int]
    weights: Tensor
    """[B, T] float32; see `mini_batch_weights`."""
    compute_loss: MicroBatchLoss
    world: World

    @property
    def lengths(self) -> list[int]:
        return self.batch.sequence_lengths

    def micro_batch(self, engine: TrainEngine, rows: list[int]) -> tuple[Tensor, Sums]:
        packed = pack(self.batch, rows, self.world.device)
        return self.compute_loss(self.batch, packed, packed.gather(self.weights))

    def describe(self, rows: list[int]) -> str:
        return f"the sequences {self.batch.sequence_ids[rows].tolist()}"
