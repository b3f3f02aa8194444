"""The staging buffer that two processes share, and the checksum that both compute over what passed through it."""

import atexit
import inspect
import itertools
import os
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 256  # of a CUDA allocation, so that every tensor in the bucket can be viewed in its own dtype
_LARGE_BYTES = 4 << 20  # of a tensor that is worth a copy of its own, see copy_tensors

_LOCAL: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()
_EXPORTED: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


@atexit.register
def _free_exported() -> None:
    """Free what was exported and still lives: torch ends before it, and would warn that others have it open."""
    for storage in list(_EXPORTED):
        storage.resize_(0)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one named tensor lies in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """In bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without alignment."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, bucket: Tensor) -> Tensor:
        """Return this slot of the uint8 bucket as a tensor of its shape and dtype, sharing memory."""
        return bucket[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


def plan_buckets(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]], max_bytes: int) -> list[list[Slot]]:
    """Return the tensors, in order, laid into as few buckets of at most max_bytes as that order allows.

    A tensor larger than max_bytes gets a bucket of its own.

    Raises:
        ValueError: a tensor is empty, as an ungathered ZeRO-3 parameter is, or a name appears twice.
    """
    buckets: list[list[Slot]] = []
    used, names = 0, set()
    for name, shape, dtype in tensors:
        slot = Slot(name=name, shape=tuple(shape), dtype=dtype, offset=used)
        if slot.nbytes == 0:
            raise ValueError(f"tensor {name} has shape {tuple(shape)}: nothing to hand over (an ungathered shard?)")
        if name in names:
            raise ValueError(f"tensor {name} appears twice")
        names.add(name)
        if not buckets or used + slot.nbytes > max_bytes:
            buckets.append([])
            slot = Slot(name=name, shape=tuple(shape), dtype=dtype, offset=0)
        buckets[-1].append(slot)
        used = _aligned(slot.offset + slot.nbytes)
    return buckets


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def plan_halves(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]], num_bytes: int) -> list[list[Slot]]:
    """Return buckets that lie in a buffer's two halves by turns: one is filled while another is copied out of.

    Args:
        num_bytes: of the buffer; a tensor larger than half of it makes the first half larger, and only where such
            tensors outnumber the other buckets the second half, too.

    Raises:
        ValueError: see plan_buckets.
    """
    half = num_bytes // 2
    plan = plan_buckets(tensors, half)
    large = [bucket for bucket in plan if bucket_bytes([bucket]) > half]
    small = [bucket for bucket in plan if bucket_bytes([bucket]) <= half]
    pairs = itertools.zip_longest(large, small[: len(large)], fillvalue=())
    order = [bucket for pair in pairs for bucket in pair if bucket] + small[len(large) :]
    second = _aligned(bucket_bytes(order[::2]))
    return [
        [replace(slot, offset=slot.offset + second) for slot in bucket] if index % 2 else bucket
        for index, bucket in enumerate(order)
    ]


def bucket_bytes(plan: list[list[Slot]]) -> int:
    """Return the size of the one buffer that holds any bucket of the plan."""
    return max(slot.offset + slot.nbytes for bucket in plan for slot in bucket)


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target: large ones one by one, the others in a few kernels together.

    A kernel over many tensors starts a few hundred blocks at a time: on an H200 it took about 3.3 ms for 2.9 GiB, where
    one copy takes 1.45 (inferred from hand-overs of 7.6 ms). One by one, small tensors would cost a launch each.
    """
    small: tuple[list[Tensor], list[Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if target.nbytes >= _LARGE_BYTES:
            target.copy_(source)
        else:
            small[0].append(target)
            small[1].append(source)
    if small[0]:
        torch._foreach_copy_(*small)


def _roomy_folder(num_bytes: int) -> str:
    """Return where a file of that size can be mapped: memory if it has room, a container's may be 64 MiB."""
    folders = [folder for folder in ("/dev/shm", tempfile.gettempdir()) if os.access(folder, os.W_OK)]
    for folder in folders:
        if shutil.disk_usage(folder).free > num_bytes:
            return folder
    raise OSError(f"no room for a bucket of {num_bytes} bytes in {' or '.join(folders)}; lower sync.bucket_bytes")


@dataclass(frozen=True, kw_only=True)
class AliasedWeights:
    """A bucket that holds all of the trainer's weights, where it works with them: the engine binds its own to it."""

    handle: bytes
    slots: list[Slot]


class IpcBucket:
    """A uint8 buffer made here and opened once by another process: CUDA IPC on a GPU, a mapped file on a CPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._path: str | None = None
        if device.type == "cuda":
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            with tempfile.NamedTemporaryFile(prefix="hybrid_rl_", dir=_roomy_folder(num_bytes), delete=False) as file:
                self._path = file.name
            self.tensor = torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)

    def handle(self) -> bytes:
        """Return what open_ipc_bucket needs; on a GPU a handle may be opened once, since torch counts opens."""
        if self._path is not None:
            return pickle.dumps((self._path, len(self.tensor)))
        from torch.multiprocessing.reductions import reduce_tensor

        _LOCAL[id(self.tensor)] = self.tensor
        _EXPORTED.add(self.tensor.untyped_storage())
        _, arguments = reduce_tensor(self.tensor)
        return pickle.dumps((os.getpid(), id(self.tensor), arguments))

    def unlink(self) -> None:
        """Remove the file's name once everyone has opened it; the memory lives as long as its mappings."""
        if self._path is not None:
            os.unlink(self._path)
            self._path = None


def device_key(device: torch.device, worker: int) -> str:
    """Return what names the memory of an engine's worker in every process: its GPU's UUID.

    A CPU has one memory for all, so there the worker's number stands for a GPU.
    """
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"cpu {worker}"


def joint_handle(handles: Mapping[str, bytes]) -> bytes:
    """Return one handle for several buckets, each at its place, of which open_ipc_bucket opens that of the caller's."""
    return pickle.dumps(dict(handles))


def open_ipc_bucket(handle: bytes, device: torch.device, *, worker: int = 0) -> Tensor:
    """Return another process's bucket, mapped here; device is this process's name for the GPU it lies on.

    Args:
        worker: number of this worker in its engine, see place_of.

    Raises:
        RuntimeError: a joint handle has no bucket at the caller's place.
    """
    arguments = pickle.loads(handle)
    if isinstance(arguments, dict):
        place = device_key(device, worker)
        if place not in arguments:
            raise RuntimeError(f"no bucket for engine worker {worker} on {place}, only on {', '.join(arguments)}")
        return open_ipc_bucket(arguments[place], device)
    if device.type == "cpu":
        path, num_bytes = arguments
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    pid, key, arguments = arguments
    if pid == os.getpid():  # CUDA refuses to open a handle in the process that made it
        return _LOCAL[key]
    # The two processes may number their GPUs differently, so the device in the handle is replaced by ours.
    slot = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")
    arguments = list(arguments)
    arguments[slot] = torch.device(device).index or 0
    return rebuild_cuda_tensor(*arguments)
