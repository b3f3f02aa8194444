"""The forecast of a run: its plan, the duration of a step, and variants of both to compare with."""

from dataclasses import dataclass, replace

from hybrid_rl.config import Config
from hybrid_rl.planning.advice import Alternative, find_fitting_alternative, larger_micro_batches
from hybrid_rl.planning.communication_time import bus_seconds
from hybrid_rl.planning.engine_memory import check_engine_heads, check_kv_cache
from hybrid_rl.planning.plan import Machine, Plan
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.rates import Rates, rates_of
from hybrid_rl.planning.shapes import Shapes, read_shapes
from hybrid_rl.planning.simulator import StepTime, simulate

SWAP_MODES = ("vmm", "deepspeed", "off")
"""Values of memory.swap that move all tenants or none."""


@dataclass(frozen=True, kw_only=True)
class SwapForecast:
    """Memory and time of a run with one value of memory.swap."""

    bus_bytes: int
    """Bytes of a step that a GPU copies to and from the host."""
    bus_s: float | None
    """Seconds of these copies; None if the card is not known."""
    missing_bytes: int


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Plan and predicted durations of a run on a machine."""

    config: Config
    machine: Machine
    shapes: Shapes
    plan: Plan
    rates: Rates | None
    """Rates of the card; None if durations cannot be predicted, see why_no_time."""
    time: StepTime | None
    """The step; None if durations cannot be predicted."""
    alone: StepTime | None
    """The step on one GPU with the same settings; None if it does not fit, or cannot be predicted."""
    swap_modes: dict[str, SwapForecast]
    """Value of memory.swap -> what it would take."""
    faster: tuple[Alternative, float] | None
    """Larger micro-batches that fit and are faster, and the seconds of their step."""
    fitting: Alternative | None
    """An alternative that fits if the plan does not; None if the plan fits, or if none was found."""

    @property
    def fits(self) -> bool:
        """Whether the plan fits on the GPUs and, where the memory of a node is known, in it."""
        return self.plan.fits


def why_no_time(config: Config, machine: Machine) -> str | None:
    """Return why the duration of a step cannot be predicted; None if it can."""
    if machine.card is None:
        return "the card is unknown; name it with --gpu"
    if config.models.dtype == "float32":
        return "the rates are those of bfloat16, and models.dtype is float32"
    return None


def make_forecast(config: Config, machine: Machine) -> Forecast:
    """Return plan and predicted durations of a config on a machine; without durations if why_no_time says so.

    Raises:
        ConfigError: a folder holds no model.
    """
    shapes = read_shapes(config)
    check_engine_heads(config, shapes)
    plan = make_plan(config, machine, shapes)
    check_kv_cache(config, plan)
    rates = rates_of(machine.card) if machine.card and not why_no_time(config, machine) else None
    time = simulate(config, machine, shapes, plan, rates) if rates else None
    return Forecast(
        config=config,
        machine=machine,
        shapes=shapes,
        plan=plan,
        rates=rates,
        time=time,
        alone=_time_on_one_gpu(config, machine, shapes, rates) if rates else None,
        swap_modes={mode: _with_swap(config, machine, shapes, rates, mode) for mode in SWAP_MODES},
        faster=_find_faster(config, machine, shapes, rates, time) if plan.fits and rates and time else None,
        fitting=None if plan.fits else find_fitting_alternative(config, machine, shapes),
    )


def _time_on_one_gpu(config: Config, machine: Machine, shapes: Shapes, rates: Rates) -> StepTime | None:
    """Return the duration of the step on one GPU, without model parallelism; None if it does not fit."""
    machine = replace(machine, num_gpus=1, num_nodes=1)
    config = replace(
        config,
        rollout=replace(config.rollout, tensor_parallel_size=1),
        update=replace(config.update, sequence_parallel_size=1, tensor_parallel_size=1),
    )
    plan = make_plan(config, machine, shapes)
    return simulate(config, machine, shapes, plan, rates) if plan.fits else None


def _with_swap(config: Config, machine: Machine, shapes: Shapes, rates: Rates | None, mode: str) -> SwapForecast:
    found = Alternative(config=config, machine=machine).set("memory.swap", mode)
    plan = make_plan(found.config, machine, shapes)
    return SwapForecast(
        bus_bytes=plan.bus_bytes,
        bus_s=bus_seconds(plan, mode, rates) if rates else None,
        missing_bytes=plan.missing_bytes,
    )


def _find_faster(
    config: Config, machine: Machine, shapes: Shapes, rates: Rates, time: StepTime
) -> tuple[Alternative, float] | None:
    """Return the largest micro-batches that fit and save 5 % of the step, and 2 % more with every doubling."""
    best, limit = None, 0.95 * time.total_s
    for larger in larger_micro_batches(Alternative(config=config, machine=machine)):
        plan = make_plan(larger.config, larger.machine, shapes)
        seconds = simulate(larger.config, larger.machine, shapes, plan, rates).total_s
        if plan.fits and seconds < limit:
            best, limit = (larger, seconds), 0.98 * seconds
    return best
