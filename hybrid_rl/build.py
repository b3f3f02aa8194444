"""Builds a run in the order that keeps the GPU's peak low: the rollout engine first, then one model after the other."""

import functools
import gc
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hybrid_rl.algorithms.kl import KlController
from hybrid_rl.checkpoints import saver as checkpoint
from hybrid_rl.checkpoints.random_state import seed_generators
from hybrid_rl.checkpoints.resume import make_saver, open_phase_log
from hybrid_rl.checkpoints.run_folder import RunFolder
from hybrid_rl.checkpoints.saver import Saver
from hybrid_rl.config import Config, LoraConfig
from hybrid_rl.conversations.setup import Environments
from hybrid_rl.data.loading import Data
from hybrid_rl.data.sets import make_text_mixture
from hybrid_rl.distributed import World, begin_to_end, join_world
from hybrid_rl.engines import TrainEngine
from hybrid_rl.engines.deepspeed.ulysses import enable_sequence_parallel
from hybrid_rl.engines.tenants import Tenants
from hybrid_rl.errors import close_each
from hybrid_rl.first_lines import first_lines
from hybrid_rl.frozen_models import build_reference, build_reward_sources
from hybrid_rl.memory.device import grow_segments
from hybrid_rl.memory.enforcement import Enforcement
from hybrid_rl.memory.micro_batches import make_limits
from hybrid_rl.memory.phases import MemoryManager
from hybrid_rl.models.determinism import use_deterministic_kernels
from hybrid_rl.models.packed import PackedModel
from hybrid_rl.monitoring.preemption import Preemption
from hybrid_rl.monitoring.recorder import Recorder, environment
from hybrid_rl.monitoring.start import Start
from hybrid_rl.monitoring.throughput import Throughput
from hybrid_rl.planning.flops import Flops
from hybrid_rl.planning.startup import peak_flops
from hybrid_rl.planning.workload import forward_tokens
from hybrid_rl.preflight import Prepared, prepare_run, run_site
from hybrid_rl.rewards import RunningNormalizer
from hybrid_rl.run import Run
from hybrid_rl.steps.ema import EmaWeights
from hybrid_rl.steps.ptx import PtxLoss
from hybrid_rl.trained_models import admit_parameters, build_critic, build_policy
from hybrid_rl.weights.adapter_sync import AdapterSync

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=PackedModel)


def build(config: Config, start: Start | None = None) -> Run:
    """Return a run that is ready for its next step; every tenant is released.

    Args:
        config: settings of the run.
        start: stages of the start so far; None for a start that begins here.

    Raises:
        ConfigError: a setting or an input file cannot work, or the models do not fit; before any model loads.
    """
    with start or Start() as start:
        with start.stage("ranks"):
            world = join_world(stall_timeout_s=config.run.stall_timeout_s)
        if config.run.deterministic and world.device.type == "cuda":
            use_deterministic_kernels()
        with start.stage("checks"):
            prepared = prepare_run(config, run_site(world, start.stage))
        assert prepared.folder
        opened = [prepared.folder.close, prepared.close]
        try:
            return build_in(prepared.folder, prepared, world, opened, start)
        except BaseException as error:
            begin_to_end()
            close_each(*reversed(opened), error=error)
            raise


def build_in(
    folder: RunFolder, prepared: Prepared, world: World, opened: list[Callable[[], None]], start: Start
) -> Run:
    """Return a run that is ready for its next step, in a folder that is locked; see build.

    Args:
        opened: functions that close what is open; what the build opens is added.
        start: shows the stages.
    """
    config, plan, state = prepared.config, prepared.plan, prepared.state
    resume_from = folder.accept(prepared.start).checkpoint
    seed_generators(config.run.seed)
    data_parallel = world.data_parallel_group(config.update.sequence_parallel_size * config.update.tensor_parallel_size)
    recorder = Recorder(config, world, data_parallel)
    opened.append(lambda: recorder.close(sys.exception()))
    begin_record(recorder, prepared, world, start)
    memory = MemoryManager(
        plan.residency,
        world.device,
        recorder.timeline,
        planned=plan.peaks,
        keeps_cache=plan.can_keep_cache,
        enforcement=Enforcement(config.memory, rank=world.rank),
    )
    setup = Setup(
        config=config,
        world=world,
        data_parallel=data_parallel,
        data=prepared.data,
        environments=prepared.environments,
        recorder=recorder,
        memory=memory,
        tenants=make_tenants(prepared, world, start, always_resident=memory.always_resident),
        folder=folder,
        opened=opened,
        resume_from=resume_from,
        aliases_weights=prepared.aliases_weights,
        shards_frozen=plan.shards_frozen,
        shares_critic=prepared.sync.shares_critic,
        engine_adapters=prepared.engine_adapters,
        start=start,
        throughput=Throughput(world, peak_flops=peak_flops(config, world.device)),
        flops=count_flops(prepared),
    )
    run = build_models(setup, steps_done=state["step"])
    if resume_from:
        checkpoint.load_random_state(resume_from, world)
        for name, part in run.counters.items():
            part.load_state_dict(state[name])
    with start.stage("record of the run"):
        folder.write_record(step=run.steps_done, environment=environment(world))
    grow_segments(world.device, is_on=True)
    # DeepSpeed collects garbage in every offload; frozen, the objects of all imports are not visited each time.
    with start.stage("garbage collection"):
        gc.collect()
        gc.freeze()
    start.end()
    recorder.open(run.steps_done + 1, run_id=folder.run_id)
    return run


def begin_record(recorder: Recorder, prepared: Prepared, world: World, start: Start) -> None:
    """Start the record of a run with its first lines, the stages so far and the planned memory of the start."""
    recorder.start()
    start.record_in(recorder.timeline)
    if world.device.type == "cuda":
        planned = {moment.name: moment.gpu_bytes for moment in prepared.plan.loading}
        recorder.timeline.counter("device_memory_loading_plan", **planned)
    for line in (*first_lines(prepared, world), *prepared.data.lines):
        recorder.say(line)


def count_flops(prepared: Prepared) -> Flops:
    """Return what counts the operations of a run."""
    lora, rollout = prepared.config.models.lora, prepared.config.rollout
    return Flops(shapes=prepared.shapes, has_adapters=bool(lora.rank), shares_prompts=rollout.prefix_caching)


def make_tenants(prepared: Prepared, world: World, start: Start, *, always_resident: frozenset[str]) -> Tenants:
    """Return what makes the tenants of a run, with their host memory being pinned."""
    tenants = Tenants(prepared.config, world.device, always_resident=always_resident)
    if tenants.reserve_host(sum(a.host_bytes for a in prepared.plan.allocations if a.in_bytes)):
        start.follow("pinning of host memory", tenants.pinning_seconds)
    return tenants


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is known of a run before its models load."""

    config: Config
    world: World
    data_parallel: World
    """See Run.data_parallel."""
    data: Data
    environments: Environments | None
    recorder: Recorder
    memory: MemoryManager
    tenants: Tenants
    folder: RunFolder
    opened: list[Callable[[], None]]
    """Functions that close what is open where the build fails, in the order of opening."""
    resume_from: Path | None
    """Folder of the checkpoint to continue from."""
    aliases_weights: bool
    """Whether the rollout engine's parameters are views of the trainer's."""
    shards_frozen: bool
    """Whether reference and reward model are shards over the ranks."""
    shares_critic: bool
    """See SyncChoice."""
    engine_adapters: LoraConfig | None
    """See Prepared.engine_adapters."""
    start: Start
    throughput: Throughput
    flops: Flops

    @functools.cached_property
    def sequence_parallel(self) -> World | None:
        """The ranks that compute each micro-batch together; None where every rank computes its own."""
        size = self.config.update.sequence_parallel_size
        return self.world.model_parallel_group(size, on_device=True) if size > 1 else None

    def parallelize(self, module: M, path: str, *, field: str) -> M:
        """Return the module, which computes this rank's slice of the tokens where ranks are sequence parallel."""
        return enable_sequence_parallel(module, self.sequence_parallel, path, field=field)

    def load(self, part: checkpoint.CheckpointPart, name: str) -> None:
        """Read a part from the checkpoint, if the run continues from one."""
        if self.resume_from:
            part.load(self.resume_from / name)


def build_models(setup: Setup, *, steps_done: int) -> Run:
    """Load the models one after the other; each is released before the next one loads."""
    config, advantage = setup.config, setup.config.advantage
    engine, actor, weight_sync = build_policy(setup)
    ema = build_ema(setup, actor)  # copies the actor's weights, so before the actor is released
    admit_parameters(setup, "actor", actor, is_aliased=setup.aliases_weights)
    is_shared = setup.shares_critic
    shared = weight_sync.alias_buffer if is_shared and isinstance(weight_sync, AdapterSync) else None
    critic = build_critic(setup, shared)
    is_varlen = all(engine.module.uses_varlen for engine in (actor, critic) if engine)
    num_bytes = sum(engine.checkpoint_bytes for engine in (actor, critic) if engine)
    saver = make_saver(
        config,
        setup.world,
        num_bytes,
        actor_bytes=weight_bytes(actor),
        critic_bytes=weight_bytes(critic) if critic else 0,
        steps_done=steps_done,
    )
    return Run(
        config=config,
        folder=setup.folder,
        world=setup.world,
        data_parallel=setup.data_parallel,
        data=setup.data,
        environments=setup.environments,
        recorder=setup.recorder,
        memory=setup.memory,
        limits=make_limits(config, forward_tokens(config.update, is_varlen=is_varlen), rank=setup.world.rank),
        engine=engine,
        actor=actor,
        critic=critic,
        reference=build_reference(setup, actor),
        shards_frozen=setup.shards_frozen,
        sources=build_reward_sources(setup),
        normalizer=RunningNormalizer() if config.reward.normalize else None,
        kl=KlController(advantage.kl_coef, target=advantage.kl_target, horizon=advantage.kl_horizon),
        ema=ema,
        ptx=build_ptx(setup),
        weight_sync=weight_sync,
        throughput=setup.throughput,
        flops=setup.flops,
        saver=saver,
        preemption=make_preemption(setup, saver),
        phase_log=open_phase_log(config, setup.world, steps_done, run_id=setup.folder.run_id),
        steps_done=steps_done,
    )


def weight_bytes(engine: TrainEngine) -> int:
    """Return the size of a model's weights in bytes."""
    return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in engine.named_shapes())


def make_preemption(setup: Setup, saver: Saver) -> Preemption:
    """Return what ends the run with a checkpoint at SIGTERM."""
    return Preemption(setup.config.checkpoint, setup.world, setup.recorder.activity, save_seconds=saver.last_seconds)


def build_ema(setup: Setup, actor: TrainEngine) -> EmaWeights | None:
    """Return the exponential moving average of the actor; None without models.ema_decay."""
    decay = setup.config.models.ema_decay
    if decay is None:
        return None
    ema = EmaWeights(actor, decay, setup.world)
    setup.load(ema, "ema")
    return ema


def build_ptx(setup: Setup) -> PtxLoss | None:
    """Return the language-model loss that is mixed into the actor's; None without ptx.path."""
    config, sets = setup.config, setup.data.text_sets
    texts = [text for each in sets for text in each.texts]
    if not texts:
        return None
    return PtxLoss(
        [text.token_ids for text in texts],
        config.ptx,
        setup.data_parallel,
        seed=config.run.seed,
        undated_texts=[text.undated_token_ids or text.token_ids for text in texts],
        mixture=make_text_mixture(config, sets),
    )
