"""Memory at the moments of a start: while the engine starts and one model after the other loads."""

from collections.abc import Iterable

from hybrid_rl.memory.residency import ALL_PHASES, RESIDENCY, ROLLOUT
from hybrid_rl.planning.footprint import Footprint
from hybrid_rl.planning.model_shape import ModelShape
from hybrid_rl.planning.plan import Allocation, Moment
from hybrid_rl.planning.saving import ema_bytes
from hybrid_rl.planning.training_memory import frozen_bytes, gathered_bytes, num_trained, trained_footprint
from hybrid_rl.planning.workload import Workload


def loading_moments(work: Workload, allocations: Iterable[Allocation]) -> tuple[Moment, ...]:
    """Return the moments of a start, in the order of hybrid_rl.build.

    With ZeRO-3 each rank reads its shards of actor and critic, and so it does of frozen models that are sharded. Any
    other model loads whole on every rank, first in host memory and then on the GPU, where tensor parallelism shards it.
    The pinned host memory of all tenants, and that of a moving average, count from the beginning on.

    Args:
        work: settings and size of a step.
        allocations: all allocations of the plan, with the tenants that stay resident in every phase.
    """
    start = _Start(work, list(allocations))
    shapes = work.shapes
    moments = [start.actor_in_buffer(), start.engine()] if work.aliases_weights else [start.engine()]
    moments.append(start.training_engine("actor", shapes.actor))
    if shapes.critic:
        moments.append(start.training_engine("critic", shapes.critic))
    for name, shape in {"reference": shapes.reference, "reward_model": shapes.reward}.items():
        if shape:
            moments.append(start.frozen(name, shape))
    return tuple(moments)


class _Start:
    """The state of a start: which tenants are built."""

    def __init__(self, work: Workload, allocations: list[Allocation]) -> None:
        self._work = work
        self._allocations = allocations
        self._built: set[str] = set()
        self._has_engine = False
        self._pinned = sum(allocation.host_bytes for allocation in allocations)

    def actor_in_buffer(self) -> Moment:
        """Return the moment at which the actor moves through host memory into the buffer that the engine shares."""
        actor = self._whole(self._work.shapes.actor)
        return self._moment("actor, moved into the shared buffer", actor, host_bytes=actor)

    def engine(self) -> Moment:
        """Return the start of the rollout engine, which tries a full batch and takes its KV cache."""
        self._has_engine = True
        own = [a for a in self._allocations if a.name in ("engine_weights", "engine_kv_cache") or a.phases == {ROLLOUT}]
        aliased = self._whole(self._work.shapes.actor) if self._work.aliases_weights else 0
        moment = self._moment("rollout engine", sum(a.num_bytes for a in own) + aliased, host_bytes=0)
        self._built |= {"engine_weights", "engine_kv_cache"}
        return moment

    def training_engine(self, name: str, shape: ModelShape) -> Moment:
        """Return the moment at which `actor` or `critic` loads, or DeepSpeed makes its optimizer; see trained_bytes."""
        part, work = trained_footprint(self._work, name), self._work
        assert part is not None
        if work.config.update.zero_stage == 3:
            loaded = part.parameter_bytes + gathered_bytes(work, shape)
            shards = work.dtype_bytes * num_trained(work, shape) // work.machine.num_ranks
            host = max(self._reading(shape), shards)  # DeepSpeed moves the shards through the host into flat buffers
        else:
            whole = self._whole(shape)
            loaded = whole + part.parameter_bytes * (part.parameter_bytes < whole)
            host = 0 if name == "actor" and work.aliases_weights else whole  # an aliased actor is loaded already
        moment = self._moment(name, trained_bytes(loaded, part), host_bytes=host)
        self._built |= {f"{name}_parameters", f"{name}_optimizer"}
        return moment

    def frozen(self, name: str, shape: ModelShape) -> Moment:
        """Return the moment at which a model that is not trained is on the GPU, whole or sharded."""
        work, is_sharded = self._work, self._work.shards_frozen
        num_bytes = frozen_bytes(work, shape) + (gathered_bytes(work, shape) if is_sharded else 0)
        host = self._reading(shape) if is_sharded else self._whole(shape)
        moment = self._moment(name.replace("_", " "), num_bytes, host_bytes=host)
        self._built.add(name)
        return moment

    def _whole(self, shape: ModelShape) -> int:
        return self._work.dtype_bytes * shape.num_params

    def _reading(self, shape: ModelShape) -> int:
        """Return the host memory in which a rank converts the weights that it reads: a unit before and after."""
        return 2 * self._work.dtype_bytes * shape.largest_unit

    def _moment(self, name: str, num_bytes: int, *, host_bytes: int) -> Moment:
        """Return a moment at which `num_bytes` are on each GPU, and `host_bytes` on the host, besides what is there."""
        return Moment(
            name=name,
            gpu_bytes=num_bytes + sum(a.num_bytes for a in self._allocations if self._is_there(a)),
            host_bytes=self._work.machine.num_gpus * (self._pinned + host_bytes) + ema_bytes(self._work),
        )

    def _is_there(self, allocation: Allocation) -> bool:
        """Return whether an allocation of every phase exists already."""
        if allocation.name in RESIDENCY and allocation.name not in self._built:
            return False
        if allocation.name in ("engine context", "staging bucket") and not self._has_engine:
            return False
        return allocation.phases == ALL_PHASES


def trained_bytes(loaded_bytes: int, part: Footprint) -> int:
    """Return the bytes of a training engine on a GPU when it is made.

    They are the larger of two sums: what loading takes, and the parameters with the optimizer's states and the
    gradients with which DeepSpeed creates them.

    Args:
        loaded_bytes: bytes while the model loads.
        part: the engine's footprint.
    """
    return max(loaded_bytes, part.parameter_bytes + part.optimizer_bytes + part.initial_gradient_bytes)
