"""What is really in use on a GPU: at the start and at the peak of each phase, against the plan, and by whom."""

import os
from collections.abc import Mapping

import torch

from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl_kernels.vmm_pool import released_bytes

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where PyTorch reads its allocator's settings, under the old name and the new one."""
OWN_CONTEXT_BYTES = 1 << 30
"""At most what this process itself holds before it loads anything: an estimate, to tell it from what others hold."""


def used_by_process(device: torch.device) -> dict[int, int]:
    """Return process id -> bytes on a GPU, as the driver counts them; empty where it tells no process of this one.

    Inside a container the driver may know processes by numbers that mean nothing here, or not at all.
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
    """Return what a run may take of a GPU: all of it, less what other processes hold; without bound on a CPU."""
    if device.type == "cpu":
        return 1 << 60
    free, total = torch.cuda.mem_get_info(device)
    return min(total, free + OWN_CONTEXT_BYTES)


def without_expandable_segments(value: str) -> str:
    """Return an allocator setting of PyTorch without expandable_segments."""
    return ",".join(part for part in value.split(",") if part.strip().split(":")[0].strip() != "expandable_segments")


def grow_segments(device: torch.device, *, is_on: bool) -> None:
    """Say whether PyTorch extends what it takes of the GPU from now on in place, as neighbours are wanted.

    Off while a run is built: memory that the engine's process opens must be one allocation of the driver. On for the
    phases: gradients that lie where activations were would else leave pieces that no activation fits in. (Tensors in a
    VmmPool have an allocator of their own.) What else the user has set for the allocator stays.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        others = [without_expandable_segments(os.environ.get(name, "")) for name in ALLOCATOR_VARIABLES]
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [*others, f"expandable_segments:{is_on}"])))


class DeviceMemory:
    """Measures a GPU, all processes together, around each phase; on a CPU there is nothing to measure.

    PyTorch keeps what it has reserved until the next phase begins, so what is in use when a phase ends is its peak; the
    engine's own memory does not change while it generates.
    """

    def __init__(
        self,
        device: torch.device,
        timeline: Timeline,
        planned: Mapping[str, Mapping[str, int]],
        *,
        keeps_cache: bool = False,
    ) -> None:
        """Measure a device.

        Args:
            planned: phase -> who -> bytes at its peak, of the plan that the run was started with.
            keeps_cache: whether PyTorch keeps what it has reserved for longer than a phase. Then its tensors are
                counted, at their most, instead of what is reserved for them and for those of other phases.
        """
        self._planned = planned
        self._keeps_cache = keeps_cache
        self._device = device
        self._timeline = timeline
        self._used: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._step = 0

    def entered(self, phase: str, step: int) -> None:
        """Note what is in use when all tenants of a phase are where they belong."""
        if self._device.type == "cuda":
            if step != self._step:
                self._step, self._peaks = step, {}
            torch.cuda.reset_peak_memory_stats(self._device)
            self._used[phase] = self._measure()
            if phase in self._planned:
                self._timeline.counter("device_memory_plan", **self._planned[phase])

    def left(self, phase: str) -> None:
        """Note what is in use before anything of the phase is given back; the most, of a phase that is opened twice."""
        if self._device.type == "cuda":
            self._peaks[phase] = max(self._peaks.get(phase, 0), self._measure())

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
        """Return bytes at entry and at the peak of each phase, and by which share of the plan the peak is above it."""
        metrics: dict[str, float] = {f"memory/{phase}_bytes": used for phase, used in self._used.items()}
        for phase, peak in self._peaks.items():
            metrics[f"memory/{phase}_peak_bytes"] = peak
            if phase in self._planned:
                metrics[f"memory/{phase}_plan_error"] = peak / sum(self._planned[phase].values()) - 1
        return metrics
