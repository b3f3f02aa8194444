"""Everything that can be known of a run before a model loads, with all findings at once.

`build` starts with it.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from hybrid_rl.checkpoints.find import read_state
from hybrid_rl.checkpoints.lock import check_unlocked
from hybrid_rl.checkpoints.run_folder import RunFolder, decide_together
from hybrid_rl.checkpoints.start import EXPORTED, Start
from hybrid_rl.config import Config, ConfigError, Findings, LoraConfig, check
from hybrid_rl.conversations.setup import Environments, start_environments
from hybrid_rl.data.loading import Data, load_data
from hybrid_rl.distributed import World
from hybrid_rl.engines.deepspeed.settings import check_deepspeed
from hybrid_rl.engines.start import check_engine
from hybrid_rl.machine.disk import check_space, check_temporary_folder, check_writable, folder_bytes
from hybrid_rl.machine.gpus import check_engine_memory, check_gpu, check_torch_build
from hybrid_rl.machine.host import (
    available_memory,
    check_buckets,
    check_memory,
    check_open_files,
    why_little_shared_memory,
)
from hybrid_rl.machine.hub import use_cache_if_unreachable
from hybrid_rl.machine.network import check_loopback
from hybrid_rl.machine.packages import check_compilers, check_kernels, check_packages
from hybrid_rl.memory.tenants import check_pool, uses_pool
from hybrid_rl.models.loading import choose_dtype
from hybrid_rl.monitoring.trackers.libraries import check_trackers
from hybrid_rl.planning.plan import Machine, Plan
from hybrid_rl.planning.run_bytes import disk_uses, host_uses
from hybrid_rl.planning.shapes import Shapes, read_shapes
from hybrid_rl.planning.startup import measure_machine, plan_run
from hybrid_rl.validate import CANNOT_OFFLOAD, can_offload, check_device, check_ranks, dtype_name, validate
from hybrid_rl.weights.choice import SyncChoice, choose_sync

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Site:
    """The place where a run starts, or for which it is checked."""

    world: World
    """The ranks that check together: all ranks of the run, or this process alone. Its device is of the run's kind."""
    ranks_on_nodes: list[int]
    """For each rank of the run, the number of ranks on its node."""
    machine: Machine
    """Devices of the run, with the least memory that is available on any of them."""
    is_here: bool = True
    """Whether this process is on the machine of the run."""
    starts: bool = False
    """Whether the run starts, and so locks its folder; otherwise nothing is written."""
    stage: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """Shows a part of the checks as a stage of the start."""

    @property
    def is_cpu(self) -> bool:
        """Whether the run has no GPU."""
        return self.world.device.type == "cpu"

    @property
    def num_ranks_here(self) -> int:
        """Ranks of this node."""
        return self.ranks_on_nodes[self.world.rank]

    @property
    def checks_node(self) -> bool:
        """Whether this rank is the one that checks its node."""
        return self.is_here and self.world.local_rank == 0


def run_site(world: World, stage: Callable[[str], AbstractContextManager[Any]] = nullcontext) -> Site:
    """Return the site of the ranks of a run that starts; a collective.

    Args:
        world: all ranks.
        stage: see Site.
    """
    machine = measure_machine(world)
    if world.device.type == "cuda":
        available = min(world.all_gather(available_memory()[0]))
        machine = replace(machine, host_memory_bytes=available)
    return Site(world=world, ranks_on_nodes=world.ranks_on_nodes(), machine=machine, starts=True, stage=stage)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known of a run before its models load."""

    config: Config
    """The settings, with the planned size of the KV cache."""
    data: Data
    environments: Environments | None
    """None for a run without conversations."""
    shapes: Shapes
    plan: Plan
    sync: SyncChoice
    """How the rollout engine gets the trainer's weights."""
    start: Start
    """How the run starts from what lies in its folder."""
    folder: RunFolder | None
    """The run's folder, locked; None for a run that is only checked."""
    state: dict[str, Any]
    """State of the checkpoint that it continues from, with the number of finished steps as `step`."""

    def close(self) -> None:
        """End the processes of rule functions and environments."""
        if self.environments:
            self.environments.close()
        self.data.close()

    @property
    def aliases_weights(self) -> bool:
        """Whether the rollout engine's parameters are views of the trainer's."""
        return not self.sync.why_copies

    @property
    def engine_adapters(self) -> LoraConfig | None:
        """Settings, with target_modules, of adapters that the engine gets beside the weights; None for none."""
        lora, linears = self.config.models.lora, self.shapes.actor.linears
        targets = lora.target_modules or sorted({name for name, _, _ in linears})
        return replace(lora, target_modules=targets) if self.sync.sends_adapters else None


class Checks(Findings):
    """Findings of checks of which some depend on others."""

    def run(self, checked: Callable[[], T]) -> T | None:
        """Return what a check returns; None if it raises a ConfigError, whose messages are kept.

        After a first finding, any other error counts as its consequence, such as a division by a size of 0.
        """
        try:
            return super().run(checked)
        except Exception:
            if not self.messages:
                raise
            return None


def prepare_run(config: Config, site: Site, *, known: Sequence[str] = ()) -> Prepared:
    """Return what a run needs before its models load; a collective.

    Args:
        config: settings, in which the names of the demo's models and data are paths.
        site: where the run starts.
        known: earlier findings, which are raised together with the others.

    Raises:
        ConfigError: everything that was found, on every rank with the findings of all.
    """
    checks = Checks()
    checks.messages += known
    config = checks.run(lambda: validate(config)) or config
    folder = checks.run(lambda: _open_folder(config, site))
    try:
        return _prepare_in(folder, config, site, checks)
    except BaseException:
        if folder is not None:
            folder.close()
        raise


def _open_folder(config: Config, site: Site) -> RunFolder | None:
    """Return the locked folder of a run that starts, and None for one that is only checked.

    Raises:
        ConfigError: another run has locked the folder, or it cannot be written.
    """
    if site.starts:
        return RunFolder(config, site.world)
    if site.is_here:
        check_unlocked(config.run_dir)
        check_writable(config.run_dir, f"run.dir, run.name = {config.run_dir}")
    return None


def _prepare_in(folder: RunFolder | None, config: Config, site: Site, checks: Checks) -> Prepared:
    """Return what a run needs before its models load; see prepare_run."""
    checks.run(
        lambda: check_ranks(config, num_ranks=site.machine.num_ranks, ranks_on_nodes=site.ranks_on_nodes),
    )
    _check_machine(checks, config, site)
    checks.run(lambda: check_device(config, is_cpu=site.is_cpu))
    if site.is_here:
        checks.run(lambda: check_pool(config.memory.swap, site.world.device))
    models = config.models
    use_cache_if_unreachable(filter(None, (models.actor, models.critic, models.reference, models.reward)))
    with site.stage("dataset"):
        data = checks.run(lambda: load_data(config, site.world))
        environments = checks.run(lambda: start_environments(config, data)) if data else None
    shapes = checks.run(lambda: read_shapes(config))
    plan = checks.run(lambda: plan_run(config, shapes, site.machine, is_cpu=site.is_cpu)) if shapes else None
    sync = checks.run(lambda: _choose_sync(config, shapes, site)) if shapes else None
    is_aliased = sync is not None and not sync.why_copies
    if shapes and plan:
        with site.stage("engines"):
            _check_engines(checks, config, shapes, plan, site, is_aliased=is_aliased)
    start = checks.run(lambda: _find_start(config, data, site.world))
    if shapes and plan and site.checks_node:
        _check_memory(checks, config, shapes, plan, site, is_aliased=is_aliased)
        if site.world.is_main:
            checks.run(lambda: _check_disk(config, shapes, site, start[0] if start else None))
    raise_together(checks, site.world)
    assert data and shapes and plan and start and sync
    return Prepared(
        config=plan.sized(config),
        data=data,
        environments=environments,
        shapes=shapes,
        plan=plan,
        sync=sync,
        start=start[0],
        folder=folder,
        state=start[1],
    )


def _check_machine(checks: Checks, config: Config, site: Site) -> None:
    """Check what does not depend on the models: packages, devices, folders, ports."""
    if not site.is_here:
        return
    checks.run(check_torch_build if site.is_cpu else partial(check_gpu, site.world.device, config.models))
    if not site.is_cpu:
        checks.run(partial(check_kernels, config.models))
    if site.checks_node:
        for checked in (check_packages, check_temporary_folder, check_loopback, check_open_files):
            checks.run(checked)
    if site.world.is_main:
        checks.run(partial(check_trackers, config.run.trackers))


def _check_memory(checks: Checks, config: Config, shapes: Shapes, plan: Plan, site: Site, *, is_aliased: bool) -> None:
    """Check that the host memory of this node has room, and that what DeepSpeed compiles can be compiled."""
    num_ranks, device = site.num_ranks_here, site.world.device
    dtype_bytes = choose_dtype(config.models.dtype, device).itemsize
    host = host_uses(config, shapes, plan, num_ranks=num_ranks, dtype_bytes=dtype_bytes, is_cpu=site.is_cpu)
    checks.run(lambda: check_memory(host))
    if site.is_cpu:
        aliased = dtype_bytes * shapes.actor.num_params * is_aliased
        bucket = aliased or sum(a.num_bytes for a in plan.allocations if a.name == "staging bucket")
        checks.run(lambda: check_buckets(bucket, num_ranks=num_ranks))
    elif reason := why_little_shared_memory(num_ranks):
        logger.warning("%s", reason)
    offloads = not site.is_cpu and config.memory.swap != "off" and not uses_pool(config.memory.swap, device)
    checks.run(lambda: check_compilers(config, offloads_with_deepspeed=offloads))


def _check_disk(config: Config, shapes: Shapes, site: Site, start: Start | None) -> None:
    """Check that the disk of the run's folder has room; files that the run replaces are given back."""
    dtype = choose_dtype(config.models.dtype, site.world.device)
    replaced = [] if start is None or start.is_moved_aside else ["checkpoints", *EXPORTED]
    check_space(
        config.run_dir,
        disk_uses(config, shapes, dtype_bytes=dtype.itemsize),
        reused_bytes=sum(folder_bytes(config.run_dir / name) for name in replaced),
    )


def raise_together(findings: Findings, world: World) -> None:
    """Raise the findings of all ranks on every rank; a collective.

    Raises:
        ConfigError: any rank has a finding.
    """
    messages = [message for part in world.all_gather(findings.messages) for message in part]
    if messages:
        raise ConfigError(*dict.fromkeys(messages))


def _check_engines(checks: Checks, config: Config, shapes: Shapes, plan: Plan, site: Site, *, is_aliased: bool) -> None:
    """Check what the constructors of the engines would refuse."""
    device = site.world.device
    dtype = choose_dtype(config.models.dtype, device)
    checks.run(lambda: check_same_weights(config, shapes))
    if not site.is_cpu and site.is_here:
        checks.run(lambda: check_offload(config, plan, device))
        aliased = dtype.itemsize * shapes.actor.num_params * is_aliased
        checks.run(lambda: check_engine_memory(config, device, plan.machine.gpu_memory_bytes, aliased_bytes=aliased))
    if site.checks_node or not site.is_here:
        checks.run(lambda: check_deepspeed(config, dtype=dtype, device=device))
        if not checks.messages:  # vLLM takes seconds to import, and would repeat what is found already
            checks.run(lambda: check_engine(config, device, is_here=site.is_here))


def check_same_weights(config: Config, shapes: Shapes) -> None:
    """Check that a reference that moves towards the actor has its weights.

    Raises:
        ConfigError: names or shapes of the weights differ.
    """
    if not config.models.reference_sync_steps or shapes.reference is None:
        return
    actor, reference = dict(shapes.actor.tensors), dict(shapes.reference.tensors)
    different = sorted(n for n in actor.keys() | reference.keys() if actor.get(n) != reference.get(n))
    check(
        not different,
        f"models.reference = {config.models.reference}: models.reference_sync_steps needs the weights of models.actor, "
        f"but {len(different)} differ in name or shape, such as {', '.join(different[:3])}; give a copy of the actor",
    )


def check_offload(config: Config, plan: Plan, device: torch.device) -> None:
    """Check that DeepSpeed's offload can move the optimizers, where it moves them because the pool is not available.

    Raises:
        ConfigError: it cannot.
    """
    moved = [n for n in ("actor", "critic") if f"{n}_optimizer" in plan.residency.keys() - plan.always_resident]
    is_offloading = config.memory.swap == "auto" and not uses_pool(config.memory.swap, device) and bool(moved)
    check(
        not is_offloading or can_offload(config, dtype_name(config, is_cpu=False)),
        f"memory.swap = auto: the native pool is not available, and {CANNOT_OFFLOAD} and none for stage 0; use "
        "update.zero_stage 2 or 3, build the pool (make install), or set memory.swap: off",
    )


def _choose_sync(config: Config, shapes: Shapes, site: Site) -> SyncChoice:
    """Return how the rollout engine gets the trainer's weights.

    Raises:
        ConfigError: see choose_sync.
    """
    dtype = choose_dtype(config.models.dtype, site.world.device)
    tensors = [(name, shape, dtype) for name, shape in shapes.actor.tensors]
    return choose_sync(config, architecture=shapes.actor.architecture, tensors=tensors)


def _find_start(config: Config, data: Data | None, world: World) -> tuple[Start, dict[str, Any]]:
    """Return how the run starts, and the state of its checkpoint; the position of the prompts is restored.

    Args:
        data: prompts of the run; None if they cannot be read, which is another finding.

    Raises:
        ConfigError: see decide_start; the checkpoint is of another data set.
    """
    start = decide_together(config, world)
    if not start.checkpoint:
        return start, {"step": 0}
    state = read_state(start.checkpoint)
    if data:
        data.loader.load_state_dict(state["loader"])
    return start, state
