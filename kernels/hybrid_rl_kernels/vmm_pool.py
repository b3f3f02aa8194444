"""GPU memory whose physical pages are released and restored at constant addresses: csrc/vmm_pool.cpp behind PyTorch.

    pool = VmmPool(torch.device("cuda", 0))
    region = pool.region("actor_optimizer", policy="copy")
    with region:
        moments = torch.empty(1 << 30, device="cuda")
    region.release()  # copies to pinned memory and returns the physical pages to the driver
    region.restore()  # maps new pages at the same addresses and copies the contents back

Access to a tensor of a released region is an illegal memory access.
"""

import ctypes
import functools
import itertools
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

LIBRARY = "libvmm_pool.so"
HOW_TO_BUILD = "cmake -S . -B build && cmake --build build"
CHUNK_BYTES = 128 << 20
_POLICIES = ("drop", "copy", "copy_once")  # the order of vmm::Policy
_OUT_OF_MEMORY = 1  # vmm::Status

Policy = Literal["drop", "copy", "copy_once"]


class VmmError(RuntimeError):
    """The pool or the CUDA driver reported an error; the message names the region."""


class VmmOutOfMemoryError(VmmError):
    """The device has too little free memory; the region keeps its state."""

    def __init__(self, what: str, *, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{what}: {wanted_bytes:,} bytes of GPU memory wanted, {free_bytes:,} are free")
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Host memory that a pool pins ahead of the first release; all fields are 0 without a reserve."""

    num_bytes: int
    """Size of the reserve; after a failure, the part that could be pinned."""
    taken_bytes: int
    """Part of the reserve that regions use."""
    pinning_s: float
    """Seconds of pinning the reserve; 0 until pinning is complete."""
    waited_s: float
    """Seconds that releases waited for pinning."""


def find_library() -> Path | None:
    """Return the native library: next to the package, in the environment's packages, or in `build` of a checkout."""
    here = Path(__file__).parent
    installed = Path(sysconfig.get_path("platlib"), here.name)
    return next((f / LIBRARY for f in (here, installed, here.parents[1] / "build") if (f / LIBRARY).exists()), None)


def why_unavailable() -> str:
    """Return the reason why this process cannot have a pool; empty if it can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    return "" if find_library() else f"{LIBRARY} is not built; in the checkout: {HOW_TO_BUILD}"


class VmmPool:
    """The pool of one device; a process has one."""

    started: ClassVar[list["VmmPool"]] = []
    """Pools of this process; at most one, except in tests that load a second library."""

    def __init__(
        self, device: torch.device | int = 0, *, chunk_bytes: int = CHUNK_BYTES, library: Path | None = None
    ) -> None:
        """Load the library and start the pool.

        Args:
            device: GPU of the pool.
            chunk_bytes: unit of mapping and copying, rounded up to 2 MiB.
            library: file of the native library; None calls find_library.

        Raises:
            VmmError: the library is not built, the CUDA driver is missing, or this process has a pool.
        """
        path = library or find_library()
        if path is None:
            raise VmmError(f"{LIBRARY} is not built; in the checkout: {HOW_TO_BUILD}")
        self.device = torch.device("cuda", device) if isinstance(device, int) else device
        self._path = path
        self._library = ctypes.CDLL(str(path))
        self._library.vmm_malloc.restype = ctypes.c_void_p
        self._library.vmm_error.restype = ctypes.c_char_p
        self._names: dict[str, Iterator[int]] = {}
        self._allocator: Any = None
        self._check(self._library.vmm_start(self.device.index or 0, ctypes.c_size_t(chunk_bytes)))
        self.started.append(self)

    def region(self, name: str, *, policy: Policy = "copy") -> "Region":
        """Return a new region; a number is appended to a name that is in use.

        Args:
            name: name of the region in messages.
            policy: what a release does with the contents. `drop` discards them. `copy` copies them to the host, and a
                restore copies them back. `copy_once` copies to the host at the first release only, for contents that do
                not change.
        """
        number = next(self._names.setdefault(name, itertools.count(1)))
        return Region(self, name if number == 1 else f"{name} {number}", policy)

    def exchange(self, out: "Region", into: "Region") -> tuple[int, int]:
        """Release region `out` and restore region `into` at the same time; return the bytes copied out and in.

        Until `out` is released completely, the restored part of `into` is never larger than the released part of `out`.

        Raises:
            VmmError: `out` is not resident or `into` is not released; nothing has moved.
            VmmOutOfMemoryError: too little free memory for `into`; both regions are released.
        """
        return self._move(out.tag, into.tag)

    def reserve_host(self, num_bytes: int) -> None:
        """Pin host memory on a thread, for the host copies that first releases create.

        A release waits until its part of the reserve is pinned, and pins memory itself if the reserve is too small. If
        pinning fails, the next release that needs the reserve raises. Memory returns to the reserve once all regions
        that use it are gone.

        Raises:
            VmmError: this pool has a reserve, or address space for it is not available.
        """
        self._check(self._library.vmm_reserve_host(ctypes.c_size_t(num_bytes)))
        threading.Thread(target=self._library.vmm_pin_reserve, name="pin reserve").start()

    @property
    def reserve(self) -> Reserve:
        """State of the memory that reserve_host pins."""
        size, taken, pinning, waited = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_double(), ctypes.c_double()
        places = (ctypes.byref(size), ctypes.byref(taken), ctypes.byref(pinning), ctypes.byref(waited))
        self._check(self._library.vmm_reserve(*places))
        return Reserve(num_bytes=size.value, taken_bytes=taken.value, pinning_s=pinning.value, waited_s=waited.value)

    def _move(self, out: str, into: str) -> tuple[int, int]:
        moved = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._library.vmm_move(out.encode(), into.encode(), *map(ctypes.byref, moved)))
        return moved[0].value, moved[1].value

    def _check(self, status: int) -> None:
        if status:
            raise self._failure()

    def _failure(self) -> VmmError:
        status, wanted, free = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()
        message = self._library.vmm_error(*map(ctypes.byref, (status, wanted, free))).decode()
        if status.value == _OUT_OF_MEMORY:
            return VmmOutOfMemoryError(message, wanted_bytes=wanted.value, free_bytes=free.value)
        return VmmError(message)

    def _make_mem_pool(self) -> torch.cuda.MemPool:
        if self._allocator is None:
            self._allocator = torch.cuda.memory.CUDAPluggableAllocator(str(self._path), "vmm_malloc", "vmm_free")
        return torch.cuda.MemPool(self._allocator.allocator())


@functools.cache
def pool_of(device: torch.device) -> VmmPool:
    """Return the pool of this process; the first call starts it, see VmmPool."""
    return VmmPool(device)


def released_bytes() -> int:
    """Return the bytes of released regions, which PyTorch counts as reserved."""
    total = 0
    for pool in VmmPool.started:
        size = ctypes.c_size_t()
        pool._check(pool._library.vmm_released(ctypes.byref(size)))
        total += size.value
    return total


class Region:
    """Memory that is released and restored together.

    Inside `with region:` new CUDA tensors and storages of this thread are allocated in the region.
    """

    def __init__(self, pool: VmmPool, tag: str, policy: Policy) -> None:
        """Register a region with a pool; see VmmPool.region."""
        self.tag = tag
        self._pool = pool
        self._library = pool._library
        self._policy = _POLICIES.index(policy)
        self._stack = ExitStack()
        self._mem_pool: torch.cuda.MemPool | None = None
        with self._entered():
            pass

    def __enter__(self) -> "Region":
        if self._mem_pool is None:
            self._mem_pool = self._pool._make_mem_pool()
        self._stack.enter_context(self._entered())
        self._stack.enter_context(torch.cuda.use_mem_pool(self._mem_pool, self._pool.device))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stack.close()
        if isinstance(error, torch.OutOfMemoryError):  # PyTorch's message counts the memory of this region only
            raise self._pool._failure() from error

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self._pool._check(self._library.vmm_enter(self.tag.encode(), self._policy))
        try:
            yield
        finally:
            self._library.vmm_leave()

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new memory of the region, which is never freed.

        Raises:
            VmmError: too little free memory, or the region is released.
        """
        with self._entered():
            address = self._library.vmm_malloc(ctypes.c_size_t(num_bytes), self._pool.device.index or 0, None)
        if address is None:
            raise self._pool._failure()
        return int(address)

    def release(self) -> int:
        """Release the physical memory after all queued work; return the bytes copied to the host.

        Raises:
            VmmError: the region is released, or host memory cannot be pinned; nothing has moved.
        """
        return self._pool._move(self.tag, "")[0]

    def restore(self) -> int:
        """Map physical memory at the same addresses; return the bytes copied back, after the copy is complete.

        Raises:
            VmmError: the region is resident.
            VmmOutOfMemoryError: too little free memory; the region is still released.
        """
        return self._pool._move("", self.tag)[1]

    def invalidate(self) -> None:
        """Make the next release of a copy_once region copy again, after a change of its contents."""
        self._pool._check(self._library.vmm_invalidate(self.tag.encode()))

    @property
    def is_resident(self) -> bool:
        """Whether the region has physical memory."""
        return bool(self._state()[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of physical memory of the region when it is resident."""
        return self._state()[1]

    def _state(self) -> tuple[int, int]:
        resident, size = ctypes.c_int(), ctypes.c_size_t()
        self._pool._check(self._library.vmm_resident(self.tag.encode(), ctypes.byref(resident), ctypes.byref(size)))
        return resident.value, size.value

    def host(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor's pinned host copy; a restore copies changes of it to the device.

        Args:
            tensor: tensor of this region.

        Raises:
            VmmError: the region has no host copy.
        """
        if tensor.numel() == 0:
            return torch.empty_like(tensor, device="cpu")
        address = ctypes.c_void_p()
        self._pool._check(self._library.vmm_host(ctypes.c_void_p(tensor.data_ptr()), ctypes.byref(address)))
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        buffer = (ctypes.c_byte * (extent * tensor.element_size())).from_address(address.value or 0)
        flat = torch.frombuffer(buffer, dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())
