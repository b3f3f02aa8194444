"""The plan of a run: the allocations on each GPU in each phase, in bytes, and whether they fit."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hybrid_rl.config import Config
from hybrid_rl.memory.residency import ALL_PHASES, ROLLOUT, Phase, TenantSpec, always_resident
from hybrid_rl.planning.cards import Card
from hybrid_rl_kernels import dispatch

GIB = 1 << 30
MARGIN = 0.05
"""Fraction of a GPU's memory that a plan leaves free, for its own error and the allocator's rounding."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of a run."""

    gpu_memory_bytes: int
    num_gpus: int = 1
    """GPUs of a node."""
    num_nodes: int = 1
    backend: Literal["reference", "triton"] = dispatch.SETTING  # type: ignore[assignment]
    """Kernels that compute log-probs; `triton` means a GPU."""
    card: Card | None = None
    """Model of the GPUs; None if it is not known, and seconds cannot be predicted."""
    host_memory_bytes: int | None = None
    """Memory of a node; None if it is not known, and only what the run takes can be said."""

    @property
    def num_ranks(self) -> int:
        """GPUs of all nodes."""
        return self.num_gpus * self.num_nodes

    @property
    def budget_bytes(self) -> int:
        """Bytes of a GPU that a plan may use."""
        return int(self.gpu_memory_bytes * (1 - MARGIN))


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Memory of every GPU for one purpose, in some phases."""

    name: str
    num_bytes: int
    phases: frozenset[Phase] = ALL_PHASES
    host_bytes: int = 0
    """Pinned host memory of its copy."""
    out_bytes: int = 0
    """Bytes copied to the host in a step."""
    in_bytes: int = 0
    """Bytes copied to the device in a step."""

    def in_every_phase(self) -> "Allocation":
        """Return the allocation of the same tenant when no phase releases it."""
        return Allocation(name=self.name, num_bytes=self.num_bytes)


def peak_bytes(allocations: Iterable[Allocation], phase: Phase) -> int:
    """Return the bytes of all allocations of a phase."""
    return sum(allocation.num_bytes for allocation in allocations if phase in allocation.phases)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Memory at a moment of the start or of saving, when no phase computes."""

    name: str
    gpu_bytes: int
    """Bytes in use on each GPU."""
    host_bytes: int
    """Bytes of a node's memory: pinned copies of all its GPUs, and what each of its ranks loads or saves."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The allocations on each GPU of a run, and the size of the KV cache."""

    allocations: tuple[Allocation, ...]
    machine: Machine
    residency: dict[str, TenantSpec]
    """The residency table of the run: tenants with room in every phase are resident in every phase."""
    kv_bytes: int
    """Size of the KV cache."""
    kv_tokens: int
    """Tokens that the KV cache holds."""
    kv_sequences: int
    """Sequences of full length that the KV cache holds."""
    max_concurrent_sequences: int
    """Sequences that the engine would decode at once if the KV cache had room."""
    loading: tuple[Moment, ...] = ()
    """The moments of the start, in order."""
    saving: tuple[Moment, ...] = ()
    """The moments at which checkpoints and exports are written."""
    shards_frozen: bool = False
    """Whether the ranks divide the parameters of reference and reward model; see models.shard_frozen."""

    def peak(self, phase: Phase) -> int:
        """Return the bytes of a GPU in use at the peak of a phase."""
        return peak_bytes(self.allocations, phase)

    @property
    def always_resident(self) -> frozenset[str]:
        """Names of the tenants that no phase releases."""
        return always_resident(self.residency)

    @property
    def peaks(self) -> dict[str, dict[str, int]]:
        """Name of a phase -> name of an allocation -> its bytes at the phase's peak."""
        return {
            phase.value: {
                allocation.name: allocation.num_bytes for allocation in self.allocations if phase in allocation.phases
            }
            for phase in Phase
        }

    def sized(self, config: Config) -> Config:
        """Return the config with rollout.kv_cache_memory_bytes set to the planned size, unless it is set."""
        if config.rollout.kv_cache_memory_bytes is not None:
            return config
        return replace(config, rollout=replace(config.rollout, kv_cache_memory_bytes=self.kv_bytes))

    @property
    def can_keep_cache(self) -> bool:
        """Whether PyTorch's allocator may keep its free memory from phase to phase.

        It may if no tenant moves, and the fullest phase has room for the engine's memory of the ROLLOUT phase as well.
        """
        is_static = all(a.phases == ALL_PHASES for a in self.allocations if a.name in self.residency)
        generating = sum(a.num_bytes for a in self.allocations if a.phases == {ROLLOUT})
        return is_static and self.peak(self.fullest_phase) + generating <= self.machine.budget_bytes

    @property
    def fullest_phase(self) -> Phase:
        """The phase with the highest peak."""
        return max(Phase, key=self.peak)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments of the start and of saving."""
        return self.loading + self.saving

    @property
    def moment_bytes(self) -> int:
        """Bytes of a GPU in use at the fullest moment of the start or of saving."""
        return max((moment.gpu_bytes for moment in self.moments), default=0)

    @property
    def peak_host_bytes(self) -> int:
        """Bytes of a node's memory in use at the fullest moment of the start or of saving."""
        return max((moment.host_bytes for moment in self.moments), default=self.host_bytes)

    @property
    def missing_bytes(self) -> int:
        """Bytes that the fullest phase or moment needs beyond the budget of a GPU; 0 if the plan fits."""
        needed = max(self.peak(self.fullest_phase), self.moment_bytes)
        return max(0, needed - self.machine.budget_bytes)

    @property
    def missing_host_bytes(self) -> int:
        """Bytes that the fullest moment needs beyond a node's memory; 0 if it fits, or if the memory is not known."""
        available = self.machine.host_memory_bytes
        return 0 if available is None else max(0, self.peak_host_bytes - available)

    @property
    def fits(self) -> bool:
        """Whether the plan fits on the GPUs and, where the memory of a node is known, in it."""
        return not self.missing_bytes and not self.missing_host_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of all GPUs of a node."""
        return self.machine.num_gpus * sum(allocation.host_bytes for allocation in self.allocations)

    @property
    def bus_bytes(self) -> int:
        """Bytes of a step that a GPU copies to and from the host."""
        return sum(allocation.out_bytes + allocation.in_bytes for allocation in self.allocations)

    def shortage(self) -> str:
        """Return a sentence about what does not fit: the bytes that it needs and has."""
        return self._host_shortage() if self.missing_host_bytes else self._gpu_shortage()

    def _gpu_shortage(self) -> str:
        phase, machine, needed = self.fullest_phase, self.machine, self.peak(self.fullest_phase)
        what = f"phase {phase.value} needs"
        if self.moment_bytes > needed:
            fullest = max(self.moments, key=lambda moment: moment.gpu_bytes)
            what, needed = f"{self._when(fullest)} needs", fullest.gpu_bytes
        return (
            f"{what} {needed:,} bytes ({needed / GIB:.1f} GiB) of each GPU, but "
            f"{machine.budget_bytes:,} ({machine.budget_bytes / GIB:.1f} GiB) are available, {MARGIN:.0%} of the card "
            "left free"
        )

    def _host_shortage(self) -> str:
        fullest = max(self.moments, key=lambda moment: moment.host_bytes)
        needed, available = fullest.host_bytes, self.machine.host_memory_bytes or 0
        return (
            f"{self._when(fullest)} needs {needed:,} bytes ({needed / GIB:.1f} GiB) of host memory per node, but "
            f"{available:,} ({available / GIB:.1f} GiB) are there"
        )

    def _when(self, moment: Moment) -> str:
        return f"the start, at {moment.name}," if moment in self.loading else f"saving, at {moment.name},"
