"""Tenants of the GPU: tensors that release and restore their memory between phases."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from hybrid_rl.config import check
from hybrid_rl.memory.residency import Phase
from hybrid_rl_kernels import vmm_pool
from hybrid_rl_kernels.vmm_pool import Policy, Region, VmmPool

logger = logging.getLogger(__name__)


class Tenant(Protocol):
    """Tensors whose GPU memory can be released and restored."""

    is_resident: bool
    """Whether the tenant occupies GPU memory."""

    @property
    def filled_in(self) -> Phase | None:
        """None if `restore` brings the contents back; otherwise the phase that writes them anew.

        A tenant with such a phase may be restored in no other one.
        """

    def release(self) -> int:
        """Release the GPU memory and return the bytes copied to the host; 0 if the contents are dropped."""

    def restore(self) -> int:
        """Occupy GPU memory again and return the bytes copied to the device."""


class Resident:
    """A tenant whose memory never moves: on a CPU, with swapping off, or with room in every phase.

    It still changes its state, so that the residency table is checked on every device.
    """

    def __init__(self, *, filled_in: Phase | None = None) -> None:
        self.is_resident = True
        self.filled_in = filled_in

    def release(self) -> int:
        """Change to the released state; nothing is copied."""
        self.is_resident = False
        return 0

    def restore(self) -> int:
        """Change to the resident state; nothing is copied."""
        self.is_resident = True
        return 0


class FrozenModule:
    """A module that is not trained, with a copy in host memory: a release frees the device copy, a restore copies back.

    The host copy is written at the first release, and again at the release after an in-place change of the module.
    """

    filled_in = None

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        weights: Mapping[str, torch.Tensor] | None = None,
        before_release: Callable[[], None] | None = None,
    ) -> None:
        """Take a module on its device.

        Args:
            module: is frozen.
            weights: name -> tensor that holds a parameter's values, such as this rank's shard; None for the parameters.
            before_release: called at the beginning of a release.
        """
        module.requires_grad_(False)
        held = dict(module.named_parameters()) if weights is None else weights
        self.is_resident = True
        self._before_release = before_release
        self._names = list(held)
        self._tensors = [*held.values(), *module.buffers()]
        self._device = self._tensors[0].device
        self._host: list[torch.Tensor] = []
        self._versions: list[int] = []

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return name -> view of the weight, on the device while resident, otherwise in the host copy."""
        tensors = self._tensors if self.is_resident else self._host
        return {name: t.detach() for name, t in zip(self._names, tensors, strict=False)}  # buffers come last

    def release(self) -> int:
        """Free the device copy; the first time and after a change, copy it to the host before."""
        copied = 0
        if self._before_release:
            self._before_release()
        if not self._host:
            is_pinned = self._device.type == "cuda"
            self._host = [torch.empty_like(t, device="cpu", pin_memory=is_pinned) for t in self._tensors]
        versions = [t._version for t in self._tensors]  # counts in-place writes; assigning `data` does not count
        if versions != self._versions:
            for tensor, host in zip(self._tensors, self._host, strict=True):
                host.copy_(tensor)
            self._versions, copied = versions, sum(t.nbytes for t in self._host)
        for tensor in self._tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=self._device)
        self.is_resident = False
        return copied

    def restore(self) -> int:
        """Copy the host copy to the device."""
        for tensor, host in zip(self._tensors, self._host, strict=True):
            tensor.data = host.to(self._device, non_blocking=True, copy=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.is_resident = True
        return sum(t.nbytes for t in self._host)


def check_pool(swap: str, device: torch.device) -> None:
    """Check that a value of memory.swap finds what it needs on this machine.

    Raises:
        ConfigError: swap is vmm, and the pool is not available.
    """
    if swap == "vmm" and device.type == "cuda":
        obstacle = vmm_pool.why_unavailable()
        check(not obstacle, f"memory.swap = vmm: {obstacle}")


def uses_pool(swap: str, device: torch.device) -> bool:
    """Return whether a value of memory.swap moves tenants by the native pool."""
    return swap in ("auto", "vmm") and device.type == "cuda" and not vmm_pool.why_unavailable()


def choose_pool(swap: str, device: torch.device) -> VmmPool | None:
    """Return the pool for a value of memory.swap; None if DeepSpeed's offload moves the optimizer, or nothing moves.

    Raises:
        ConfigError: see check_pool.
    """
    if swap not in ("auto", "vmm") or device.type == "cpu":
        return None
    check_pool(swap, device)
    if obstacle := vmm_pool.why_unavailable():
        logger.warning("memory.swap = auto: DeepSpeed's offload moves the optimizer, because %s", obstacle)
        return None
    return vmm_pool.pool_of(device)


def rehome(tensors: Iterable[torch.Tensor], region: Region) -> None:
    """Move the memory of tensors into a region; storages keep their identity, so that every view follows."""
    storages = {storage.data_ptr(): storage for storage in (t.untyped_storage() for t in tensors)}
    with region:
        for storage in storages.values():
            if storage.nbytes():
                storage.resize_(storage.nbytes())  # allocates anew and copies even if the size is the same


class PooledTenant:
    """Tensors in regions of a VmmPool: their physical memory is released and restored, their addresses are constant.

    `kept` tensors are copied to the host and back. `scratch` tensors are dropped and restored as zeros.
    """

    filled_in = None

    def __init__(
        self,
        pool: VmmPool,
        name: str,
        kept: Sequence[torch.Tensor],
        *,
        scratch: Sequence[torch.Tensor] = (),
        policy: Policy = "copy",
        before_release: Callable[[], None] | None = None,
    ) -> None:
        """Move the tensors into the pool.

        Args:
            pool: pool of the tensors' device.
            name: name of the regions in messages.
            kept: tensors whose contents survive a release.
            scratch: tensors whose contents are not needed after a release.
            policy: what a release does with the kept tensors, see VmmPool.region.
            before_release: called at the beginning of a release.
        """
        self.is_resident = True
        self.kept = pool.region(name, policy=policy)
        rehome(kept, self.kept)
        self._scratch = list(scratch)
        self._dropped = pool.region(f"{name} scratch", policy="drop")
        rehome(scratch, self._dropped)
        self._pool = pool
        self._before_release = before_release

    def release(self) -> int:
        """Copy the kept tensors to the host and release all physical memory."""
        self._prepare()
        copied = self.kept.release()
        self._dropped.release()
        self.is_resident = False
        return copied

    def restore(self) -> int:
        """Map physical memory at the same addresses and copy the kept tensors back.

        Raises:
            VmmOutOfMemoryError: the GPU has too little free memory; the tenant is still released.
        """
        copied = self.kept.restore()
        self._finish_restore()
        return copied

    def exchange(self, entering: "PooledTenant") -> tuple[int, int]:
        """Release this tenant while another one of the pool is restored; return the bytes copied out and in.

        Raises:
            VmmOutOfMemoryError: the GPU has too little free memory; both tenants are released.
        """
        self._prepare()
        self._dropped.release()
        self.is_resident = False
        copied = self._pool.exchange(self.kept, entering.kept)
        entering._finish_restore()
        return copied

    def _prepare(self) -> None:
        if self._before_release:
            self._before_release()

    def _finish_restore(self) -> None:
        try:
            self._dropped.restore()
        except vmm_pool.VmmOutOfMemoryError:
            self.kept.release()
            raise
        for tensor in self._scratch:
            tensor.zero_()
        self.is_resident = True


class PooledModule(PooledTenant):
    """A module that is not trained, in a VmmPool; copied to the host like a FrozenModule."""

    def __init__(
        self,
        pool: VmmPool,
        name: str,
        module: torch.nn.Module,
        *,
        weights: Mapping[str, torch.Tensor] | None = None,
        before_release: Callable[[], None] | None = None,
    ) -> None:
        """Move the module's tensors into the pool; see FrozenModule for the other parameters."""
        module.requires_grad_(False)
        self._named = dict(module.named_parameters()) if weights is None else dict(weights)
        self._tensors = [*self._named.values(), *module.buffers()]
        self._versions = [t._version for t in self._tensors]
        super().__init__(pool, name, self._tensors, policy="copy_once", before_release=before_release)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return name -> view of the weight, on the device while resident, otherwise in the host copy."""
        return {n: p.detach() if self.is_resident else self.kept.host(p) for n, p in self._named.items()}

    def _prepare(self) -> None:
        super()._prepare()
        versions = [t._version for t in self._tensors]
        if versions != self._versions:
            self.kept.invalidate()
        self._versions = versions
