"""GPU memory whose physical pages leave and return while its addresses stay: csrc/vmm_pool.cpp behind PyTorch.

    pool = VmmPool(torch.device("cuda", 0))
    region = pool.region("actor_states", policy="copy")
    with region:
        moments = torch.empty(1 << 30, device="cuda")
    region.release()  # copied to pinned memory, pages given back to the driver
    region.restore()  # the same contents at the same addresses

To touch a released region's tensors is an illegal address, to the GPU and to the process.
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
    """The pool or the CUDA driver refused; the message names the region."""


class VmmOutOfMemoryError(VmmError):
    """The device has no room; the region is as it was, a released one still released."""

    def __init__(self, what: str, *, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{what}: {wanted_bytes:,} bytes of GPU memory wanted, {free_bytes:,} are free")
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Host memory that a pool pins before anything is released; all 0 without one."""

    num_bytes: int
    """Set aside; after a failure, of these what could be pinned."""
    taken_bytes: int
    """Of that in use by regions."""
    pinning_s: float
    """What pinning it took; 0 until it is done."""
    waited_s: float
    """Of that, what releases waited for."""


def find_library() -> Path | None:
    """Return the native library: beside the package, in the environment's packages, or in `build` of a checkout."""
    here = Path(__file__).parent
    installed = Path(sysconfig.get_path("platlib"), here.name)
    return next((f / LIBRARY for f in (here, installed, here.parents[1] / "build") if (f / LIBRARY).exists()), None)


def why_unavailable() -> str:
    """Return why this process can have no pool, in words; empty if it can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    return "" if find_library() else f"{LIBRARY} is not built; in the checkout: {HOW_TO_BUILD}"


class VmmPool:
    """The pool of one device; a process has one."""

    started: ClassVar[list["VmmPool"]] = []
    """None or one, but for tests that load a second library."""

    def __init__(
        self, device: torch.device | int = 0, *, chunk_bytes: int = CHUNK_BYTES, library: Path | None = None
    ) -> None:
        """Load the library and start the pool.

        Args:
            device: the GPU.
            chunk_bytes: unit of mapping and copying, rounded up to 2 MiB.
            library: another file than find_library gives.
        Raises:
            VmmError: the library is not built, there is no driver, or this process has a pool already.
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
        """Return a new region; a name that was used before gets a number.

        Args:
            name: for messages.
            policy: what a release does with the contents. drop: forgets them. copy: copies them to the host, and a
                restore brings them back. copy_once: as copy, but only the first release copies, for what never changes.
        """
        number = next(self._names.setdefault(name, itertools.count(1)))
        return Region(self, name if number == 1 else f"{name} {number}", policy)

    def exchange(self, out: "Region", into: "Region") -> tuple[int, int]:
        """Release one region and restore another, copying in both directions at once; return the bytes out and in.

        Of `into` never more is on the device than has left of `out`, until all of `out` has.

        Raises:
            VmmError: a region is not in the state for it, and nothing has moved.
            VmmOutOfMemoryError: no room for `into`; `out` has left, `into` is still released.
        """
        return self._move(out.tag, into.tag)

    def reserve_host(self, num_bytes: int) -> None:
        """Pin host memory on a thread while other work goes on; first releases take theirs from it.

        A release waits for what is not ready of its part, and pins by itself what the reserve has no room for. Where
        pinning the reserve fails, the first release that finds it so raises. When all that took from it is gone, it can
        be taken anew.

        Raises:
            VmmError: this pool has a reserve, or there are no addresses for it.
        """
        self._check(self._library.vmm_reserve_host(ctypes.c_size_t(num_bytes)))
        threading.Thread(target=self._library.vmm_pin_reserve, name="pin reserve").start()

    @property
    def reserve(self) -> Reserve:
        """What reserve_host has done so far."""
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
    """Return the pool of this process, started at the first call; see VmmPool."""
    return VmmPool(device)


def released_bytes() -> int:
    """Return the bytes that PyTorch still counts as reserved although their memory is given back."""
    total = 0
    for pool in VmmPool.started:
        size = ctypes.c_size_t()
        pool._check(pool._library.vmm_released(ctypes.byref(size)))
        total += size.value
    return total


class Region:
    """Memory that moves together. Inside `with region:` this thread's new CUDA tensors and storages lie in it."""

    def __init__(self, pool: VmmPool, tag: str, policy: Policy) -> None:
        """Take part in a pool; see VmmPool.region."""
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
        if isinstance(error, torch.OutOfMemoryError):  # PyTorch's message knows the region's own memory only
            raise self._pool._failure() from error

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self._pool._check(self._library.vmm_enter(self.tag.encode(), self._policy))
        try:
            yield
        finally:
            self._library.vmm_leave()

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new memory, as PyTorch gets it inside `with region:`; it is never freed.

        Raises:
            VmmError: no room, or the region is released.
        """
        with self._entered():
            address = self._library.vmm_malloc(ctypes.c_size_t(num_bytes), self._pool.device.index or 0, None)
        if address is None:
            raise self._pool._failure()
        return int(address)

    def release(self) -> int:
        """Give the physical memory back once all queued work is done; return the bytes copied to the host.

        Raises:
            VmmError: it is released, or the host has no memory to pin, and nothing has moved.
        """
        return self._pool._move(self.tag, "")[0]

    def restore(self) -> int:
        """Take physical memory at the same addresses; return the bytes copied back, complete when it returns.

        Raises:
            VmmError: it is resident.
            VmmOutOfMemoryError: no room; it stays released.
        """
        return self._pool._move("", self.tag)[1]

    def invalidate(self) -> None:
        """Say that the contents of a copy_once region changed: its next release copies again."""
        self._pool._check(self._library.vmm_invalidate(self.tag.encode()))

    @property
    def is_resident(self) -> bool:
        """Whether it has physical memory."""
        return bool(self._state()[0])

    @property
    def num_bytes(self) -> int:
        """Physical memory that it has or would have."""
        return self._state()[1]

    def _state(self) -> tuple[int, int]:
        resident, size = ctypes.c_int(), ctypes.c_size_t()
        self._pool._check(self._library.vmm_resident(self.tag.encode(), ctypes.byref(resident), ctypes.byref(size)))
        return resident.value, size.value

    def host(self, tensor: Tensor) -> Tensor:
        """Return the pinned host copy of a tensor of this region, sharing memory with what a restore brings back.

        Raises:
            VmmError: it was never released with a copy.
        """
        if tensor.numel() == 0:
            return torch.empty_like(tensor, device="cpu")
        address = ctypes.c_void_p()
        self._pool._check(self._library.vmm_host(ctypes.c_void_p(tensor.data_ptr()), ctypes.byref(address)))
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        buffer = (ctypes.c_byte * (extent * tensor.element_size())).from_address(address.value or 0)
        flat = torch.frombuffer(buffer, dtype=tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())
