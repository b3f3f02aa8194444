"""Memory at the moments of a start: while the engine starts and one model after the other loads."""

from collections.abc import Iterable

from hybrid_rl.memory.residency import ALL_PHASES, RESIDENCY, ROLLOUT
from hybrid_rl.planning.footprint import Footprint
from hybrid_rl.planning.model_shape import ModelShape
from hybrid_rl.planning.plan import Allocation, Moment
from hybrid_rl.planning.training_memory import trained_footprint
from hybrid_rl.planning.workload import Workload


def loading_moments(work: Workload, allocations: Iterable[Allocation]) -> tuple[Moment, ...]:
    """Return the moments of a start, in the order of hybrid_rl.build.

    A model loads whole on every rank: first in host memory, then on the GPU, where ZeRO-3 and tensor parallelism shard
    it. The pinned host memory of all tenants is taken from the beginning on.

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
        """Return the moment at which the actor lies on the GPU twice: as it was loaded, and in the shared buffer."""
        actor = self._whole(self._work.shapes.actor)
        return self._moment("actor, copied into the shared buffer", 2 * actor, self._work.shapes.actor)

    def engine(self) -> Moment:
        """Return the start of the rollout engine, which tries a full batch and takes its KV cache."""
        self._has_engine = True
        own = [a for a in self._allocations if a.name in ("engine_weights", "engine_kv_cache") or a.phases == {ROLLOUT}]
        aliased = self._whole(self._work.shapes.actor) if self._work.aliases_weights else 0
        moment = self._moment("rollout engine", sum(a.num_bytes for a in own) + aliased, None)
        self._built |= {"engine_weights", "engine_kv_cache"}
        return moment

    def training_engine(self, name: str, shape: ModelShape) -> Moment:
        """Return the moment at which DeepSpeed makes the optimizer of `actor` or `critic`; see trained_bytes."""
        part = trained_footprint(self._work, name)
        assert part is not None
        is_sharded = part.parameter_bytes < self._whole(shape)
        moment = self._moment(name, trained_bytes(self._whole(shape), part, is_sharded=is_sharded), shape)
        self._built |= {f"{name}_parameters", f"{name}_optimizer"}
        return moment

    def frozen(self, name: str, shape: ModelShape) -> Moment:
        """Return the moment at which a model that is not trained is on the GPU; nothing shards it."""
        moment = self._moment(name.replace("_", " "), self._whole(shape), shape)
        self._built.add(name)
        return moment

    def _whole(self, shape: ModelShape) -> int:
        return self._work.dtype_bytes * shape.num_params

    def _moment(self, name: str, num_bytes: int, loaded: ModelShape | None) -> Moment:
        """Return a moment at which `num_bytes` are on each GPU besides what is there already."""
        in_host = self._whole(loaded) if loaded else 0
        return Moment(
            name=name,
            gpu_bytes=num_bytes + sum(a.num_bytes for a in self._allocations if self._is_there(a)),
            host_bytes=self._work.machine.num_gpus * (self._pinned + in_host),
        )

    def _is_there(self, allocation: Allocation) -> bool:
        """Return whether an allocation of every phase exists already."""
        if allocation.name in RESIDENCY and allocation.name not in self._built:
            return False
        if allocation.name in ("engine context", "staging bucket") and not self._has_engine:
            return False
        return allocation.phases == ALL_PHASES


def trained_bytes(whole_bytes: int, part: Footprint, *, is_sharded: bool) -> int:
    """Return the bytes of a training engine on a GPU when it is made.

    They are the larger of two sums: the whole model and its shard, and the parameters with the optimizer's states and
    the gradients with which DeepSpeed creates them, 4 T / W.

    Args:
        whole_bytes: parameters of the unsharded model.
        part: the engine's footprint.
        is_sharded: whether ranks divide the parameters.
    """
    sharding = whole_bytes + part.parameter_bytes * is_sharded
    return max(sharding, part.parameter_bytes + part.optimizer_bytes + part.initial_gradient_bytes)
