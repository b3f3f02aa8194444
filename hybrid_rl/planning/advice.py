"""Suggests changes of a run's settings or GPUs that make it fit, each checked with the planner."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.models.sequence_parallel import check_head_counts
from hybrid_rl.planning.engine_memory import check_engine_heads
from hybrid_rl.planning.plan import Machine, Plan
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.rates import Rates, rates_of
from hybrid_rl.planning.shapes import Shapes
from hybrid_rl.planning.simulator import simulate
from hybrid_rl.validate import validate

MAX_GPUS = 64
MAX_ENGINE_GPUS = 8
LORA_RANK = 32
ENOUGH = 1.25
"""Factor by which a step may take longer than the fastest one for the sake of fewer changed settings."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A config and a machine that differ from the user's in a few settings."""

    config: Config
    machine: Machine
    overrides: tuple[str, ...] = ()
    """The differences, written as arguments of the command line."""

    def __str__(self) -> str:
        return " ".join(self.overrides)

    def set(self, field: str, value: Any) -> "Alternative":
        """Return the alternative with one more setting changed, such as update.actor.kind; itself if it is so set."""
        if _get_field(self.config, field.split(".")) == value:
            return self
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        config = _with_field(self.config, field.split("."), value)
        return replace(self, config=config, overrides=(*self.overrides, f"--{field} {text}"))

    def on_gpus(self, num_gpus: int) -> "Alternative":
        """Return the alternative with another number of GPUs in every node."""
        machine = replace(self.machine, num_gpus=num_gpus)
        return replace(self, machine=machine, overrides=(*self.overrides, f"--gpus {num_gpus}"))

    def is_valid(self, shapes: Shapes) -> bool:
        """Return whether the settings are consistent, and engine and sequence parallelism can divide the heads."""
        size = self.config.update.sequence_parallel_size
        try:
            validate(self.config)
            check_engine_heads(self.config, shapes)
            for shape in (shapes.actor, shapes.critic, shapes.reference, shapes.reward):
                if shape:
                    key_heads = shape.key_size // shape.head_size
                    check_head_counts(shape.num_heads, key_heads, size, where=shape.architecture)
        except ConfigError:
            return False
        return True


def _get_field(settings: Any, path: list[str]) -> Any:
    """Return a field of nested dataclasses."""
    return functools.reduce(getattr, path, settings)


def _with_field(settings: Any, path: list[str], value: Any) -> Any:
    """Return nested dataclasses with one field replaced."""
    name, *rest = path
    return replace(settings, **{name: _with_field(getattr(settings, name), rest, value) if rest else value})


def find_fitting_alternative(config: Config, machine: Machine, shapes: Shapes) -> Alternative | None:
    """Return the first alternative that fits, or None.

    Single changes come first, then the combinations of find_fitting_settings, then adapters, and then more GPUs.
    """
    start = Alternative(config=config, machine=machine)
    found = _first_fit(_single_changes(start), shapes) or find_fitting_settings(start, shapes)
    adapted = start.set("models.lora.rank", LORA_RANK)
    found = found or _first_fit([adapted], shapes) or find_fitting_settings(adapted, shapes)
    larger = () if found else _more_gpus(start)
    return found or next(filter(None, (find_fitting_settings(each, shapes) for each in larger)), None)


def find_fitting_settings(start: Alternative, shapes: Shapes) -> Alternative | None:
    """Return the alternative on the same GPUs, and with the same weights trained, that fits; itself if it does.

    Alternatives with the optimizer where it is set come before those with an optimizer on the host. Of these it is the
    first one, which changes least, whose step takes at most ENOUGH times the shortest predicted duration.
    """
    if _plan_that_fits(start, shapes):
        return start
    rates = rates_of(start.machine.card) if start.machine.card else Rates()
    for group in _combinations(start):
        seconds = [
            (simulate(found.config, found.machine, shapes, plan, rates).total_s, found)
            for found in group
            if (plan := _plan_that_fits(found, shapes))
        ]
        if seconds:
            shortest = min(duration for duration, _ in seconds)
            return next(found for duration, found in seconds if duration <= ENOUGH * shortest)
    return None


def most_saving(start: Alternative) -> Alternative:
    """Return the combination of changes that needs least memory of a GPU, whether it fits or not."""
    return [found for group in _combinations(start) for found in group][-1]


def _first_fit(alternatives: Iterable[Alternative], shapes: Shapes) -> Alternative | None:
    """Return the first valid alternative whose plan fits."""
    return next((found for found in alternatives if _plan_that_fits(found, shapes)), None)


def _plan_that_fits(found: Alternative, shapes: Shapes) -> Plan | None:
    """Return the plan of an alternative; None if its settings are not valid, or if it does not fit."""
    if not found.is_valid(shapes):
        return None
    plan = make_plan(found.config, found.machine, shapes)
    return plan if plan.fits else None


def describe_alternative(found: Alternative | None) -> str:
    """Return the result of find_fitting_alternative as a sentence."""
    return f"this would fit: {found}" if found else f"nothing that is known here would fit on up to {MAX_GPUS} GPUs"


def _single_changes(start: Alternative) -> Iterator[Alternative]:
    """Yield alternatives with one changed setting, or with more GPUs; those that cost least time come first."""
    yield from _smaller_micro_batches(start)
    yield from _more_sequence_parallel(start)
    yield start.set("models.gradient_checkpointing", True)
    yield start.set("models.shard_frozen", "auto")
    yield start.set("rollout.kv_cache_memory_bytes", None)
    yield start.set("memory.swap", "auto")
    if start.machine.num_ranks > 1:
        yield start.set("update.zero_stage", 3)
    if start.config.update.zero_stage < 3:
        for larger in _more_gpus(start):
            yield larger.set("update.zero_stage", 3)
    yield _optimizers_on_host(start)
    yield start.set("models.lora.rank", LORA_RANK)
    yield from _more_gpus(start)


def _combinations(start: Alternative) -> Iterator[list[Alternative]]:
    """Yield combinations of changes that save memory: with the optimizers as set, then with optimizers on the host.

    They differ in gradient checkpointing and the size of micro-batches, and in ZeRO-3 with the engine over more GPUs,
    because it has copies of the weights.
    """
    planned = start.set("models.shard_frozen", "auto")
    planned = planned.set("rollout.kv_cache_memory_bytes", None).set("memory.swap", "auto")
    for optimizer in (planned, _optimizers_on_host(planned)):
        group = []
        for sharded in (optimizer, *_sharded(optimizer)):
            checkpointed = sharded.set("models.gradient_checkpointing", True)
            group += [sharded, checkpointed, [checkpointed, *_smaller_micro_batches(checkpointed)][-1]]
        yield list({str(found): found for found in group}.values())


def _sharded(start: Alternative) -> Iterator[Alternative]:
    """Yield ZeRO-3 with the engine as set and over more GPUs of a node.

    On one GPU it saves memory with an optimizer on the host alone, to which gradients move at once.
    """
    if start.machine.num_ranks == 1 and start.config.update.actor.kind != "cpu_adam":
        return
    sharded = start.set("update.zero_stage", 3)
    yield sharded
    size = start.config.rollout.tensor_parallel_size
    while (size := 2 * size) <= MAX_ENGINE_GPUS and start.machine.num_gpus % size == 0:
        yield sharded.set("rollout.tensor_parallel_size", size)


def _smaller_micro_batches(start: Alternative) -> Iterator[Alternative]:
    """Yield micro-batches of half the tokens, a quarter and so on, as long as one sequence fits."""
    config = start.config
    least = config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
    if config.ptx.path:
        least = max(least, config.ptx.max_tokens)
    tokens = config.update.micro_batch_tokens // 2
    while tokens >= least:
        yield start.set("update.micro_batch_tokens", tokens)
        tokens //= 2


def larger_micro_batches(start: Alternative) -> Iterator[Alternative]:
    """Yield micro-batches of twice the tokens, four times and so on, until one holds a rank's part of a mini-batch.

    Ranks of a model-parallel group compute a micro-batch together; it grows to the group's part.
    """
    config, update = start.config, start.config.update
    length = config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
    group_size = update.sequence_parallel_size * update.tensor_parallel_size
    most = group_size * update.mini_batch_size * length // start.machine.num_ranks
    tokens = update.micro_batch_tokens
    while tokens < most:
        tokens *= 2
        yield start.set("update.micro_batch_tokens", tokens)


def _more_sequence_parallel(start: Alternative) -> Iterator[Alternative]:
    """Yield sequence parallelism over two GPUs, four and so on, as long as the GPUs of a node can be divided."""
    size = 2
    while start.machine.num_gpus % size == 0:
        yield start.set("update.sequence_parallel_size", size)
        size *= 2


def _optimizers_on_host(start: Alternative) -> Alternative:
    found = start.set("update.actor.kind", "cpu_adam")
    return found.set("update.critic.kind", "cpu_adam") if start.config.has_critic else found


def _more_gpus(start: Alternative) -> Iterator[Alternative]:
    """Yield twice the GPUs of a node, four times and so on, up to MAX_GPUS in all nodes."""
    num_gpus = start.machine.num_gpus * 2
    while num_gpus * start.machine.num_nodes <= MAX_GPUS:
        yield start.on_gpus(num_gpus)
        num_gpus *= 2
