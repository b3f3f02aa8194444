"""`colocated.py plan`: what will be on each GPU in each phase, whether it fits, and how long a step should take."""

import re
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from hybrid_rl.config import Config, check
from hybrid_rl.memory.residency import RESIDENCY, Phase
from hybrid_rl.planning.advice import Change, advice, larger_batches, suggest
from hybrid_rl.planning.plan import GIB, MARGIN, Machine, Plan, Shapes, read_shapes
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.simulator import Rates, StepTime, bus_seconds, simulate
from hybrid_rl.validate import group_sizes

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
WIDTH = 120


def parse_bytes(text: str, *, field: str) -> int:
    """Return a number of bytes written with its unit: 80GiB, 40 GB, 512MiB, 1073741824.

    Raises:
        ConfigError: it is written otherwise, or is not positive.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(found[2].upper()) if found else None
    number = float(found[1]) * unit if found and unit else 0.0
    check(number >= 1, f"{field} = {text}: must be a size such as 80GiB, 40GB or 85899345920")
    return int(number)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """All that the command prints."""

    config: Config
    machine: Machine
    shapes: Shapes
    plan: Plan
    time: StepTime
    alone: StepTime | None
    """The same step on one GPU; None where it does not fit."""


def forecast(config: Config, machine: Machine, rates: Rates, shapes: Shapes | None = None) -> Forecast:
    """Return plan and predicted times of a config on a machine.

    Raises:
        ConfigError: a folder holds no model; an engine, or GPUs that work together, would span two nodes.
    """
    for field, size in group_sizes(config).items():
        check(machine.num_gpus % size == 0, f"{field} = {size}: must divide --gpus {machine.num_gpus}")
    shapes = shapes or read_shapes(config)
    single = replace(machine, num_gpus=1, num_nodes=1)
    ungrouped = replace(
        config,
        rollout=replace(config.rollout, tensor_parallel_size=1),
        update=replace(config.update, sequence_parallel_size=1, tensor_parallel_size=1),
    )
    plan, plan_alone = make_plan(config, machine, shapes, RESIDENCY), make_plan(ungrouped, single, shapes, RESIDENCY)
    time = simulate(config, machine, shapes, plan, rates)
    alone = simulate(ungrouped, single, shapes, plan_alone, rates)
    return Forecast(
        config=config,
        machine=machine,
        shapes=shapes,
        plan=plan,
        time=time,
        alone=None if plan_alone.missing_bytes else alone,
    )


def show_plan(config: Config, machine: Machine, console: Console | None = None) -> bool:
    """Print the forecast of a config and return whether it fits.

    Raises:
        ConfigError: a folder holds no model.
    """
    rates = Rates()
    console = console or Console(width=WIDTH, highlight=False)
    told = forecast(config, machine, rates)
    console.print(_memory_table(told))
    for line in (*_kv_lines(told), *_host_lines(told, rates), *_verdict(told, rates)):
        console.print(line, soft_wrap=True)
    console.print(_time_table(told))
    return not told.plan.missing_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes else ""


def _memory_table(told: Forecast) -> Table:
    plan, machine = told.plan, told.machine
    phases = [p for p in Phase if told.config.has_critic or p is not Phase.UPDATE_CRITIC]
    title = f"GiB on each GPU of {machine.gpu_memory_bytes / GIB:.1f} GiB, {machine.num_ranks} in all"
    table = Table("", *(p.value for p in phases), "pinned on host", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    rows: dict[str, list[int]] = {}
    for row in plan.allocations:  # rows of one name, such as activations, share a line
        line = rows.setdefault(row.name, [0] * (len(phases) + 1))
        for place, phase in enumerate(phases):
            line[place] += row.num_bytes * (phase in row.phases)
        line[-1] += row.host_bytes
    for name, line in rows.items():
        stays = " (stays)" if name in plan.stays and told.config.memory.swap == "auto" else ""
        table.add_row(name + stays, *map(_gib, line))
    table.add_section()
    table.add_row("peak", *(_gib(plan.peak(p)) for p in phases), _gib(sum(line[-1] for line in rows.values())))
    table.add_row(f"available, {MARGIN:.0%} left free", *[_gib(machine.budget_bytes)] * len(phases))
    return table


def _kv_lines(told: Forecast) -> list[str]:
    plan, config = told.plan, told.config
    length = config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
    lines = [
        f"KV cache: {plan.kv_bytes:,} bytes = {plan.kv_tokens:,} tokens = {plan.max_sequences:,} sequences of {length}"
    ]
    if plan.max_sequences < plan.wave:
        lines.append(
            f"[yellow]warning: {plan.wave} sequences would be decoded at once, the KV cache holds {plan.max_sequences} "
            "of full length; vLLM makes the others wait, or computes them again"
        )
    return lines


def _host_lines(told: Forecast, rates: Rates) -> list[str]:
    parts = []
    for mode in ("vmm", "deepspeed", "off"):
        config = replace(told.config, memory=replace(told.config.memory, swap=mode))  # type: ignore[arg-type]
        plan = make_plan(config, told.machine, told.shapes, RESIDENCY)
        missing = f", {plan.missing_bytes / GIB:.1f} GiB too much" if plan.missing_bytes else ""
        parts.append(f"{mode} {bus_seconds(plan, mode, rates):.2f} s{missing}")
    own = bus_seconds(told.plan, told.config.memory.swap, rates)
    host = told.plan.host_bytes / GIB
    return [
        f"host memory, pinned: {host:.1f} GiB per node; bus per step: {own:.2f} s (swap {told.config.memory.swap})",
        f"bus per step by memory.swap, all tenants moving: {'; '.join(parts)}",
    ]


def _verdict(told: Forecast, rates: Rates) -> list[str]:
    plan = told.plan
    if not plan.missing_bytes:
        spare = (told.machine.budget_bytes - plan.peak(plan.worst)) / GIB
        fits = f"[green]fits[/green]: {plan.worst.value} is the fullest phase, {spare:.1f} GiB are left in it"
        return [fits, *_faster(told, rates)]
    change = suggest(told.config, told.machine, told.shapes, RESIDENCY)
    return [f"[red]does not fit[/red]: {plan.refusal()}: {plan.missing_bytes:,} bytes missing", advice(change)]


def _faster(told: Forecast, rates: Rates) -> list[str]:
    """Return a line on larger micro-batches that fit and save a twentieth of a step, each doubling a fiftieth more."""
    best, limit = None, 0.95 * told.time.total_s
    for change in larger_batches(Change(config=told.config, machine=told.machine)):
        plan = make_plan(change.config, change.machine, told.shapes, RESIDENCY)
        seconds = simulate(change.config, change.machine, told.shapes, plan, rates).total_s
        if not plan.missing_bytes and seconds < limit:
            best, limit = (change, seconds), 0.98 * seconds
    if best is None:
        return []
    return [f"this would fit too, and take {best[1]:.1f} s a step instead of {told.time.total_s:.1f}: {best[0]}"]


def _time_table(told: Forecast) -> Table:
    time, alone = told.time, told.alone
    table = Table("predicted", "seconds", title="one step, all responses at full length: prediction, not measured")
    table.columns[1].justify = "right"
    for name, seconds in time.phases.items():
        if seconds:
            bound = f" ({time.decode_bound}-bound)" if name == "rollout: decode" else ""
            table.add_row(name + bound, f"{seconds:.2f}")
    table.add_section()
    table.add_row("step", f"{time.total_s:.2f}")
    table.add_row("tokens per second and GPU", f"{time.tokens_per_s_per_gpu:,.0f}")
    if time.num_ranks > 1 and alone:
        table.add_row("efficiency against one GPU", f"{efficiency(time, alone):.0%}")
    return table


def efficiency(time: StepTime, alone: StepTime) -> float:
    """Return tokens per second and GPU beside those of one GPU with the same settings."""
    return time.tokens_per_s_per_gpu / alone.tokens_per_s_per_gpu
