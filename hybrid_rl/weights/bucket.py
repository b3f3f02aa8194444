"""Buckets: buffers through which weights pass from the trainer's process to the engine's, and their plans."""

import atexit
import errno
import inspect
import itertools
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

import torch
from torch import Tensor

from hybrid_rl.errors import OutOfMemoryError
from hybrid_rl.serialization import decode, encode

_ALIGNMENT_BYTES = 256  # alignment of CUDA allocations; any dtype can be viewed at a multiple of it
_LARGE_BYTES = 4 << 20  # tensors from this size on are copied one by one; see copy_tensors

_LOCAL_BUCKETS: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()
"""Buckets of this process by id, for handles that this process opens itself, which CUDA refuses."""
_EXPORTED: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()
"""Memory whose CUDA handle was given away."""
_CUDA_TYPES = {"tensor_cls": Tensor, "storage_cls": torch.storage.TypedStorage, "dtype": torch.uint8}
"""Arguments of torch's rebuild_cuda_tensor that are the same for every bucket."""


@atexit.register
def _free_exported() -> None:
    """Free exported memory before torch is torn down, which would warn that other processes have it open."""
    for storage in list(_EXPORTED):
        storage.resize_(0)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one named tensor in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the bucket."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, bucket: Tensor) -> Tensor:
        """Return the slot of a uint8 bucket as a view with the shape and dtype of the tensor."""
        return bucket[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


def plan_buckets(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]], max_bytes: int) -> list[list[Slot]]:
    """Return the slots of the tensors, in order, in as few buckets of at most max_bytes as that order allows.

    A tensor larger than max_bytes gets a bucket of its own.

    Args:
        tensors: name, shape and dtype of each tensor.

    Raises:
        ValueError: a tensor is empty, like a ZeRO-3 parameter that is not gathered, or a name appears twice.
    """
    buckets: list[list[Slot]] = []
    used, names = 0, set()
    for name, shape, dtype in tensors:
        slot = Slot(name=name, shape=tuple(shape), dtype=dtype, offset=used)
        if slot.nbytes == 0:
            raise ValueError(f"tensor {name} has shape {tuple(shape)}: no elements (a ZeRO-3 shard, not gathered?)")
        if name in names:
            raise ValueError(f"tensor {name} appears twice")
        names.add(name)
        if not buckets or used + slot.nbytes > max_bytes:
            buckets.append([])
            slot = Slot(name=name, shape=tuple(shape), dtype=dtype, offset=0)
        buckets[-1].append(slot)
        used = aligned(slot.offset + slot.nbytes)
    return buckets


def aligned(num_bytes: int) -> int:
    """Return the first offset from num_bytes on at which a tensor may begin."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def plan_halves(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]], num_bytes: int) -> list[list[Slot]]:
    """Return buckets that alternate between two halves of one buffer, so that one is filled while one is copied from.

    Args:
        tensors: name, shape and dtype of each tensor.
        num_bytes: size of the buffer. A tensor larger than half of it enlarges the first half; it enlarges the second
            half too if there are more such tensors than other buckets.

    Raises:
        ValueError: see plan_buckets.
    """
    half = num_bytes // 2
    plan = plan_buckets(tensors, half)
    large = [bucket for bucket in plan if bucket_bytes([bucket]) > half]
    small = [bucket for bucket in plan if bucket_bytes([bucket]) <= half]
    pairs = itertools.zip_longest(large, small[: len(large)], fillvalue=())
    order = [bucket for pair in pairs for bucket in pair if bucket] + small[len(large) :]
    second = aligned(bucket_bytes(order[::2]))
    return [
        [replace(slot, offset=slot.offset + second) for slot in bucket] if index % 2 else bucket
        for index, bucket in enumerate(order)
    ]


def bucket_bytes(plan: list[list[Slot]]) -> int:
    """Return the size of the one buffer that holds any bucket of the plan."""
    return max(slot.offset + slot.nbytes for bucket in plan for slot in bucket)


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target: large tensors one by one, small ones together in a few kernels.

    A kernel over many tensors reaches less than half of the bandwidth of a single copy, while small tensors that are
    copied one by one cost a launch each.
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


def _reserved_file(num_bytes: int) -> IO[bytes]:
    """Return a file without a name whose pages exist, in /dev/shm, which containers limit, or the temporary folder.

    Raises:
        OutOfMemoryError: neither folder has room.
    """
    folders = [folder for folder in ("/dev/shm", tempfile.gettempdir()) if os.access(folder, os.W_OK)]
    for folder in folders:
        if shutil.disk_usage(folder).free <= num_bytes:
            continue
        file = tempfile.TemporaryFile(prefix="hybrid_rl_", dir=folder)  # noqa: SIM115
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # without pages, a full folder ends a write in SIGBUS
        except OSError as error:
            file.close()
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
        else:
            return file
    sizes = " and ".join(f"{folder} has {shutil.disk_usage(folder).free:,}" for folder in folders)
    raise OutOfMemoryError(
        f"the bucket through which weights pass needs {num_bytes:,} bytes of shared memory, but {sizes} bytes free: "
        "enlarge /dev/shm (docker run --shm-size) or, with sync.mode = copy, lower sync.bucket_bytes"
    )


@dataclass(frozen=True, kw_only=True)
class AliasedWeights:
    """Handle and layout of the buffer that holds the trainer's weights, of which the engine's become views."""

    handle: bytes
    slots: list[Slot]


class IpcBucket:
    """A uint8 buffer that another process can open: through CUDA IPC on a GPU, as a mapped file on a CPU.

    The file has no name, so nothing is left of it however the processes end.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate the buffer.

        Raises:
            OutOfMemoryError: neither /dev/shm nor the temporary folder has room, on a CPU.
        """
        self._file: IO[bytes] | None = None
        if device.type == "cuda":
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            self._file = _reserved_file(num_bytes)
            self.tensor = torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)

    @property
    def _path(self) -> str:
        """Path by which processes of the same user open the file, as long as this bucket exists."""
        assert self._file is not None
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def handle(self) -> bytes:
        """Return the argument of open_ipc_bucket; on a GPU it can be opened once, because torch counts opens."""
        if self._file is not None:
            return encode((self._path, len(self.tensor)))
        from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

        _LOCAL_BUCKETS[id(self.tensor)] = self.tensor
        _EXPORTED.add(self.tensor.untyped_storage())
        _, values = reduce_tensor(self.tensor)
        arguments = dict(zip(inspect.signature(rebuild_cuda_tensor).parameters, values, strict=True))
        sent = {name: value for name, value in arguments.items() if name not in _CUDA_TYPES}
        sizes = {name: tuple(sent[name]) for name in ("tensor_size", "tensor_stride")}
        return encode((os.getpid(), id(self.tensor), sent | sizes))


def device_key(device: torch.device, worker: int) -> str:
    """Return a name of the device of an engine worker that is the same in every process: the UUID of its GPU.

    Args:
        worker: number of the worker in its engine, which stands for the device on a CPU.
    """
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"cpu {worker}"


def joint_handle(handles: Mapping[str, bytes]) -> bytes:
    """Return one handle for several buckets, by device_key; open_ipc_bucket opens the bucket of the caller's device."""
    return encode(dict(handles))


def open_ipc_bucket(handle: bytes, device: torch.device, *, worker: int = 0) -> Tensor:
    """Return another process's bucket, mapped into this process.

    Args:
        handle: result of IpcBucket.handle or joint_handle.
        device: this process's name for the GPU that holds the bucket.
        worker: number of this worker in its engine; see device_key.

    Raises:
        RuntimeError: a joint handle has no bucket on the caller's device.
    """
    arguments = decode(handle)
    if isinstance(arguments, dict):
        key = device_key(device, worker)
        if key not in arguments:
            raise RuntimeError(f"no bucket for engine worker {worker} on {key}, only on {', '.join(arguments)}")
        return open_ipc_bucket(arguments[key], device)
    if device.type == "cpu":
        path, num_bytes = arguments
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    pid, local_id, arguments = arguments
    if pid == os.getpid():
        return _LOCAL_BUCKETS[local_id]
    # Two processes may number their GPUs differently, so this process's number replaces the one in the handle.
    return rebuild_cuda_tensor(**{**arguments, **_CUDA_TYPES, "storage_device": torch.device(device).index or 0})
