"""Who may be on the GPU in which phase. The table is in trainer.py; here is the mechanism that enforces it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from hybrid_rl.memory.device import DeviceMemory
from hybrid_rl.memory.residency import Phase
from hybrid_rl.memory.tenants import PooledTenant, Tenant
from hybrid_rl.monitoring.timeline import Timeline

logger = logging.getLogger(__name__)


class PhaseError(RuntimeError):
    """A phase was opened in a state that the residency table forbids."""


class MemoryManager:
    """Opens phases: releases the tenants that the residency table sends away, then restores those it calls in."""

    def __init__(
        self,
        residency: Mapping[str, frozenset[Phase]],
        device: torch.device,
        timeline: Timeline,
        *,
        planned: Mapping[str, Mapping[str, int]] | None = None,
        keeps_cache: bool = False,
    ) -> None:
        """Take charge of a device.

        Args:
            planned: phase -> who -> bytes at its peak, to hold what is measured against.
            keeps_cache: whether PyTorch keeps its free memory from phase to phase, which nobody else will need.
        """
        self.current: Phase | None = None
        self.measured = DeviceMemory(device, timeline, planned or {}, keeps_cache=keeps_cache)
        self._keeps_cache = keeps_cache
        self._tenants: dict[str, Tenant] = {}
        self._expected: dict[str, bool] = {}
        self._residency = residency
        self._device = device
        self._timeline = timeline

    @property
    def stays(self) -> frozenset[str]:
        """The tenants that no phase sends away."""
        return frozenset(name for name, phases in self._residency.items() if phases == frozenset(Phase))

    def admit(self, name: str, tenant: Tenant) -> None:
        """Take charge of a tenant, and release it at once so that the next one can be built in its place.

        Raises:
            PhaseError: the residency table has no row for it, or it was admitted before.
        """
        if name not in self._residency:
            raise PhaseError(f"the residency table has no row for {name}")
        if name in self._tenants:
            raise PhaseError(f"{name} was admitted before")
        self._tenants[name] = tenant
        self._move(name, "release", "build", 0)
        self._empty_cache()

    @contextmanager
    def phase(self, phase: Phase, step: int = 0) -> Iterator[None]:
        """Bring the GPU into the state that the table gives this phase, run the body, keep the state.

        Raises:
            PhaseError: a phase is open already; a tenant moved by itself; a dropped tenant would enter a phase that
                does not fill it.
        """
        if self.current is not None:
            raise PhaseError(f"phase {phase.value} opened inside phase {self.current.value}")
        self._check_states()
        self.current = phase
        try:
            with self._timeline.span(phase.value, phase=phase.value, step=step):
                with self._timeline.span("transition", phase=phase.value, step=step):
                    self._enter(phase, step)
                yield
                self.measured.left(phase.value)
        finally:
            self.current = None

    def _check_states(self) -> None:
        for name, tenant in self._tenants.items():
            if tenant.is_resident != self._expected[name]:
                raise PhaseError(f"tenant {name} is_resident={tenant.is_resident}, left as {self._expected[name]}")

    def _enter(self, phase: Phase, step: int) -> None:
        """Release before restoring, so that the peak is the larger phase and not the sum of two."""
        wanted = {name for name in self._tenants if phase in self._residency[name]}
        entering = [name for name in self._tenants if name in wanted and not self._expected[name]]
        leaving = [name for name in self._tenants if name not in wanted and self._expected[name]]
        for name in entering:
            filled_in = self._tenants[name].filled_in
            if filled_in and filled_in != phase:
                raise PhaseError(f"{name} was dropped and would enter {phase.value} empty: {filled_in.value} fills it")
        pairs = list(zip(*(list(filter(self._is_pooled, names)) for names in (leaving, entering)), strict=False))
        paired = {name for pair in pairs for name in pair}
        for name in leaving:
            if name not in paired:
                self._move(name, "release", phase.value, step)
        if not self._keeps_cache:
            self._empty_cache()
        for out, into in pairs:
            self._exchange(out, into, phase.value, step)
        for name in entering:
            if name not in paired:
                self._move(name, "restore", phase.value, step)
        self.measured.entered(phase.value, step)

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what PyTorch keeps in its free list, the engine process cannot map

    def _is_pooled(self, name: str) -> bool:
        return isinstance(self._tenants[name], PooledTenant)

    def _exchange(self, out: str, into: str, phase: str, step: int) -> None:
        """Move two tenants of the pool in opposite directions at once."""
        leaving, entering = self._tenants[out], self._tenants[into]
        assert isinstance(leaving, PooledTenant) and isinstance(entering, PooledTenant)
        with self._timeline.span(f"exchange {out} for {into}", phase=phase, step=step) as args:
            args["bytes"] = sum(leaving.exchange(entering))
        self._expected |= {out: False, into: True}

    def _move(self, name: str, action: str, phase: str, step: int) -> None:
        tenant = self._tenants[name]
        with self._timeline.span(f"{action} {name}", phase=phase, step=step) as args:
            args["bytes"] = tenant.release() if action == "release" else tenant.restore()
        self._expected[name] = action == "restore"
        if tenant.is_resident != self._expected[name]:
            raise PhaseError(f"tenant {name} says is_resident={tenant.is_resident} after {action}")
