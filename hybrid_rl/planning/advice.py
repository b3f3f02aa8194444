"""What would make a run fit: a short list of changes, each tried with the planner itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid_rl.config import Config, ConfigError, check
from hybrid_rl.distributed import World
from hybrid_rl.memory.device import available_bytes
from hybrid_rl.memory.residency import Phase
from hybrid_rl.models.sequence_parallel import check_head_counts
from hybrid_rl.planning.plan import GIB, Machine, Plan, Shapes, read_shapes
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.validate import validate

MAX_GPUS = 64
LORA_RANK = 32


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that differ from what was asked for."""

    config: Config
    machine: Machine
    overrides: tuple[str, ...] = ()
    """As on the command line."""

    def __str__(self) -> str:
        return " ".join(self.overrides)

    def set(self, field: str, value: Any) -> "Change":
        """Return the change with one more field set, such as update.actor.kind."""
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        config = _with(self.config, field.split("."), value)
        return replace(self, config=config, overrides=(*self.overrides, f"--{field} {text}"))

    def on_gpus(self, num_gpus: int) -> "Change":
        """Return the change with more GPUs in every node."""
        machine = replace(self.machine, num_gpus=num_gpus)
        return replace(self, machine=machine, overrides=(*self.overrides, f"--gpus {num_gpus}"))


def _with(settings: Any, path: list[str], value: Any) -> Any:
    """Return nested dataclasses with one field replaced."""
    name, *rest = path
    return replace(settings, **{name: _with(getattr(settings, name), rest, value) if rest else value})


def suggest(
    config: Config, machine: Machine, shapes: Shapes, residency: Mapping[str, frozenset[Phase]]
) -> Change | None:
    """Return the first change that fits: one setting, else several that save memory, else these on more GPUs."""
    start = Change(config=config, machine=machine)
    for change in (*_singles(start), *_combined(start)):
        try:
            validate(change.config)
            _check_heads(change.config, shapes)
        except ConfigError:
            continue
        if not make_plan(change.config, change.machine, shapes, residency).missing_bytes:
            return change
    return None


def check_plan(plan: Plan, config: Config, shapes: Shapes, residency: Mapping[str, frozenset[Phase]]) -> None:
    """Raise unless the plan fits.

    Raises:
        ConfigError: names phase, wanted and available bytes, and what would fit.
    """
    if plan.missing_bytes:
        change = suggest(config, plan.machine, shapes, residency)
        check(False, f"{plan.refusal()}; {advice(change)}")


def plan_run(config: Config, world: World, residency: Mapping[str, frozenset[Phase]]) -> Plan:
    """Return the plan of the run that these ranks are about to start; the same on every rank.

    On a CPU nothing is bounded and nothing moves; a KV cache gets at least a GiB there, for its blocks are larger.

    Raises:
        ConfigError: it does not fit, see check_plan; a folder holds no model.
    """
    if world.device.type == "cpu":
        memory = replace(config.memory, swap="off")
        dtype = "float32" if config.models.dtype == "auto" else config.models.dtype
        config = replace(config, memory=memory, models=replace(config.models, dtype=dtype))
    available = min(world.all_gather(available_bytes(world.device)))
    machine, shapes = Machine(gpu_memory_bytes=available, num_gpus=world.size), read_shapes(config)
    size, heads = config.rollout.tensor_parallel_size, shapes.actor.num_heads
    check(heads % size == 0, f"rollout.tensor_parallel_size = {size}: must divide the actor's {heads} attention heads")
    plan = make_plan(config, machine, shapes, residency)
    check_plan(plan, config, shapes, residency)
    return replace(plan, kv_bytes=max(plan.kv_bytes, GIB)) if world.device.type == "cpu" else plan


def advice(change: Change | None) -> str:
    """Return a suggestion in words."""
    return f"this would fit: {change}" if change else f"nothing that is known here would fit on up to {MAX_GPUS} GPUs"


def _check_heads(config: Config, shapes: Shapes) -> None:
    for shape in (shapes.actor, shapes.critic, shapes.reference, shapes.reward):
        if shape:
            size, key_heads = config.update.sequence_parallel_size, shape.key_size // shape.head_size
            check_head_counts(shape.num_heads, key_heads, size, where=shape.architecture)


def _singles(start: Change) -> Iterator[Change]:
    """Yield changes of one setting, the cheapest in time first."""
    update = start.config.update
    yield from _smaller_batches(start)
    yield from _shared_tokens(start)
    yield start.set("models.gradient_checkpointing", True)
    yield start.set("rollout.kv_cache_memory_bytes", None)
    yield start.set("memory.swap", "auto")
    if update.zero_stage < 3:
        for change in _more_gpus(start):
            yield change.set("update.zero_stage", 3)
    yield _on_host(start)
    yield start.set("models.lora.rank", LORA_RANK)
    yield from _more_gpus(start)


def _combined(start: Change) -> Iterator[Change]:
    """Yield all that saves memory on these GPUs, added one by one, then each of it on more GPUs."""
    change = [start, *_smaller_batches(start)][-1]
    found = []
    for field, value in (
        ("models.gradient_checkpointing", True),
        ("rollout.kv_cache_memory_bytes", None),
        ("memory.swap", "auto"),
        ("models.lora.rank", LORA_RANK),
    ):
        change = change.set(field, value)
        found.append(change)
    found.insert(3, _on_host(found[2]))
    yield from found
    for change in found[:4]:
        for larger in _more_gpus(change):
            yield larger.set("update.zero_stage", 3)


def _smaller_batches(start: Change) -> Iterator[Change]:
    """Yield half the tokens of a micro-batch, and half again, as long as one sequence fits."""
    config = start.config
    least = config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
    if config.ptx.path:
        least = max(least, config.ptx.max_tokens)
    tokens = config.update.micro_batch_tokens // 2
    while tokens >= least:
        yield start.set("update.micro_batch_tokens", tokens)
        tokens //= 2


def larger_batches(start: Change) -> Iterator[Change]:
    """Yield twice the tokens of a micro-batch, and twice again, until ranks that share one have all of theirs in it."""
    config, update = start.config, start.config.update
    length = config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
    sharers = update.sequence_parallel_size * update.tensor_parallel_size
    most = sharers * update.mini_batch_size * length // start.machine.num_ranks
    tokens = update.micro_batch_tokens
    while tokens < most:
        tokens *= 2
        yield start.set("update.micro_batch_tokens", tokens)


def _shared_tokens(start: Change) -> Iterator[Change]:
    """Yield two GPUs of a node that share the tokens of a micro-batch, and twice as many, as long as these fill it."""
    size = 2
    while start.machine.num_gpus % size == 0:
        yield start.set("update.sequence_parallel_size", size)
        size *= 2


def _on_host(start: Change) -> Change:
    change = start.set("update.actor.kind", "cpu_adam")
    return change.set("update.critic.kind", "cpu_adam") if start.config.has_critic else change


def _more_gpus(start: Change) -> Iterator[Change]:
    num_gpus = start.machine.num_gpus * 2
    while num_gpus * start.machine.num_nodes <= MAX_GPUS:
        yield start.on_gpus(num_gpus)
        num_gpus *= 2
