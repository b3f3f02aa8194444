"""Builds the models that are trained, and the rollout engine with its weight sync."""

import functools
from typing import TYPE_CHECKING

from hybrid_rl.engines import RolloutEngine, TrainEngine
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.deepspeed.sharding import trained_sharder
from hybrid_rl.engines.restarts import RestartableEngine
from hybrid_rl.engines.start import start_engine
from hybrid_rl.engines.tenants import EngineTenant
from hybrid_rl.memory.device import grow_segments
from hybrid_rl.memory.residency import Phase
from hybrid_rl.memory.tenants import Resident
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.lora import base_parameters, frozen_parameters
from hybrid_rl.models.packed import PackedModel
from hybrid_rl.steps.updates import num_optimizer_steps
from hybrid_rl.weights.adapter_sync import AdapterSync
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.sync import AliasSync, CopySync, WeightSync

if TYPE_CHECKING:
    from hybrid_rl.build import Setup


# Actor and rollout engine


def build_policy(setup: "Setup") -> tuple[RolloutEngine, TrainEngine, WeightSync]:
    """Return the rollout engine, asleep, the actor's training engine, and the weight sync between them.

    The rollout engine starts on an empty GPU; only with sync.mode = alias the actor's weights are there before it.
    """
    config, world, timeline = setup.config, setup.world, setup.recorder.timeline
    grow_segments(world.device, is_on=False)  # an earlier run of this process may have turned it on
    alias_buffer = None
    if setup.aliases_weights:
        module = load_policy(setup)
        alias_buffer = AliasBuffer(base_parameters(module.model), world)
        engine = build_rollout_engine(setup, alias_buffer)
    else:
        engine = build_rollout_engine(setup, None)
        module = load_policy(setup)
    skipped_steps = config.update.critic_warmup_steps
    actor = build_train_engine(setup, "actor", module, skipped_steps=skipped_steps, alias_buffer=alias_buffer)
    if setup.engine_adapters:
        return engine, actor, make_adapter_sync(setup, actor, engine, alias_buffer)
    if alias_buffer is None:
        return engine, actor, CopySync(actor, engine, config.sync, world.device, timeline)
    sync = AliasSync(actor, engine, config.sync, world.device, timeline, alias_buffer=alias_buffer)
    return engine, actor, sync


def make_adapter_sync(
    setup: "Setup", actor: TrainEngine, engine: RolloutEngine, alias_buffer: AliasBuffer | None
) -> AdapterSync:
    """Return the weight sync that sends the actor's adapters, and its base where no buffer holds it for both."""
    config, device = setup.config, setup.world.device
    is_kept = device.type == "cpu" or config.memory.swap == "off" or "engine_weights" in setup.memory.always_resident
    return AdapterSync(
        actor.base,
        actor.adapters,
        engine,
        config.sync,
        device,
        setup.recorder.timeline,
        alias_buffer=alias_buffer,
        keeps_base=is_kept,
    )


def load_policy(setup: "Setup") -> PackedModel:
    """Return the actor's model, with adapters where models.lora asks for them."""
    models, field = setup.config.models, "models.actor"
    sharder = trained_sharder(setup.config, setup.world, "actor")
    with setup.start.stage(field):
        actor = load_actor(models.actor, models, setup.world.device, field=field, lora=models.lora, sharder=sharder)
    return setup.parallelize(actor, models.actor, field=field)


def build_rollout_engine(setup: "Setup", alias_buffer: AliasBuffer | None) -> RolloutEngine:
    """Return the rollout engine; its weights are aliases of the trainer's, or wait for the first weight sync."""
    config, world, size = setup.config, setup.world, setup.config.rollout.tensor_parallel_size
    ranks = world.model_parallel_group(size) if size > 1 else None
    report = functools.partial(setup.start.report, "rollout engine")
    start = functools.partial(
        start_engine,
        config,
        world=world,
        ranks=ranks,
        alias_buffer=alias_buffer,
        adapters=setup.engine_adapters,
        report=report,
    )
    with setup.start.stage("rollout engine"):
        engine = RestartableEngine(start, world) if config.rollout.restarts else start()
    setup.opened.append(engine.close)
    stays = config.memory.swap == "off"
    has_weights = alias_buffer is None or setup.engine_adapters is not None
    weights = EngineTenant(engine, "weights", filled_in=Phase.SYNC) if has_weights and not stays else Resident()
    setup.memory.admit("engine_weights", weights)
    setup.memory.admit("engine_kv_cache", Resident() if stays else EngineTenant(engine, "kv_cache", filled_in=None))
    return engine


# Training engines


def build_train_engine(
    setup: "Setup", name: str, module: PackedModel, *, skipped_steps: int = 0, alias_buffer: AliasBuffer | None = None
) -> TrainEngine:
    """Return the training engine of `actor` or `critic`, in the state of the checkpoint if there is one.

    Args:
        skipped_steps: steps at the start in which the model takes no optimizer step.
        alias_buffer: the buffer that holds the parameters, if the rollout engine aliases them.
    """
    config, loader = setup.config, setup.data.loader
    sizes = [prompts * config.rollout.group_size for prompts in loader.batch_sizes(config.run.num_steps)]
    make = functools.partial(
        DeepSpeedEngine,
        module,
        getattr(config.update, name),
        zero_stage=config.update.zero_stage,
        total_steps=num_optimizer_steps(sizes[skipped_steps:], config.update),
        world=setup.world,
        alias_buffer=alias_buffer,
        tensor_parallel_size=config.update.tensor_parallel_size,
        is_offloaded=setup.tenants.is_offloaded(name),
        further=config.update.deepspeed,
    )
    with setup.start.stage(f"optimizer of the {name}"):
        engine = make()
        setup.load(engine, name)
        setup.memory.admit(f"{name}_optimizer", setup.tenants.optimizer(name, engine))
    return engine


def admit_parameters(setup: "Setup", name: str, engine: TrainEngine, *, is_aliased: bool = False) -> None:
    """Register the parameters of `actor` or `critic` as a tenant, which releases them until a phase needs them."""
    with setup.start.stage(f"parameters of the {name}"):
        setup.memory.admit(f"{name}_parameters", setup.tenants.parameters(name, engine, is_aliased=is_aliased))


def build_critic(setup: "Setup", shared: AliasBuffer | None) -> TrainEngine | None:
    """Return the critic's training engine, released; None for an estimator without a critic.

    Args:
        shared: holds the actor's base, which becomes the critic's; None for a base of its own.
    """
    models, field = setup.config.models, "models.critic"
    if not setup.config.has_critic:
        return None
    path = models.critic or models.reward or models.actor
    load = functools.partial(load_value_model, path, models, setup.world.device, field=field, new_head=True)
    with setup.start.stage(field):
        module = load(lora=models.lora, sharder=trained_sharder(setup.config, setup.world, "critic"))
        if shared:
            base = frozen_parameters(module.model)
            setup.recorder.say(f"critic: {shared.share(base)} of its {len(base)} frozen tensors are the actor's")
    critic = build_train_engine(setup, "critic", setup.parallelize(module, path, field=field))
    admit_parameters(setup, "critic", critic, is_aliased=shared is not None)
    return critic
