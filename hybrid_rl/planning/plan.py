"""Who will be on a GPU in which phase, in bytes, before anything loads; whether it fits, and what would make it fit.

The same plan sizes the run: KV cache, tenants that stay because there is room, and the error that refuses to start.
Numbers without a formula are measurements and name their place; estimates say so.
"""

from dataclasses import dataclass, replace
from typing import Literal

from hybrid_rl.config import Config
from hybrid_rl.memory.residency import ROLLOUT, Phase
from hybrid_rl.planning.shapes import ModelShape, read_shape
from hybrid_rl_kernels import dispatch

GIB = 1 << 30
MARGIN = 0.05
"""Share of the card that a plan leaves free: the error that issue 4 aims at, and the allocator's rounding."""

ALWAYS = frozenset(Phase)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run gets."""

    gpu_memory_bytes: int
    num_gpus: int = 1
    """Of a node."""
    num_nodes: int = 1
    backend: Literal["reference", "triton"] = dispatch.SETTING  # type: ignore[assignment]
    """Which log-prob kernels compute."""
    engines_per_gpu: int = 1
    """Engine processes that share the sequences of a GPU."""

    @property
    def num_ranks(self) -> int:
        """GPUs of all nodes."""
        return self.num_gpus * self.num_nodes

    @property
    def budget_bytes(self) -> int:
        """What a plan may use of a GPU."""
        return int(self.gpu_memory_bytes * (1 - MARGIN))


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of the models of a run; None where it has none."""

    actor: ModelShape
    critic: ModelShape | None
    reference: ModelShape | None
    reward: ModelShape | None


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Something that takes memory of every GPU in some phases."""

    name: str
    num_bytes: int
    phases: frozenset[Phase] = ALWAYS
    host_bytes: int = 0
    """Pinned memory of its copy on the host."""
    out_bytes: int = 0
    """Copied to the host in a step."""
    in_bytes: int = 0
    """Copied back in a step."""

    def kept(self) -> "Allocation":
        """Return the allocation of the same tenant when it stays in every phase."""
        return Allocation(name=self.name, num_bytes=self.num_bytes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be where."""

    allocations: tuple[Allocation, ...]
    machine: Machine
    residency: dict[str, frozenset[Phase]]
    """The trainer's table, in which what has room in every phase is in every phase."""
    kv_bytes: int
    """KV cache of all engines of a GPU."""
    kv_tokens: int
    """Tokens that fit in it."""
    max_sequences: int
    """Sequences of full length that fit in it."""
    wave: int
    """Sequences that would be decoded at once if the KV cache had room."""

    def peak(self, phase: Phase) -> int:
        """Return the bytes of a GPU in use at the worst moment of a phase."""
        return sum(allocation.num_bytes for allocation in self.allocations if phase in allocation.phases)

    @property
    def stays(self) -> frozenset[str]:
        """Rows of the residency table that never move."""
        return frozenset(name for name, phases in self.residency.items() if phases == ALWAYS)

    @property
    def peaks(self) -> dict[str, dict[str, int]]:
        """Name of a phase -> name of a allocation -> its bytes at the phase's worst moment."""
        return {
            p.value: {
                allocation.name: allocation.num_bytes for allocation in self.allocations if p in allocation.phases
            }
            for p in Phase
        }

    def sized(self, config: Config) -> Config:
        """Return the config with the exact size of the KV cache, per engine."""
        if config.rollout.kv_cache_memory_bytes is not None:
            return config
        kv_bytes = self.kv_bytes // self.machine.engines_per_gpu
        return replace(config, rollout=replace(config.rollout, kv_cache_memory_bytes=kv_bytes))

    @property
    def has_room_for_cache(self) -> bool:
        """Whether nothing moves, and what the engine takes while it generates has room beside the trainer's peak."""
        moving = [
            allocation
            for allocation in self.allocations
            if allocation.name in self.residency and allocation.phases != ALWAYS
        ]
        generating = sum(allocation.num_bytes for allocation in self.allocations if allocation.phases == {ROLLOUT})
        return not moving and self.peak(self.worst) + generating <= self.machine.budget_bytes

    @property
    def worst(self) -> Phase:
        """The phase with the highest peak."""
        return max(Phase, key=self.peak)

    @property
    def missing_bytes(self) -> int:
        """What the worst phase needs beyond the budget; 0 when all fits and one sequence has a KV cache."""
        return max(0, self.peak(self.worst) - self.machine.budget_bytes)

    @property
    def host_bytes(self) -> int:
        """Pinned memory of a node, all its GPUs together."""
        return self.machine.num_gpus * sum(allocation.host_bytes for allocation in self.allocations)

    @property
    def bus_bytes(self) -> tuple[int, int]:
        """Bytes copied out to the host and back in a step, per GPU."""
        return sum(allocation.out_bytes for allocation in self.allocations), sum(
            allocation.in_bytes for allocation in self.allocations
        )

    def refusal(self) -> str:
        """Return what is missing, where, in words."""
        phase, machine = self.worst, self.machine
        return (
            f"phase {phase.value} needs {self.peak(phase):,} bytes ({self.peak(phase) / GIB:.1f} GiB) of each GPU, but "
            f"{machine.budget_bytes:,} ({machine.budget_bytes / GIB:.1f} GiB) are available, {MARGIN:.0%} of the card "
            "left free"
        )


def read_shapes(config: Config) -> Shapes:
    """Read the sizes of all models of a run from their folders.

    Raises:
        ConfigError: a folder holds no model.
    """
    paths = config.models
    critic, reference = paths.critic or paths.reward or paths.actor, paths.reference or paths.actor
    needs_reference = config.has_reference and not config.reference_is_actor
    return Shapes(
        actor=read_shape(paths.actor, field="models.actor", is_policy=True),
        reward=read_shape(paths.reward, field="models.reward", is_policy=False) if paths.reward else None,
        critic=read_shape(critic, field="models.critic", is_policy=False) if config.has_critic else None,
        reference=read_shape(reference, field="models.reference", is_policy=True) if needs_reference else None,
    )
