"""Everything that can be known of a run before a model loads, with all findings at once.

`build` starts with it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from hybrid_rl.checkpoints.find import read_state
from hybrid_rl.checkpoints.run_folder import decide_together
from hybrid_rl.checkpoints.start import Start
from hybrid_rl.config import Config, ConfigError, Findings, check
from hybrid_rl.data.loading import Data, load_data
from hybrid_rl.distributed import World
from hybrid_rl.memory.tenants import check_pool
from hybrid_rl.models.loading import choose_dtype
from hybrid_rl.planning.plan import Machine, Plan
from hybrid_rl.planning.shapes import Shapes, read_shapes
from hybrid_rl.planning.startup import measure_machine, plan_run
from hybrid_rl.validate import check_ranks, validate
from hybrid_rl.weights.layout import why_not_alias

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

    @property
    def is_cpu(self) -> bool:
        """Whether the run has no GPU."""
        return self.world.device.type == "cpu"


def run_site(world: World) -> Site:
    """Return the site of the ranks of a run; a collective."""
    return Site(world=world, ranks_on_nodes=world.ranks_on_nodes(), machine=measure_machine(world))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known of a run before its models load."""

    config: Config
    """The settings, with the planned size of the KV cache."""
    data: Data
    shapes: Shapes
    plan: Plan
    aliases_weights: bool
    """Whether the rollout engine's parameters are views of the trainer's."""
    start: Start
    """How the run starts from what lies in its folder."""
    state: dict[str, Any]
    """State of the checkpoint that it continues from, with the number of finished steps as `step`."""


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


def prepare_run(config: Config, site: Site) -> Prepared:
    """Return what a run needs before its models load; a collective.

    Raises:
        ConfigError: everything that was found, on every rank with the findings of all.
    """
    checks = Checks()
    checks.run(lambda: validate(config))
    checks.run(
        lambda: check_ranks(config, num_ranks=site.machine.num_ranks, ranks_on_nodes=site.ranks_on_nodes),
    )
    checks.run(lambda: _check_device(config, site))
    data = checks.run(lambda: load_data(config, site.world))
    shapes = checks.run(lambda: read_shapes(config))
    plan = checks.run(lambda: plan_run(config, shapes, site.machine, is_cpu=site.is_cpu)) if shapes else None
    is_aliased = checks.run(lambda: _aliases_weights(config, shapes, site)) if shapes else None
    start = checks.run(lambda: _find_start(config, data, site.world))
    raise_together(checks, site.world)
    assert data and shapes and plan and start and is_aliased is not None
    return Prepared(
        config=plan.sized(config),
        data=data,
        shapes=shapes,
        plan=plan,
        aliases_weights=is_aliased,
        start=start[0],
        state=start[1],
    )


def raise_together(findings: Findings, world: World) -> None:
    """Raise the findings of all ranks on every rank; a collective.

    Raises:
        ConfigError: any rank has a finding.
    """
    messages = [message for part in world.all_gather(findings.messages) for message in part]
    if messages:
        raise ConfigError(*dict.fromkeys(messages))


def _check_device(config: Config, site: Site) -> None:
    """Check the settings that need a GPU, or a library for one."""
    profiled = config.run.profile_steps
    check(
        profiled is None or not site.is_cpu,
        f"run.profile_steps = {list(profiled or [])}: there is no GPU to profile; set null",
    )
    if site.is_here:
        check_pool(config.memory.swap, site.world.device)


def _aliases_weights(config: Config, shapes: Shapes, site: Site) -> bool:
    """Return whether the rollout engine's parameters are views of the trainer's.

    Raises:
        ConfigError: sync.mode = alias, and a rule forbids it.
    """
    if config.sync.mode == "copy":
        return False
    dtype = choose_dtype(config.models.dtype, site.world.device)
    tensors = [(name, shape, dtype) for name, shape in shapes.actor.tensors]
    obstacle = why_not_alias(config, architecture=shapes.actor.architecture, tensors=tensors)
    check(obstacle is None or config.sync.mode == "auto", f"sync.mode = alias: {obstacle}")
    if obstacle and site.world.is_main:
        logger.warning("the engine gets copies of the trainer's weights: %s", obstacle)
    return obstacle is None


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
