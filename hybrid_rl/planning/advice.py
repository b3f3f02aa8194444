"""Suggests changes of a run's settings or GPUs that make it fit, each checked with the planner."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.models.sequence_parallel import check_head_counts
from hybrid_rl.planning.plan import Machine
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.shapes import Shapes
from hybrid_rl.validate import validate

MAX_GPUS = 64
LORA_RANK = 32


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
        """Return the alternative with one more setting changed, such as update.actor.kind."""
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        config = _with_field(self.config, field.split("."), value)
        return replace(self, config=config, overrides=(*self.overrides, f"--{field} {text}"))

    def on_gpus(self, num_gpus: int) -> "Alternative":
        """Return the alternative with another number of GPUs in every node."""
        machine = replace(self.machine, num_gpus=num_gpus)
        return replace(self, machine=machine, overrides=(*self.overrides, f"--gpus {num_gpus}"))

    def is_valid(self, shapes: Shapes) -> bool:
        """Return whether the settings are consistent and sequence parallelism can divide the models' heads."""
        size = self.config.update.sequence_parallel_size
        try:
            validate(self.config)
            for shape in (shapes.actor, shapes.critic, shapes.reference, shapes.reward):
                if shape:
                    key_heads = shape.key_size // shape.head_size
                    check_head_counts(shape.num_heads, key_heads, size, where=shape.architecture)
        except ConfigError:
            return False
        return True


def _with_field(settings: Any, path: list[str], value: Any) -> Any:
    """Return nested dataclasses with one field replaced."""
    name, *rest = path
    return replace(settings, **{name: _with_field(getattr(settings, name), rest, value) if rest else value})


def find_fitting_alternative(config: Config, machine: Machine, shapes: Shapes) -> Alternative | None:
    """Return the first alternative that fits, or None.

    Single changes come first, then combinations of changes that save memory, then these on more GPUs.
    """
    start = Alternative(config=config, machine=machine)
    for found in (*_single_changes(start), *_combined_changes(start)):
        if found.is_valid(shapes) and not make_plan(found.config, found.machine, shapes).missing_bytes:
            return found
    return None


def describe_alternative(found: Alternative | None) -> str:
    """Return the result of find_fitting_alternative as a sentence."""
    return f"this would fit: {found}" if found else f"nothing that is known here would fit on up to {MAX_GPUS} GPUs"


def _single_changes(start: Alternative) -> Iterator[Alternative]:
    """Yield alternatives with one changed setting, or with more GPUs; those that cost least time come first."""
    yield from _smaller_micro_batches(start)
    yield from _more_sequence_parallel(start)
    yield start.set("models.gradient_checkpointing", True)
    yield start.set("rollout.kv_cache_memory_bytes", None)
    yield start.set("memory.swap", "auto")
    if start.config.update.zero_stage < 3:
        for larger in _more_gpus(start):
            yield larger.set("update.zero_stage", 3)
    yield _optimizers_on_host(start)
    yield start.set("models.lora.rank", LORA_RANK)
    yield from _more_gpus(start)


def _combined_changes(start: Alternative) -> Iterator[Alternative]:
    """Yield changes that save memory, one added after the other, then each combination with ZeRO-3 on more GPUs."""
    smallest = [start, *_smaller_micro_batches(start)][-1]
    checkpointed = smallest.set("models.gradient_checkpointing", True)
    planned_cache = checkpointed.set("rollout.kv_cache_memory_bytes", None)
    swapped = planned_cache.set("memory.swap", "auto")
    on_host = _optimizers_on_host(swapped)
    yield from (checkpointed, planned_cache, swapped, on_host)
    yield swapped.set("models.lora.rank", LORA_RANK)
    for combination in (checkpointed, planned_cache, swapped, on_host):
        for larger in _more_gpus(combination):
            yield larger.set("update.zero_stage", 3)


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
