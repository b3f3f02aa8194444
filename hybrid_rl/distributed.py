"""The ranks of a run: who am I, and the few collectives the loop needs."""

import dataclasses
import datetime
import io
import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

GENERATION_TIMEOUT = datetime.timedelta(days=1)
"""Only a rank that hangs is waited for so long: one that ends closes its connections, which the others notice."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This rank's place among all ranks. Every method is a collective: all ranks call it, in the same order."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Whom the collectives join; None is the group of all ranks that join_world made."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files that exist once."""
        return self.rank == 0

    def duplicate_group(self) -> "World":
        """Return the same ranks on a connection of their own, for a thread whose collectives overlap the run's."""
        return self if self.size == 1 else dataclasses.replace(self, group=dist.new_group(backend="gloo"))

    def model_parallel_group(self, size: int, *, on_device: bool = False) -> "World":
        """Return this rank's part when the ranks are cut into groups of `size` neighbours; size divides their number.

        Its collectives wait for as long as one rank may generate for the others; with on_device they are for tensors
        of the run's device, and wait no longer than the run's own.
        """
        options: dict[str, Any] = {} if on_device else {"backend": "gloo", "timeout": GENERATION_TIMEOUT}
        groups = [dist.new_group(list(range(first, first + size)), **options) for first in range(0, self.size, size)]
        return dataclasses.replace(self, rank=self.rank % size, size=size, group=groups[self.rank // size])

    def data_parallel_group(self, size: int) -> "World":
        """Return this rank's part among those that have its place in such groups: one rank of each group."""
        if size == 1:
            return self
        groups = [dist.new_group(list(range(place, self.size, size)), backend="gloo") for place in range(size)]
        return dataclasses.replace(self, rank=self.rank // size, size=self.size // size, group=groups[self.rank % size])

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensor over ranks, same shape and dtype."""
        total = tensor.clone()
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        if self.size == 1:
            return number
        value = torch.tensor([number])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return int(value)

    def pad_to_longest(self, pieces: list[list[int]]) -> list[list[int]]:
        """Return the pieces with empty ones added, so that every rank has as many and joins the others' collectives."""
        return pieces + [[]] * (self.max(len(pieces)) - len(pieces))

    def all_gather(self, item: Any) -> list[Any]:
        """Return every rank's picklable item, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def all_to_all(self, items: Sequence[Any]) -> list[Any]:
        """Send each rank its one of `size` picklable items; return what the ranks sent here, in rank order."""
        if self.size == 1:
            return list(items)
        outgoing = [torch.frombuffer(_pickled(item), dtype=torch.uint8) for item in items]
        sizes = torch.tensor([len(part) for part in outgoing])
        coming = torch.empty_like(sizes)
        dist.all_to_all_single(coming, sizes, group=self.group)
        incoming = torch.empty(int(coming.sum()), dtype=torch.uint8)
        dist.all_to_all_single(incoming, torch.cat(outgoing), coming.tolist(), sizes.tolist(), group=self.group)
        return [pickle.loads(part.numpy()) for part in incoming.split(coming.tolist())]

    def means(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Return each key's sum over ranks divided by its count over ranks; a key counted nowhere is left out."""
        everyone = self.all_gather((sums, counts))
        keys = {key: None for local, _ in everyone for key in local}
        totals = {
            key: (sum(s.get(key, 0.0) for s, _ in everyone), sum(c.get(key, 0.0) for _, c in everyone)) for key in keys
        }
        return {key: total / count for key, (total, count) in totals.items() if count}

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self.group)


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays: PyTorch's own way takes 0.4 ms for each, a batch has one for each sequence."""

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, Tensor) and item.device.type == "cpu" and item.dtype != torch.bfloat16:  # NumPy has none
            return torch.from_numpy, (item.detach().numpy(),)
        return NotImplemented


def _pickled(item: Any) -> memoryview:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(item)
    return buffer.getbuffer()


def free_port() -> int:
    """Return a TCP port that nobody on this machine listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def join_world(timeout_s: float = 1800.0) -> World:
    """Join the process group that the launcher's RANK, WORLD_SIZE and MASTER_* describe; alone without them.

    A single node always talks over loopback. CPU tensors go through gloo, GPU tensors through NCCL.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # The launcher narrows CUDA_VISIBLE_DEVICES to this rank's GPU where there are several ranks on a node.
    device = (
        torch.device("cuda", local_rank % torch.cuda.device_count())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes it for the GPU's index
    if size == 1:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's store is at another port
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0"
        )
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=timeout_s))
    return World(rank=rank, size=size, local_rank=local_rank, device=device)


def leave_world() -> None:
    """Close the connections of a run that came to its end; after a failure, others may still be in a collective."""
    dist.destroy_process_group()
