"""Prints `colocated.py plan`: the allocations of each GPU by phase, whether they fit, and how long a step takes."""

import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hybrid_rl.config import Config, check
from hybrid_rl.memory.residency import Phase
from hybrid_rl.planning.advice import describe_alternative
from hybrid_rl.planning.communication_time import bus_seconds
from hybrid_rl.planning.forecast import Forecast, make_forecast
from hybrid_rl.planning.plan import GIB, MARGIN, Machine
from hybrid_rl.planning.rates import Rates
from hybrid_rl.validate import group_sizes

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
WIDTH = 120


def parse_bytes(text: str, *, field: str) -> int:
    """Return the number of bytes of a size with its unit: 80GiB, 40 GB, 512MiB, 1073741824.

    Args:
        text: the size.
        field: name of the argument, for messages.

    Raises:
        ConfigError: the text is not a size, or the size is not positive.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(found[2].upper()) if found else None
    number = float(found[1]) * unit if found and unit else 0.0
    check(number >= 1, f"{field} = {text}: must be a size such as 80GiB, 40GB or 85899345920")
    return int(number)


def show_plan(config: Config, machine: Machine, console: Console | None = None) -> bool:
    """Print the forecast of a config on a machine and return whether it fits.

    Raises:
        ConfigError: a folder holds no model; an engine or a model-parallel group would span two nodes.
    """
    for field, size in group_sizes(config).items():
        check(machine.num_gpus % size == 0, f"{field} = {size}: must divide --gpus {machine.num_gpus}")
    rates = Rates()
    console = console or Console(width=WIDTH, highlight=False)
    forecast = make_forecast(config, machine, rates)
    console.print(_memory_table(forecast))
    for line in (*_kv_lines(forecast), *_host_lines(forecast, rates), *_verdict(forecast)):
        console.print(line, soft_wrap=True)
    console.print(_time_table(forecast))
    return forecast.fits


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes else ""


def _memory_table(forecast: Forecast) -> Table:
    plan, machine = forecast.plan, forecast.machine
    phases = [p for p in Phase if forecast.config.has_critic or p is not Phase.UPDATE_CRITIC]
    title = f"GiB on each GPU of {machine.gpu_memory_bytes / GIB:.1f} GiB, {machine.num_ranks} in all"
    table = Table("", *(p.value for p in phases), "pinned on host", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    sizes = _sizes_by_name(forecast, phases)
    resident = plan.always_resident if forecast.config.memory.swap == "auto" else frozenset[str]()
    for name, cells in sizes.items():
        table.add_row(name + " (stays)" * (name in resident), *map(_gib, cells))
    table.add_section()
    table.add_row("peak", *(_gib(plan.peak(p)) for p in phases), _gib(sum(cells[-1] for cells in sizes.values())))
    table.add_row(f"available, {MARGIN:.0%} left free", *[_gib(machine.budget_bytes)] * len(phases))
    return table


def _sizes_by_name(forecast: Forecast, phases: Sequence[Phase]) -> dict[str, list[int]]:
    """Return name -> bytes in each phase and on the host; allocations of one name are added up."""
    sizes: dict[str, list[int]] = {}
    for allocation in forecast.plan.allocations:
        cells = sizes.setdefault(allocation.name, [0] * (len(phases) + 1))
        for place, phase in enumerate(phases):
            cells[place] += allocation.num_bytes * (phase in allocation.phases)
        cells[-1] += allocation.host_bytes
    return sizes


def _kv_lines(forecast: Forecast) -> list[str]:
    plan, config = forecast.plan, forecast.config
    length = config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
    lines = [
        f"KV cache: {plan.kv_bytes:,} bytes = {plan.kv_tokens:,} tokens = {plan.kv_sequences:,} sequences of {length}"
    ]
    if plan.kv_sequences < plan.max_concurrent_sequences:
        lines.append(
            f"[yellow]warning: {plan.max_concurrent_sequences} sequences would be decoded at once, the KV cache holds "
            f"{plan.kv_sequences} of full length; vLLM makes the others wait, or computes them again"
        )
    return lines


def _host_lines(forecast: Forecast, rates: Rates) -> list[str]:
    parts = []
    for mode, found in forecast.swap_modes.items():
        missing = f", {found.missing_bytes / GIB:.1f} GiB too much" if found.missing_bytes else ""
        parts.append(f"{mode} {found.bus_s:.2f} s{missing}")
    swap, host = forecast.config.memory.swap, forecast.plan.host_bytes / GIB
    own = bus_seconds(forecast.plan, swap, rates)
    return [
        f"host memory, pinned: {host:.1f} GiB per node; bus per step: {own:.2f} s (swap {swap})",
        f"bus per step by memory.swap, all tenants moving: {'; '.join(parts)}",
    ]


def _verdict(forecast: Forecast) -> list[str]:
    plan = forecast.plan
    if not forecast.fits:
        missing = f"{plan.shortage()}: {plan.missing_bytes:,} bytes missing"
        return [f"[red]does not fit[/red]: {missing}", describe_alternative(forecast.fitting)]
    spare = (forecast.machine.budget_bytes - plan.peak(plan.fullest_phase)) / GIB
    lines = [f"[green]fits[/green]: {plan.fullest_phase.value} is the fullest phase, {spare:.1f} GiB are left in it"]
    if forecast.faster:
        larger, seconds = forecast.faster
        now = forecast.time.total_s
        lines.append(f"this would fit too, and take {seconds:.1f} s a step instead of {now:.1f}: {larger}")
    return lines


def _time_table(forecast: Forecast) -> Table:
    time, alone = forecast.time, forecast.alone
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
        table.add_row("efficiency against one GPU", f"{time.efficiency(alone):.0%}")
    return table
