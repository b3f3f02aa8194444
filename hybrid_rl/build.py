"""Builds what a run is made of, in the order that keeps the GPU's peak low: the engine first, then each model."""

import functools
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rl import checkpoint
from hybrid_rl.batch import Prompt
from hybrid_rl.config import Config, check
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import EngineTenant, RolloutEngine
from hybrid_rl.engines.deepspeed import StatesTenant, TrainEngine
from hybrid_rl.engines.start import start_engine
from hybrid_rl.memory import FrozenModule, MemoryManager, Phase, Resident
from hybrid_rl.models import (
    PackedModel,
    check_models,
    choose_dtype,
    eos_token_ids,
    load_actor,
    load_tokenizer,
    load_value_model,
)
from hybrid_rl.prompts import PromptLoader, load_prompts
from hybrid_rl.record import Recorder
from hybrid_rl.rewards import ScorerPool
from hybrid_rl.sync import CopySync, WeightSync
from hybrid_rl.update import num_optimizer_steps


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts and scorers: all that is read before a model loads."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: list[int]
    loader: PromptLoader
    eval_prompts: list[Prompt]
    """This rank's share."""
    scorer: ScorerPool | None
    eval_scorer: ScorerPool | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a run is made of, on this rank."""

    config: Config
    world: World
    data: Data
    recorder: Recorder
    memory: MemoryManager
    engine: RolloutEngine
    actor: TrainEngine
    critic: TrainEngine | None
    reference: PackedModel | None
    reward_model: PackedModel | None
    sync: WeightSync
    steps_done: int
    """Steps that a checkpoint brought; 0 for a new run."""

    def close(self) -> None:
        """End the processes that belong to the run."""
        gc.unfreeze()
        self.engine.close()
        for scorer in (self.data.scorer, self.data.eval_scorer):
            if scorer:
                scorer.close()


def load_data(config: Config, world: World) -> Data:
    """Read tokenizer, prompts and scorers, and check them against the models' folders.

    Raises:
        ConfigError: one sentence that names field, value and rule.
    """
    check_models(config)
    tokenizer = load_tokenizer(config.models.actor)
    prompts = load_prompts(config.prompts.path, tokenizer, config.prompts, seed=config.run.seed)
    eval_prompts: list[Prompt] = []
    if config.prompts.eval_path and config.run.eval_every_steps:
        # A generated task draws its held-out rows from another seed.
        rows, seed = config.prompts.num_eval, config.run.seed + 1_000_003
        eval_prompts = load_prompts(config.prompts.eval_path, tokenizer, config.prompts, seed=seed, num_rows=rows)
    reward = config.reward
    make_scorer = functools.partial(ScorerPool, timeout_s=reward.timeout_s, num_workers=reward.num_workers)
    return Data(
        tokenizer=tokenizer,
        stop_token_ids=sorted({*eos_token_ids(config.models.actor, tokenizer), *config.rollout.stop_token_ids}),
        loader=PromptLoader(
            prompts,
            batch_size=config.rollout.rollout_batch_size,
            seed=config.run.seed,
            shuffle=config.prompts.shuffle,
            rank=world.rank,
            world_size=world.size,
        ),
        eval_prompts=eval_prompts[world.rank :: world.size],
        scorer=make_scorer(reward.functions, reward.weights, on_error=reward.on_error) if reward.functions else None,
        eval_scorer=make_scorer([config.run.eval_function], on_error="zero") if eval_prompts else None,
    )


def find_checkpoint(config: Config, world: World) -> Path | None:
    """Return the checkpoint to continue from, as `run.resume` says.

    Raises:
        ConfigError: run.resume is must and there is none; the checkpoint was written by another number of ranks.
    """
    folder = None if config.run.resume == "never" else checkpoint.latest(config.run_dir)
    check(folder is not None or config.run.resume != "must", f"run.resume = must: {config.run_dir} has no checkpoint")
    if folder:
        num_ranks = checkpoint.read_state(folder)["world_size"]
        check(num_ranks == world.size, f"{folder} was written by {num_ranks} ranks, this run has {world.size}")
    return folder


class Builder:
    """Builds models one after the other and hands each to the memory manager, which sends it off the GPU."""

    def __init__(
        self, config: Config, world: World, data: Data, memory: MemoryManager, resume_from: Path | None
    ) -> None:
        self._config = config
        self._world = world
        self._memory = memory
        self._resume_from = resume_from
        self._is_swapping = config.memory.swap == "deepspeed" and world.device.type == "cuda"
        self._step_sizes = [
            prompts * config.rollout.group_size for prompts in data.loader.batch_sizes(config.run.num_steps)
        ]

    def engine(self) -> RolloutEngine:
        """Return the rollout engine, asleep."""
        config, world = self._config, self._world
        dtype = choose_dtype(config.models.dtype, world.device)
        engine = start_engine(config, dtype=dtype, device=world.device, rank=world.rank)
        stays = config.memory.swap == "off"
        weights = Resident() if stays else EngineTenant(engine, "weights", filled_in=Phase.SYNC)
        self._memory.admit("engine_weights", weights)
        self._memory.admit("engine_kv_cache", Resident() if stays else EngineTenant(engine, "kv_cache", filled_in=None))
        return engine

    def trained(self, name: str, module: PackedModel, *, skipped_steps: int = 0) -> TrainEngine:
        """Return the training engine of `actor` or `critic`, as the checkpoint left it if there is one."""
        trainer = TrainEngine(
            module,
            getattr(self._config.update, name),
            zero_stage=self._config.update.zero_stage,
            total_steps=num_optimizer_steps(self._step_sizes[skipped_steps:], self._config.update),
            world=self._world,
        )
        if self._resume_from:
            trainer.load(self._resume_from / name)
        self._memory.admit(f"{name}_states", StatesTenant(trainer) if self._is_swapping else Resident())
        return trainer

    def frozen(self, name: str, module: PackedModel) -> PackedModel:
        """Return the module without gradients."""
        module.requires_grad_(False)
        self._memory.admit(name, FrozenModule(module) if self._is_swapping else Resident())
        return module


def build(config: Config, residency: Mapping[str, frozenset[Phase]]) -> Run:
    """Return a run that stands right before its next step, everything released.

    Raises:
        ConfigError: a setting or an input file cannot work; before any model loads.
    """
    world = join_world()
    torch.manual_seed(config.run.seed)
    resume_from = find_checkpoint(config, world)
    data = load_data(config, world)
    recorder = Recorder(config, world)
    memory = MemoryManager(residency, world.device, recorder.timeline)
    builder = Builder(config, world, data, memory, resume_from)
    paths, device = config.models, world.device

    engine = builder.engine()
    actor_module = load_actor(paths.actor, paths, device, field="models.actor")
    actor = builder.trained("actor", actor_module, skipped_steps=config.update.critic_warmup_steps)
    critic = reference = reward_model = None
    if config.has_critic:
        path = paths.critic or paths.reward or paths.actor
        critic = builder.trained("critic", load_value_model(path, paths, device, field="models.critic", new_head=True))
    if config.has_reference:
        path = paths.reference or paths.actor
        reference = builder.frozen("reference", load_actor(path, paths, device, field="models.reference"))
    if paths.reward:
        reward_model = builder.frozen(
            "reward_model", load_value_model(paths.reward, paths, device, field="models.reward")
        )

    steps_done = 0
    if resume_from:
        state = checkpoint.read_state(resume_from)
        checkpoint.load_rng(resume_from, world)
        steps_done = state["step"]
        data.loader.load_state_dict(state["loader"])
    recorder.open(steps_done + 1)
    # DeepSpeed collects garbage in every offload; without this it walks all that vLLM and torch imported each time.
    gc.collect()
    gc.freeze()
    return Run(
        config=config,
        world=world,
        data=data,
        recorder=recorder,
        memory=memory,
        engine=engine,
        actor=actor,
        critic=critic,
        reference=reference,
        reward_model=reward_model,
        sync=CopySync(actor, engine, config.sync, device, recorder.timeline),
        steps_done=steps_done,
    )
