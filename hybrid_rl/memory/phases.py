"""The memory manager: opens phases and moves each tenant to where the residency table places it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from hybrid_rl.memory.device import DeviceMemory
from hybrid_rl.memory.enforcement import Enforcement
from hybrid_rl.memory.residency import Phase, TenantSpec, always_resident
from hybrid_rl.memory.tenants import PooledTenant, Tenant
from hybrid_rl.monitoring.timeline import Timeline


class PhaseError(RuntimeError):
    """A phase or a tenant is in a state that the residency table forbids."""


class MemoryManager:
    """Opens phases: releases the tenants that the residency table excludes, then restores those that it includes."""

    def __init__(
        self,
        residency: Mapping[str, TenantSpec],
        device: torch.device,
        timeline: Timeline,
        *,
        planned: Mapping[str, Mapping[str, int]] | None = None,
        keeps_cache: bool = False,
        enforcement: Enforcement | None = None,
    ) -> None:
        """Start without tenants.

        Args:
            residency: the residency table; a tenant is admitted under a name of it.
            device: device of the tenants' memory.
            timeline: receives a span for every phase, transition and move.
            planned: phase -> allocation -> planned bytes at the phase's peak, to compare measurements with.
            keeps_cache: whether PyTorch's allocator keeps its free memory from phase to phase, because nothing else
                needs it.
            enforcement: compares each measurement with its plan; None does not.
        """
        self.current: Phase | None = None
        self.device_memory = DeviceMemory(
            device, timeline, planned or {}, keeps_cache=keeps_cache, enforcement=enforcement
        )
        self._keeps_cache = keeps_cache
        self._tenants: dict[str, Tenant] = {}
        self._is_resident: dict[str, bool] = {}
        self._residency = residency
        self._device = device
        self._timeline = timeline

    @property
    def always_resident(self) -> frozenset[str]:
        """Names of the tenants that no phase releases."""
        return always_resident(self._residency)

    def admit(self, name: str, tenant: Tenant) -> None:
        """Take charge of a tenant and release it at once, so that the next one can be built in its place.

        Raises:
            PhaseError: the residency table has no such tenant, or it was admitted before.
        """
        if name not in self._residency:
            raise PhaseError(f"the residency table has no tenant named {name}; it has {', '.join(self._residency)}")
        if name in self._tenants:
            raise PhaseError(f"tenant {name} was admitted before")
        self._tenants[name] = tenant
        self.device_memory.record_loading(name)
        self._release(name, "build", 0)
        self._empty_cache()

    @contextmanager
    def phase(self, phase: Phase, step: int = 0) -> Iterator[None]:
        """Move all tenants to where the table places them in a phase, and run the body; they remain there afterwards.

        Raises:
            PhaseError: a phase is open; a tenant moved outside of the manager; a tenant whose contents were dropped
                would be restored in a phase that does not fill it.
            RunError: memory.enforce = stop, and the phase took more than its plan.
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
                self.device_memory.record_peak(phase.value)
        finally:
            self.current = None

    def replace(self, names: Sequence[str], make: Callable[[], None], *, step: int) -> None:
        """Release all other tenants, call a function that makes the named ones anew, and release these as `admit` does.

        Args:
            names: tenants whose memory is lost; they may be in any state.
            make: occupies the memory of the named tenants.
            step: step for the timeline.

        Raises:
            PhaseError: a phase is open.
        """
        if self.current is not None:
            raise PhaseError(f"tenants are replaced inside phase {self.current.value}")
        for name in self._tenants:
            if name not in names and self._is_resident[name]:
                self._release(name, "replace", step)
        self._empty_cache()
        make()
        for name in names:
            self._release(name, "replace", step)
        self._empty_cache()

    def _check_states(self) -> None:
        for name, tenant in self._tenants.items():
            expected = self._is_resident[name]
            if tenant.is_resident != expected:
                raise PhaseError(f"tenant {name} is_resident={tenant.is_resident}, the manager left it at {expected}")

    def _enter(self, phase: Phase, step: int) -> None:
        """Release, exchange, then restore tenants, so that the peak is the larger phase and not the sum of two."""
        wanted = {name for name in self._tenants if phase in self._residency[name].phases}
        leaving = [name for name in self._tenants if self._is_resident[name] and name not in wanted]
        entering = [name for name in self._tenants if not self._is_resident[name] and name in wanted]
        self._check_contents(entering, phase)
        exchanges = self._pair_pooled(leaving, entering)
        exchanged = {name for pair in exchanges for name in pair}
        for name in leaving:
            if name not in exchanged:
                self._release(name, phase.value, step)
        if not self._keeps_cache:
            self._empty_cache()
        for out, into in exchanges:
            self._exchange(out, into, phase.value, step)
        for name in entering:
            if name not in exchanged:
                self._restore(name, phase.value, step)
        self.device_memory.record_start(phase.value, step)

    def _check_contents(self, entering: Sequence[str], phase: Phase) -> None:
        """Refuse to restore a tenant whose contents were dropped, except in the phase that fills it."""
        for name in entering:
            filled_in = self._tenants[name].filled_in
            if filled_in and filled_in != phase:
                raise PhaseError(f"{name} was dropped and would enter {phase.value} empty: {filled_in.value} fills it")

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the engine's process cannot map memory that PyTorch's allocator keeps

    def _pair_pooled(self, leaving: Sequence[str], entering: Sequence[str]) -> list[tuple[str, str]]:
        """Return pairs of a leaving and an entering tenant of the pool, which can be copied at the same time."""
        pooled_out, pooled_in = (
            [name for name in names if isinstance(self._tenants[name], PooledTenant)] for names in (leaving, entering)
        )
        return list(zip(pooled_out, pooled_in, strict=False))

    def _exchange(self, out: str, into: str, phase: str, step: int) -> None:
        """Release tenant `out` and restore tenant `into`, copying in both directions at once."""
        leaving, entering = self._tenants[out], self._tenants[into]
        assert isinstance(leaving, PooledTenant) and isinstance(entering, PooledTenant)
        with self._timeline.span(f"exchange {out} for {into}", phase=phase, step=step) as args:
            args["bytes"] = sum(leaving.exchange(entering))
        self._record_state(out, is_resident=False)
        self._record_state(into, is_resident=True)

    def _release(self, name: str, phase: str, step: int) -> None:
        with self._timeline.span(f"release {name}", phase=phase, step=step) as args:
            args["bytes"] = self._tenants[name].release()
        self._record_state(name, is_resident=False)

    def _restore(self, name: str, phase: str, step: int) -> None:
        with self._timeline.span(f"restore {name}", phase=phase, step=step) as args:
            args["bytes"] = self._tenants[name].restore()
        self._record_state(name, is_resident=True)

    def _record_state(self, name: str, *, is_resident: bool) -> None:
        """Remember where a tenant is after a move, and check that it says the same.

        Raises:
            PhaseError: the tenant did not move.
        """
        self._is_resident[name] = is_resident
        if self._tenants[name].is_resident != is_resident:
            action = "restore" if is_resident else "release"
            raise PhaseError(f"tenant {name} says is_resident={not is_resident} after {action}")
