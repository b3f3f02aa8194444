"""Builds the models that are not trained: the reference, and the reward model among the sources of scores."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from hybrid_rl.batch import Rollout, make_train_batch
from hybrid_rl.engines import TrainEngine
from hybrid_rl.engines.deepspeed.sharding import frozen_sharder
from hybrid_rl.memory.micro_batches import make_limits
from hybrid_rl.memory.tenants import FrozenModule, PooledModule, Resident
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.packed import PackedModel, ValueModel
from hybrid_rl.models.sequence_parallel import apply_together
from hybrid_rl.planning.workload import forward_tokens
from hybrid_rl.rewards.reencode import reencode
from hybrid_rl.rewards.scoring import RewardSources
from hybrid_rl.rewards.spans import token_ends
from hybrid_rl.steps.ema import MovingReference
from hybrid_rl.steps.logprobs import ActorForward, Packing, sequence_values

if TYPE_CHECKING:
    from hybrid_rl.build import Setup


def admit_frozen(setup: "Setup", name: str, module: PackedModel) -> FrozenModule | PooledModule | None:
    """Freeze a model and register it as a tenant; return the tenant if phases release it."""
    module.requires_grad_(False)
    tenant = setup.tenants.frozen(name, module)
    setup.memory.admit(name, tenant or Resident())
    return tenant


def build_reference(setup: "Setup", actor: TrainEngine) -> ActorForward | None:
    """Return the forward of the reference: the actor's without its adapters, or a frozen model's; None without KL."""
    config, models, field = setup.config, setup.config.models, "models.reference"
    if not config.has_reference:
        return None
    if config.reference_is_actor:
        return actor.reference_forward
    path = models.reference or models.actor
    sharder = frozen_sharder(config, setup.world, is_sharded=setup.shards_frozen)
    with setup.start.stage(field):
        policy = load_actor(path, models, setup.world.device, field=field, sharder=sharder)
        module = setup.parallelize(policy, path, field=field)
    tenant = admit_frozen(setup, "reference", module)
    if not models.reference_sync_steps:
        return module
    reference = MovingReference(module, actor, tenant, setup.world)
    setup.load(reference, "reference")
    return reference


def build_reward_sources(setup: "Setup") -> RewardSources:
    """Return the reward functions, services and reward model of the settings."""
    model = RewardModelScorer(setup) if setup.config.models.reward else None
    ends = functools.partial(token_ends, setup.data.tokenizer)
    for name, signature in (setup.data.scorer.signatures if setup.data.scorer else {}).items():
        setup.recorder.say(f"reward function {name} is called as {signature}")
    return RewardSources(functions=setup.data.scorer, remote=setup.data.remote, model=model, token_ends=ends)


class RewardModelScorer:
    """The frozen reward model as a source of scores."""

    def __init__(self, setup: "Setup") -> None:
        """Load the model and release it."""
        config, rank, path, field = setup.config, setup.world.rank, setup.config.models.reward, "models.reward"
        assert path is not None
        sharder = frozen_sharder(config, setup.world, is_sharded=setup.shards_frozen)
        with setup.start.stage(field):
            model = load_value_model(path, config.models, setup.world.device, field=field, sharder=sharder)
        self._model: ValueModel = setup.parallelize(model, path, field=field)
        admit_frozen(setup, "reward_model", self._model)
        self._ranks = setup.sequence_parallel
        limit = make_limits(config, forward_tokens(config.update, is_varlen=self._model.uses_varlen), rank=rank).forward
        do_others_wait = self._ranks is not None or setup.shards_frozen
        self._packing = Packing(limit=limit, world=setup.data_parallel, do_others_wait=do_others_wait)
        self._throughput, self._flops = setup.throughput, setup.flops
        self._tokenizer, self._actor_tokenizer = setup.data.reward_tokenizer, setup.data.tokenizer

    def __call__(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Return the score of each response, [B] float32; ranks that are sequence parallel call it together."""
        if self._tokenizer is not None:
            rollouts = reencode(rollouts, self._tokenizer, actor_tokenizer=self._actor_tokenizer)
        return apply_together(self._ranks, rollouts, self._score, Rollout)

    def _score(self, rollouts: Sequence[Rollout]) -> Tensor:
        batch, copies = make_train_batch(rollouts), self._ranks.size if self._ranks else 1
        with self._throughput.work("score") as work:
            scores = sequence_values(self._model, batch, self._packing)
            lengths = batch.sequence_lengths
            work.add(sum(lengths), self._flops.forward("reward", lengths, len(batch)), copies=copies)
        return scores
