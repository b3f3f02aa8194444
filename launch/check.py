"""Checks a run without starting it: `colocated.py check`, and what a start reports that finds a mistake."""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from hybrid_rl.config import Config, check
from hybrid_rl.distributed import World
from hybrid_rl.first_lines import run_lines
from hybrid_rl.machine.environment import check_environment
from hybrid_rl.machine.host import available_memory
from hybrid_rl.memory.device import available_bytes
from hybrid_rl.planning.cards import find_card
from hybrid_rl.planning.plan import GIB, Machine
from hybrid_rl.planning.startup import machine_of
from hybrid_rl.preflight import Checks, Prepared, Site, prepare_run
from hybrid_rl.validate import validate

from .machine_options import check_card
from .settings import prepare, with_demo


def num_ranks_here(num_processes: int | None) -> int:
    """Return the number of ranks of a run on this machine: what is asked for, else one per visible GPU, or one.

    Raises:
        ConfigError: more processes than GPUs are asked for.
    """
    num_gpus = torch.cuda.device_count()
    check(
        not num_gpus or not num_processes or num_processes <= num_gpus,
        f"--num_processes {num_processes}: only {num_gpus} GPUs are visible; lower it, or make more GPUs visible",
    )
    return num_processes or max(1, num_gpus)


def site_here(num_ranks: int) -> Site:
    """Return the site of a run on this machine, seen from this process alone.

    Args:
        num_ranks: ranks of the run.
    """
    num_gpus = min(num_ranks, torch.cuda.device_count())
    devices = [torch.device("cuda", index) for index in range(num_gpus)] or [torch.device("cpu")]
    ranks_on_nodes = [num_ranks] * num_ranks
    machine = machine_of(ranks_on_nodes, min(map(available_bytes, devices)))
    if num_gpus:
        card = find_card(torch.cuda.get_device_name(devices[0]))
        machine = replace(machine, card=card, host_memory_bytes=available_memory()[0])
    world = World(rank=0, size=1, local_rank=0, device=devices[0])
    return Site(world=world, ranks_on_nodes=ranks_on_nodes, machine=machine)


def site_elsewhere(machine: Machine) -> Site:
    """Return the site of a run on the GPUs of another machine."""
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cuda"))
    return Site(world=world, ranks_on_nodes=[machine.num_gpus] * machine.num_ranks, machine=machine, is_here=False)


def check_run(config: Config, site: Site, *, known: Sequence[str] = ()) -> Prepared:
    """Return what is known of a run before its models load; writes nothing to its folder.

    Args:
        config: settings, in which models and data may be the demo's.
        site: where the run would start.
        known: earlier findings, which are raised together with the others.

    Raises:
        ConfigError: everything that was found.
    """
    checks = Checks()
    checks.messages += known
    config = checks.run(lambda: with_demo(config)) or config
    prepared = prepare_run(config, site, known=checks.messages)
    prepared.close()
    return prepared


def check_run_here(config: Config, num_processes: int | None) -> list[str]:
    """Return the lines that describe a run on this machine.

    Args:
        config: settings.
        num_processes: ranks; None is one per visible GPU, or one on a CPU.

    Raises:
        ConfigError: everything that was found.
    """
    num_ranks, known = check_start(config, num_processes)
    site = site_here(num_ranks)
    return describe(check_run(config, site, known=known), site)


def check_run_elsewhere(config: Config, machine: Machine) -> list[str]:
    """Return the lines that describe a run on another machine; see check_run_here."""
    checks, site = Checks(), site_elsewhere(machine)
    checks.run(lambda: check_card(machine, config.models))
    return describe(check_run(config, site, known=checks.messages), site)


def check_start(config: Config, num_processes: int | None) -> tuple[int, list[str]]:
    """Return the number of ranks of a run on this machine, and what is wrong with settings and environment.

    It takes no longer than the import of torch. What it cannot know, each rank finds when it starts.
    """
    checks = Checks()
    checks.run(lambda: validate(config))
    checks.run(lambda: check_environment(os.environ))
    num_ranks = checks.run(lambda: num_ranks_here(num_processes)) or 1
    return num_ranks, checks.messages


def start_checked(config: Config, num_processes: int | None) -> tuple[Config, int]:
    """Return the settings and the number of ranks of a run that starts on this machine.

    Raises:
        ConfigError: settings or environment are wrong; with everything else that was found.
    """
    num_ranks, known = check_start(config, num_processes)
    if known:
        check_run(config, site_here(num_ranks), known=known)
    return prepare(config), num_ranks


def describe(prepared: Prepared, site: Site) -> list[str]:
    """Return the lines that describe a run in which nothing is wrong."""
    plan, data, machine = prepared.plan, prepared.data, prepared.plan.machine
    phase, kind = plan.fullest_phase, "CPU" if site.is_cpu else "GPU"
    checkpoint = prepared.start.checkpoint
    return [
        "settings, models, data and machine: no mistakes" if site.is_here else "settings, models and data: no mistakes",
        f"ranks: {machine.num_ranks}, with a {kind} each; nodes: {machine.num_nodes}",
        f"prompts: {len(data.loader.prompts)} for training, {len(data.eval_prompts)} on this rank for evaluation",
        *data.lines,
        *run_lines(prepared, site.world.device),
        f"memory: {plan.peak(phase) / GIB:.1f} GiB of each {kind} in {phase.value}, the fullest phase",
        f"start: {checkpoint or 'step 1'}",
    ]
