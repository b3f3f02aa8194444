"""Prints the plan of a run: the memory of each GPU by phase, the start, whether both fit, and the time of a step."""

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from hybrid_rl.config import Config, check
from hybrid_rl.memory.residency import Phase
from hybrid_rl.models.checks import check_classes
from hybrid_rl.planning.advice import describe_alternative
from hybrid_rl.planning.cards import CARDS, Card
from hybrid_rl.planning.communication_time import bus_seconds
from hybrid_rl.planning.forecast import Forecast, make_forecast, why_no_time
from hybrid_rl.planning.plan import GIB, MARGIN, Machine
from hybrid_rl.planning.rates import MEASURED_ON, rates_of
from hybrid_rl.planning.simulator import StepTime
from hybrid_rl.validate import check_device, group_sizes

from .machine_options import check_card

WIDTH = 120


def show_plan(config: Config, machine: Machine, console: Console | None = None) -> bool:
    """Print the forecast of a config on a machine and return whether it fits.

    Raises:
        ConfigError: a folder holds no model; an engine or a model-parallel group would span two nodes; the card lacks
            what the settings ask for.
    """
    check_card(machine, config.models)
    check_device(config, is_cpu=False)
    check_classes(config, torch.device("cuda"))
    for field, size in group_sizes(config).items():
        check(machine.num_gpus % size == 0, f"{field} = {size}: must divide --gpus {machine.num_gpus}")
    console = console or Console(width=WIDTH, highlight=False)
    forecast = make_forecast(config, machine)
    for line in _model_lines(forecast):
        console.print(line, soft_wrap=True)
    console.print(_memory_table(forecast))
    for line in (*_kv_lines(forecast), *_host_lines(forecast)):
        console.print(line, soft_wrap=True)
    console.print(_loading_table(forecast))
    for line in (*_verdict(forecast), *_rate_lines(forecast)):
        console.print(line, soft_wrap=True)
    if forecast.time:
        console.print(_time_table(forecast, forecast.time))
    return forecast.fits


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes else ""


def _model_lines(forecast: Forecast) -> list[str]:
    """Return the parameters of the actor where not all of them compute a token, and which models are sharded."""
    actor, lines = forecast.shapes.actor, []
    if actor.mixture:
        lines.append(
            f"actor: {actor.num_params / 1e9:.2f} billion parameters, of which {actor.num_active_params / 1e9:.2f} "
            f"compute a token: {actor.mixture.experts_per_token} of {actor.mixture.num_experts} experts in a layer"
        )
    if forecast.plan.shards_frozen:
        lines.append("reference and reward model: sharded over all GPUs (models.shard_frozen)")
    return lines


def _memory_table(forecast: Forecast) -> Table:
    plan, machine = forecast.plan, forecast.machine
    phases = [p for p in Phase if forecast.config.has_critic or p is not Phase.UPDATE_CRITIC]
    name = f" ({machine.card.name})" if machine.card else ""
    title = f"GiB on each GPU of {machine.gpu_memory_bytes / GIB:.1f} GiB{name}, {machine.num_ranks} in all"
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
    length = config.max_engine_tokens
    lines = [
        f"KV cache: {plan.kv_bytes:,} bytes = {plan.kv_tokens:,} tokens = {plan.kv_sequences:,} sequences of {length}"
    ]
    if plan.kv_sequences < plan.max_concurrent_sequences:
        lines.append(
            f"[yellow]warning: {plan.max_concurrent_sequences} sequences would be decoded at once, the KV cache holds "
            f"{plan.kv_sequences} of full length; vLLM makes the others wait, or computes them again"
        )
    return lines


def _host_lines(forecast: Forecast) -> list[str]:
    parts = []
    for mode, found in forecast.swap_modes.items():
        missing = f", {found.missing_bytes / GIB:.1f} GiB too much" if found.missing_bytes else ""
        parts.append(f"{mode} {_bus(found.bus_bytes, found.bus_s)}{missing}")
    swap, host = forecast.config.memory.swap, forecast.plan.host_bytes / GIB
    seconds = bus_seconds(forecast.plan, swap, forecast.rates) if forecast.rates else None
    return [
        f"host memory, pinned: {host:.1f} GiB per node; bus per step: {_bus(forecast.plan.bus_bytes, seconds)} "
        f"(swap {swap})",
        f"bus per step by memory.swap, all tenants moving: {'; '.join(parts)}",
    ]


def _bus(num_bytes: int, seconds: float | None) -> str:
    """Return how much a GPU copies to and from the host, in seconds or, for an unknown card, in bytes."""
    return f"{num_bytes / GIB:.1f} GiB" if seconds is None else f"{seconds:.2f} s"


def _loading_table(forecast: Forecast) -> Table:
    plan, machine = forecast.plan, forecast.machine
    title = "GiB while loading and saving"
    table = Table("start, in this order", "each GPU", "host, per node", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for moment in plan.loading:
        table.add_row(moment.name, _gib(moment.gpu_bytes), _gib(moment.host_bytes))
    table.add_section()
    for moment in plan.saving:
        table.add_row(moment.name, _gib(moment.gpu_bytes), _gib(moment.host_bytes))
    table.add_section()
    table.add_row("peak", _gib(plan.moment_bytes), _gib(plan.peak_host_bytes))
    available = machine.host_memory_bytes
    table.add_row("available", _gib(machine.budget_bytes), _gib(available) if available else "not known")
    return table


def _verdict(forecast: Forecast) -> list[str]:
    plan = forecast.plan
    if not plan.fits:
        missing = f"{plan.shortage()}: {plan.missing_host_bytes or plan.missing_bytes:,} bytes missing"
        return [f"[red]does not fit[/red]: {missing}", describe_alternative(forecast.fitting)]
    spare = (forecast.machine.budget_bytes - plan.peak(plan.fullest_phase)) / GIB
    lines = [f"[green]fits[/green]: {plan.fullest_phase.value} is the fullest phase, {spare:.1f} GiB are left in it"]
    if forecast.faster and forecast.time:
        larger, seconds = forecast.faster
        now = forecast.time.total_s
        lines.append(f"this would fit too, and take {seconds:.1f} s a step instead of {now:.1f}: {larger}")
    return lines


def _rate_lines(forecast: Forecast) -> list[str]:
    """Return what the predicted seconds rest on, or why there are none, and which kernels the card runs."""
    card, reason = forecast.machine.card, why_no_time(forecast.config, forecast.machine)
    lines = [f"[yellow]seconds are not predicted[/yellow]: {reason}"] if reason else []
    if reason and card is None:
        lines[0] += f" ({', '.join(CARDS)})"
    if card and not reason:
        lines.append(describe_rates(card))
    if card and not card.has_fused_logprobs and forecast.config.models.dtype != "float32":
        lines.append(f"log-probs: in chunks, because the fused kernels need more shared memory than {card.name} has")
    return lines


def describe_rates(card: Card) -> str:
    """Return a sentence about the rates of a card: measured, or scaled by the ratios of peaks."""
    if card is MEASURED_ON:
        return f"seconds: from rates measured on {card.name}"
    rates, measured = rates_of(card), rates_of(MEASURED_ON)
    ratios = {
        "products": rates.matmul_flops / measured.matmul_flops,
        "memory": rates.memory_bytes_per_s / measured.memory_bytes_per_s,
        "bus": rates.bus_out_bytes_per_s / measured.bus_out_bytes_per_s,
        "links": rates.node_bytes_per_s / measured.node_bytes_per_s,
    }
    factors = ", ".join(f"{name} x {ratio:.2f}" for name, ratio in ratios.items())
    return f"seconds: from rates measured on {MEASURED_ON.name}, scaled by data sheets to {card.name}: {factors}"


def _time_table(forecast: Forecast, time: StepTime) -> Table:
    alone = forecast.alone
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
