"""Builds what a run is made of, in the order that keeps the GPU's peak low: the engine first, then each model."""

import functools
import gc
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hybrid_rl.algorithms.advantage import KlController
from hybrid_rl.batch import Rollout, make_train_batch
from hybrid_rl.checkpoints import saver as checkpoint
from hybrid_rl.checkpoints.resume import find_checkpoint, make_saver, open_phase_log
from hybrid_rl.config import Config, check
from hybrid_rl.data.loading import Data, load_data
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import RolloutEngine
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.deepspeed.ulysses import enable_sequence_parallel
from hybrid_rl.engines.group import GroupEngine, check_groups
from hybrid_rl.engines.start import start_engine
from hybrid_rl.engines.tenants import EngineTenant, Tenants
from hybrid_rl.memory.device import grow_segments
from hybrid_rl.memory.phases import MemoryManager
from hybrid_rl.memory.residency import Phase
from hybrid_rl.memory.tenants import FrozenModule, PooledModule, Resident
from hybrid_rl.models.loading import choose_dtype, empty_model, load_actor, load_value_model
from hybrid_rl.models.packed import PackedModel
from hybrid_rl.models.sequence_parallel import apply_together
from hybrid_rl.monitoring.recorder import Recorder
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.planning.advice import plan_run
from hybrid_rl.planning.footprint import forward_tokens
from hybrid_rl.planning.plan import Allocation
from hybrid_rl.rewards import RemoteScorer, RunningNormalizer
from hybrid_rl.rewards.reencode import reencode
from hybrid_rl.rewards.scoring import RewardSources
from hybrid_rl.run import Run
from hybrid_rl.steps.ema import MovingAverage, MovingReference
from hybrid_rl.steps.logprobs import Forward, Packing, sequence_values
from hybrid_rl.steps.ptx import PtxLoss
from hybrid_rl.steps.update import num_optimizer_steps
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.bucket import AliasedWeights
from hybrid_rl.weights.layout import why_not_alias
from hybrid_rl.weights.sync import AliasSync, CopySync, WeightSync

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=PackedModel)


class Builder:
    """Builds models one after the other and hands each to the memory manager, which sends it off the GPU."""

    def __init__(
        self,
        config: Config,
        world: World,
        data: Data,
        memory: MemoryManager,
        timeline: Timeline,
        resume_from: Path | None,
    ) -> None:
        self._config = config
        self._world = world
        self._data = data
        self._memory = memory
        self._timeline = timeline
        self._resume_from = resume_from
        size = config.update.sequence_parallel_size
        self._sharers = world.model_parallel_group(size, on_device=True) if size > 1 else None
        self._tenants = Tenants(config, world.device, stays=memory.stays)
        self._step_sizes = [
            prompts * config.rollout.group_size for prompts in data.loader.batch_sizes(config.run.num_steps)
        ]

    def reserve_host(self, rows: Sequence[Allocation]) -> None:
        """Begin to pin host memory for the rows of a plan that come back over the bus."""
        self._tenants.reserve_host(sum(row.host_bytes for row in rows if row.in_bytes))

    def policy(self) -> tuple[RolloutEngine, DeepSpeedEngine, WeightSync]:
        """Return the rollout engine, asleep, the trained actor, and the way of its weights into the engine.

        The engine starts on an empty GPU; only weights that it shares are there before it.
        """
        config, paths, world, timeline = self._config, self._config.models, self._world, self._timeline
        steps = config.update.critic_warmup_steps
        load = functools.partial(load_actor, paths.actor, paths, world.device, field="models.actor", lora=paths.lora)
        grow_segments(world.device, is_on=False)  # for an earlier run of this process turned it on
        if self._aliases_weights():
            module = self._shared("models.actor", paths.actor, load())
            alias_buffer = AliasBuffer(module.model, world)
            engine = self._engine(alias_buffer.export())
            actor = self.trained("actor", module, skipped_steps=steps, alias_buffer=alias_buffer)
            return (
                engine,
                actor,
                AliasSync(actor, engine, config.sync, world.device, timeline, alias_buffer=alias_buffer),
            )
        engine = self._engine(None)
        actor = self.trained("actor", self._shared("models.actor", paths.actor, load()), skipped_steps=steps)
        return engine, actor, CopySync(actor, engine, config.sync, world.device, timeline)

    def _aliases_weights(self) -> bool:
        """Return whether the engine shall compute with the trainer's weights where they lie.

        Raises:
            ConfigError: sync.mode = alias, and a rule forbids it.
        """
        config, world = self._config, self._world
        if config.sync.mode == "copy":
            return False
        model, _ = empty_model(config.models.actor, field="models.actor", is_policy=True)
        dtype = choose_dtype(config.models.dtype, world.device)
        tensors = [(name, tuple(p.shape), dtype) for name, p in model.named_parameters()]
        obstacle = why_not_alias(config, architecture=type(model).__name__, tensors=tensors)
        check(obstacle is None or config.sync.mode == "auto", f"sync.mode = alias: {obstacle}")
        if obstacle and world.is_main:
            logger.warning("the engine gets copies of the trainer's weights: %s", obstacle)
        return obstacle is None

    def _shared(self, field: str, path: str, module: M) -> M:
        return enable_sequence_parallel(module, self._sharers, path, field=field)

    def _engine(self, aliased: AliasedWeights | None) -> RolloutEngine:
        config, world, size = self._config, self._world, self._config.rollout.tensor_parallel_size
        dtype = choose_dtype(config.models.dtype, world.device)
        start = functools.partial(
            start_engine, config, dtype=dtype, device=world.device, rank=world.rank, aliased=aliased
        )
        engine = start() if size == 1 else GroupEngine(world.model_parallel_group(size), lambda gpus: start(gpus=gpus))
        stays = config.memory.swap == "off"
        weights = Resident() if stays or aliased else EngineTenant(engine, "weights", filled_in=Phase.SYNC)
        self._memory.admit("engine_weights", weights)
        self._memory.admit("engine_kv_cache", Resident() if stays else EngineTenant(engine, "kv_cache", filled_in=None))
        return engine

    def trained(
        self, name: str, module: PackedModel, *, skipped_steps: int = 0, alias_buffer: AliasBuffer | None = None
    ) -> DeepSpeedEngine:
        """Return the training engine of `actor` or `critic`, as the checkpoint left it if there is one."""
        trainer = DeepSpeedEngine(
            module,
            getattr(self._config.update, name),
            zero_stage=self._config.update.zero_stage,
            total_steps=num_optimizer_steps(self._step_sizes[skipped_steps:], self._config.update),
            world=self._world,
            alias_buffer=alias_buffer,
            tensor_parallel_size=self._config.update.tensor_parallel_size,
            is_offloaded=self._tenants.is_offloaded(name),
        )
        if self._resume_from:
            trainer.load(self._resume_from / name)
        self._memory.admit(f"{name}_optimizer", self._tenants.optimizer(name, trainer))
        return trainer

    def critic(self) -> DeepSpeedEngine | None:
        """Return the critic's training engine, if the run has one."""
        config, paths = self._config, self._config.models
        if not config.has_critic:
            return None
        path = paths.critic or paths.reward or paths.actor
        device = self._world.device
        module = load_value_model(path, paths, device, field="models.critic", new_head=True, lora=paths.lora)
        critic = self.trained("critic", self._shared("models.critic", path, module))
        self.park("critic", critic)
        return critic

    def park(self, name: str, trainer: DeepSpeedEngine, *, is_aliased: bool = False) -> None:
        """Send the weights of `actor` or `critic` off the GPU; nothing reads them until a phase calls them in."""
        self._memory.admit(f"{name}_parameters", self._tenants.parameters(name, trainer, is_aliased=is_aliased))

    def frozen(self, name: str, module: PackedModel) -> FrozenModule | PooledModule | None:
        """Take the gradients from a module and hand it to the memory manager; return its tenant if it moves."""
        module.requires_grad_(False)
        tenant = self._tenants.frozen(name, module)
        self._memory.admit(name, tenant or Resident())
        return tenant

    def reference(self, actor: DeepSpeedEngine) -> Forward | None:
        """Return what gives the reference's log-probs: the actor without its adapter, or a model of its own."""
        config, paths = self._config, self._config.models
        if not config.has_reference:
            return None
        if config.reference_is_actor:
            return actor.reference_forward
        path, field = paths.reference or paths.actor, "models.reference"
        module = self._shared(field, path, load_actor(path, paths, self._world.device, field=field))
        tenant = self.frozen("reference", module)
        if not paths.reference_every_steps:
            return module
        moving = MovingReference(module, actor, tenant, self._world)
        self._load(moving, "reference")
        return moving

    def ema(self, actor: DeepSpeedEngine) -> MovingAverage | None:
        """Return the moving average of the actor, if the run keeps one."""
        if self._config.models.ema_decay is None:
            return None
        ema = MovingAverage(actor, self._config.models.ema_decay, self._world)
        self._load(ema, "ema")
        return ema

    def ptx(self, data_parallel: World) -> PtxLoss | None:
        """Return the language-model loss beside the actor's, if the run has one."""
        config, texts, limit = self._config, self._data.ptx_texts, self._config.update.micro_batch_tokens
        if not texts:
            return None
        return PtxLoss(texts, config.ptx, data_parallel, seed=config.run.seed, micro_batch_tokens=limit)

    def _load(self, part: checkpoint.Saved, name: str) -> None:
        if self._resume_from:
            part.load(self._resume_from / name)

    def sources(self, data_parallel: World) -> RewardSources:
        """Return all that judges responses."""
        config, data, world = self._config, self._data, self._world
        reward, model = config.reward, None
        if config.models.reward:
            path, field, sharers = config.models.reward, "models.reward", self._sharers
            module = self._shared(field, path, load_value_model(path, config.models, world.device, field=field))
            self.frozen("reward_model", module)
            max_tokens = forward_tokens(config.update, is_free=module.packs_freely)
            packing = Packing(max_tokens=max_tokens, world=data_parallel)

            def model(rollouts: Sequence[Rollout]) -> Tensor:
                if data.reward_tokenizer is not None:
                    rollouts = reencode(rollouts, data.reward_tokenizer, actor_tokenizer=data.tokenizer)
                return apply_together(
                    sharers, rollouts, lambda everyone: sequence_values(module, make_train_batch(everyone), packing)
                )

        remote = None
        if reward.remote_urls:
            remote = RemoteScorer(reward.remote_urls, timeout_s=reward.remote_timeout_s, retries=reward.remote_retries)
        return RewardSources(functions=data.scorer, remote=remote, model=model)


def build(config: Config, residency: Mapping[str, frozenset[Phase]]) -> Run:
    """Return a run that stands right before its next step, everything released.

    Raises:
        ConfigError: a setting or an input file cannot work, or the models do not fit; before any model loads.
    """
    world = join_world()
    check_groups(config, world)
    data_parallel = world.data_parallel_group(config.update.sequence_parallel_size * config.update.tensor_parallel_size)
    plan = plan_run(config, world, residency)
    config = plan.sized(config)
    torch.manual_seed(config.run.seed)
    resume_from = find_checkpoint(config)
    data = load_data(config, world)
    state: dict[str, Any] = checkpoint.read_state(resume_from) if resume_from else {"step": 0}
    if resume_from:
        data.loader.load_state_dict(state["loader"])  # refuses other data, before a model loads
    recorder = Recorder(config, world, data_parallel)
    memory = MemoryManager(
        plan.residency, world.device, recorder.timeline, planned=plan.peaks, keeps_cache=plan.has_room_for_cache
    )
    builder = Builder(config, world, data, memory, recorder.timeline, resume_from)
    builder.reserve_host(plan.allocations)

    engine, actor, weight_sync = builder.policy()
    ema = builder.ema(actor)  # begins with the actor's weights
    builder.park("actor", actor, is_aliased=isinstance(weight_sync, AliasSync))
    critic = builder.critic()
    advantage = config.advantage
    run = Run(
        config=config,
        world=world,
        data_parallel=data_parallel,
        data=data,
        recorder=recorder,
        memory=memory,
        engine=engine,
        actor=actor,
        critic=critic,
        reference=builder.reference(actor),
        sources=builder.sources(data_parallel),
        normalizer=RunningNormalizer() if config.reward.normalize else None,
        kl=KlController(advantage.kl_coef, target=advantage.kl_target, horizon=advantage.kl_horizon),
        ema=ema,
        ptx=builder.ptx(data_parallel),
        weight_sync=weight_sync,
        saver=make_saver(config, world, sum(engine.checkpoint_bytes for engine in (actor, critic) if engine)),
        phase_log=open_phase_log(config, world, state["step"]),
        steps_done=state["step"],
    )
    if resume_from:
        checkpoint.load_rng(resume_from, world)
        for name, counter in run.counters.items():
            counter.load_state_dict(state[name])
    recorder.open(run.steps_done + 1)
    grow_segments(world.device, is_on=True)
    # DeepSpeed collects garbage in every offload; without this it walks all that vLLM and torch imported each time.
    gc.collect()
    gc.freeze()
    return run
