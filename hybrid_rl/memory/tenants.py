"""Tenants of the GPU: tensors that release and restore their memory between phases."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from hybrid_rl.config import check
from hybrid_rl.memory.residency import Phase
from hybrid_rl_kernels import vmm_pool
from hybrid_rl_kernels.vmm_pool import Policy, Region, VmmPool

logger = logging.getLogger(__name__)


class Tenant(Protocol):
    """Something that takes GPU memory and can give it back.

    `is_resident` says where it is now. `release` and `restore` return the bytes they copied over the bus, which is 0
    for what is dropped. `filled_in` is None when `restore` brings the contents back; else it is the one phase that
    writes them anew, and the only one a released tenant may return in.
    """

    is_resident: bool

    @property
    def filled_in(self) -> Phase | None:
        """The phase that writes the contents anew, or None."""

    def release(self) -> int:
        """Give the memory back."""

    def restore(self) -> int:
        """Take the memory again."""


class Resident:
    """A tenant that stays: on a CPU, or with swapping off, the table is still kept and checked, and nothing moves."""

    def __init__(self, *, filled_in: Phase | None = None) -> None:
        self.is_resident = True
        self.filled_in = filled_in

    def release(self) -> int:
        """Count as gone."""
        self.is_resident = False
        return 0

    def restore(self) -> int:
        """Count as here."""
        self.is_resident = True
        return 0


class FrozenModule:
    """A module that is never trained: copied out once; a release drops the device copy, a restore copies in.

    One that was written to in place since then is copied out anew.
    """

    filled_in = None

    def __init__(self, module: torch.nn.Module) -> None:
        module.requires_grad_(False)
        self.is_resident = True
        self._names = [name for name, _ in module.named_parameters()]
        self._tensors = [*module.parameters(), *module.buffers()]
        self._device = self._tensors[0].device
        self._host: list[torch.Tensor] = []
        self._versions: list[int] = []

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return name -> parameter where it is now, on the device or in its host copy, sharing memory."""
        tensors = self._tensors if self.is_resident else self._host
        return {name: t.detach() for name, t in zip(self._names, tensors, strict=False)}  # buffers come after them

    def release(self) -> int:
        """Drop the device copy; the first time and after a change, once it is copied out to pinned memory."""
        copied = 0
        if not self._host:
            is_pinned = self._device.type == "cuda"
            self._host = [torch.empty_like(t, device="cpu", pin_memory=is_pinned) for t in self._tensors]
        versions = [t._version for t in self._tensors]  # autograd's own count of writes, which `data =` leaves alone
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


def choose_pool(swap: str, device: torch.device) -> VmmPool | None:
    """Return the pool that memory.swap asks for; None where DeepSpeed's own offload serves, or nothing moves.

    Raises:
        ConfigError: swap is vmm and there can be no pool on this GPU.
    """
    if swap not in ("auto", "vmm") or device.type == "cpu":
        return None
    obstacle = vmm_pool.why_unavailable()
    check(not obstacle or swap == "auto", f"memory.swap = vmm: {obstacle}")
    if obstacle:
        logger.warning("memory.swap = auto: DeepSpeed's offload moves the states, since %s", obstacle)
        return None
    return vmm_pool.pool_of(device)


def rehome(tensors: Iterable[torch.Tensor], region: Region) -> None:
    """Move the memory of tensors into a region; their storages stay the same objects, so that every view follows."""
    storages = {storage.data_ptr(): storage for storage in (t.untyped_storage() for t in tensors)}
    with region:
        for storage in storages.values():
            if storage.nbytes():
                storage.resize_(storage.nbytes())  # PyTorch allocates anew and copies, whatever the size was


class PooledTenant:
    """Tensors in regions of a VmmPool: their pages leave and return, their addresses stay.

    `kept` tensors are copied to the host and back. `scratch` tensors are dropped, and return as zeros.
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
            pool: of the tensors' device.
            name: of the regions, for messages.
            kept: tensors to keep.
            scratch: tensors whose contents matter to nobody between two phases.
            policy: of the kept ones.
            before_release: called first in a release.
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
        """Copy out what is kept and give all pages back."""
        self._prepare()
        copied = self.kept.release()
        self._dropped.release()
        self.is_resident = False
        return copied

    def restore(self) -> int:
        """Take pages at the same addresses and copy back what was kept.

        Raises:
            VmmOutOfMemoryError: the GPU has no room; the tenant is still released.
        """
        copied = self.kept.restore()
        self._finish_restore()
        return copied

    def exchange(self, entering: "PooledTenant") -> tuple[int, int]:
        """Release this tenant and restore another of the pool at once; return the bytes copied out and in.

        Raises:
            VmmOutOfMemoryError: the GPU has no room; this tenant has left, the other is still released.
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
    """A FrozenModule in a VmmPool."""

    def __init__(self, pool: VmmPool, name: str, module: torch.nn.Module) -> None:
        module.requires_grad_(False)
        self._named = dict(module.named_parameters())
        self._tensors = [*module.parameters(), *module.buffers()]
        self._versions = [t._version for t in self._tensors]
        super().__init__(pool, name, self._tensors, policy="copy_once", before_release=self._notice_changes)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return name -> parameter where it is now, on the device or in its host copy, sharing memory."""
        return {n: p.detach() if self.is_resident else self.kept.host(p) for n, p in self._named.items()}

    def _notice_changes(self) -> None:
        versions = [t._version for t in self._tensors]
        if versions != self._versions:
            self.kept.invalidate()
        self._versions = versions
