"""What a GPU's memory is used for: settings of PyTorch's allocator, free memory, and measurements around each phase."""

import os
from collections.abc import Mapping

import torch

from hybrid_rl.machine.allocator import ALLOCATOR_VARIABLES, SWITCHED
from hybrid_rl.memory.enforcement import Enforcement
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl_kernels.vmm_pool import released_bytes

OWN_CONTEXT_BYTES = 1 << 30
"""Upper estimate of what this process itself holds before it loads a model."""


def used_by_process(device: torch.device) -> dict[int, int]:
    """Return process id -> bytes on a GPU as the driver counts them; empty if the driver does not list this process.

    Inside a container, the driver may use other process ids or list no processes.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()))
    finally:
        pynvml.nvmlShutdown()
    used = {p.pid: p.usedGpuMemory for p in processes if p.usedGpuMemory is not None}
    return used if os.getpid() in used else {}


def available_bytes(device: torch.device) -> int:
    """Return the GPU memory that no other process holds; practically unlimited on a CPU."""
    if device.type == "cpu":
        return 1 << 60
    free, total = torch.cuda.mem_get_info(device)
    return min(total, free + OWN_CONTEXT_BYTES)


def _foreign_bytes(device: torch.device) -> int:
    """Return the GPU memory that other processes hold, for which a plan leaves room; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[1] - available_bytes(device) if device.type == "cuda" else 0


def without_expandable_segments(value: str) -> str:
    """Return an allocator setting of PyTorch without its expandable_segments part."""
    return ",".join(part for part in value.split(",") if part.strip().split(":")[0].strip() != SWITCHED)


def grow_segments(device: torch.device, *, is_on: bool) -> None:
    """Turn PyTorch's expandable segments on or off for later allocations, and keep the user's other settings.

    Off while a run is built: memory that the engine's process opens must be one allocation of the driver. On during
    the phases: gradients in the place of freed activations would otherwise leave fragments that no activation fits
    in. Tensors in a VmmPool have their own allocator.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        others = [without_expandable_segments(os.environ.get(name, "")) for name in ALLOCATOR_VARIABLES]
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [*others, f"expandable_segments:{is_on}"])))


class DeviceMemory:
    """Measures the memory in use on a GPU, by all processes, at the start and at the peak of each phase.

    PyTorch keeps what it has reserved until the next phase begins, so the memory in use at the end of a phase is the
    phase's peak; the engine's memory is constant while it generates. On a CPU nothing is measured.
    """

    def __init__(
        self,
        device: torch.device,
        timeline: Timeline,
        planned: Mapping[str, Mapping[str, int]],
        *,
        keeps_cache: bool = False,
        enforcement: Enforcement | None = None,
    ) -> None:
        """Start without measurements, before this process has loaded a model.

        Args:
            device: device to measure.
            timeline: receives the measurements as counters.
            planned: phase -> allocation -> planned bytes at the phase's peak.
            keeps_cache: whether PyTorch's allocator keeps reserved memory across phases. If so, the peak of its
                allocated tensors counts, because reserved memory includes tensors of other phases.
            enforcement: compares each peak with its plan; None does not.
        """
        self._planned = planned
        self._keeps_cache = keeps_cache
        self._enforcement = enforcement
        self._device = device
        self._foreign_bytes = _foreign_bytes(device)
        self._timeline = timeline
        self._start_bytes: dict[str, int] = {}
        self._peak_bytes: dict[str, int] = {}
        self._step = 0

    def record_start(self, phase: str, step: int) -> None:
        """Measure the memory in use once all tenants of a phase are in place."""
        if self._device.type == "cuda":
            if step != self._step:
                self._step, self._peak_bytes = step, {}
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start_bytes[phase] = self._measure()
            if phase in self._planned:
                self._timeline.counter("device_memory_plan", **self._planned[phase])

    def record_loading(self, tenant: str) -> None:
        """Measure the most memory that building a tenant has needed, before it is released; for the timeline only.

        What PyTorch's allocator has reserved and never used at once does not count.
        """
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device)
            self._timeline.counter("device_memory_loading", **{tenant: total - free - unused - self._foreign_bytes})
            torch.cuda.reset_peak_memory_stats(self._device)

    def record_peak(self, phase: str) -> None:
        """Measure the memory in use before a phase frees any; keeps the maximum if a step opens the phase twice.

        Raises:
            RunError: memory.enforce = stop, and the phase took more than its plan.
        """
        if self._device.type == "cuda":
            used = self._measure()
            self._peak_bytes[phase] = max(self._peak_bytes.get(phase, 0), used)
            if self._enforcement and phase in self._planned:
                self._enforcement.compare(phase, self._planned[phase], used - self._foreign_bytes)

    def _measure(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        used = total - free
        reserved = torch.cuda.memory_reserved(self._device) - released_bytes()
        if self._keeps_cache:
            unused = torch.cuda.memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device)
            used, reserved = used - unused, reserved - unused
        self._timeline.counter("device_memory", used=used, trainer=reserved)
        by_process = used_by_process(self._device)
        if by_process:
            trainer = by_process.pop(os.getpid())
            engines = {f"engine_{pid}": num_bytes for pid, num_bytes in sorted(by_process.items())}
            self._timeline.counter("device_memory_by_owner", trainer=trainer, **engines)
        return used

    def metrics(self) -> dict[str, float]:
        """Return the bytes at the start and at the peak of each phase, and the peak's relative error of the plan."""
        metrics: dict[str, float] = {f"memory/{phase}_bytes": used for phase, used in self._start_bytes.items()}
        for phase, peak in self._peak_bytes.items():
            metrics[f"memory/{phase}_peak_bytes"] = peak
            if phase in self._planned:
                metrics[f"memory/{phase}_plan_error"] = peak / sum(self._planned[phase].values()) - 1
        return metrics
