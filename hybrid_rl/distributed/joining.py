"""How ranks meet: without a listening port within one node, at the address that MASTER_ADDR names across nodes."""

import datetime
import errno
import functools
import os
import socket
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from hybrid_rl.config import ConfigError
from hybrid_rl.distributed import watch
from hybrid_rl.distributed.board import Board, FolderBoard, StoreBoard
from hybrid_rl.distributed.world import World

FOLDER_VARIABLE = "HYBRID_RL_RANKS_FOLDER"
"""Environment variable of a rank that launch/ranks.py has started: the private folder by which the ranks meet."""


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def join_world(timeout_s: float = 1800.0, *, stall_timeout_s: float = 300.0) -> World:
    """Join the process group that the environment describes; without RANK and WORLD_SIZE, a group of one rank.

    Collectives of CPU tensors use gloo, collectives of GPU tensors NCCL. Within one node both stay on the loopback
    interface, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set.

    Args:
        timeout_s: how long a collective waits for the other ranks.
        stall_timeout_s: see RunConfig; the calling thread gets a RankLostError if another rank is lost.

    Raises:
        ConfigError: rank 0 cannot listen at MASTER_ADDR and MASTER_PORT.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # The launcher narrows CUDA_VISIBLE_DEVICES to the rank's own GPU if a node has several ranks.
    device = (
        torch.device("cuda", local_rank % torch.cuda.device_count())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed reads the GPU's index from it
    if size == 1:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if not dist.is_initialized():
        choose_interfaces(size)
        timeout = datetime.timedelta(seconds=timeout_s)
        store, board = open_store(rank, size, timeout)
        if board:
            watch.start(board, rank=rank, size=size, stall_timeout_s=stall_timeout_s)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return World(rank=rank, size=size, local_rank=local_rank, device=device)


def leave_world() -> None:
    """Wait for the other ranks and close the connections, after a run that succeeded.

    After a failure other ranks may be in another collective, so that a rank then ends without this function.
    """
    if dist.get_world_size() > 1:
        dist.barrier()
    watch.stop()
    dist.destroy_process_group()


def open_store(rank: int, size: int, timeout: datetime.timedelta) -> tuple[dist.Store, Board | None]:
    """Return the store by which the ranks meet, and the board by which they watch each other.

    Nobody unpickles a value of either. A single rank has a store in its memory and nobody to watch.

    Args:
        rank: this rank.
        size: number of ranks.
        timeout: how long a read waits for a value.
    """
    if size == 1:
        return dist.HashStore(), None
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        files = dist.FileStore(str(Path(folder, "store")), size)
        files.set_timeout(timeout)
        return files, FolderBoard(Path(folder))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the agent of torchrun
    listener = None if is_served or rank > 0 else listen_at(host, port)
    connect = functools.partial(dist.TCPStore, host, port, size, timeout=timeout, wait_for_workers=False)
    store = connect(is_master=bool(listener), master_listen_fd=listener.detach() if listener else None)
    board = StoreBoard(connect(is_master=False), size, address=f"{host}:{port}")
    return dist.PrefixStore("hybrid_rl", store), board


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens at one address alone; PyTorch's own would listen on every interface.

    Raises:
        ConfigError: it cannot.
    """
    field = f"MASTER_ADDR = {host}, MASTER_PORT = {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        return listener
    except socket.gaierror as error:
        raise ConfigError(f"{field}: no such address ({error.strerror}); give the address of rank 0's node") from error
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "the port is in use; give a free one",
            errno.EADDRNOTAVAIL: "this machine, on which rank 0 runs, has no such address; give one of its own",
        }.get(error.errno or 0, f"rank 0 cannot listen there ({error.strerror})")
        raise ConfigError(f"{field}: {reason}") from error


def choose_interfaces(size: int) -> None:
    """Set the network interface of gloo and NCCL, where the user has not.

    Within one node it is the loopback interface. Across nodes gloo uses the one that leads to MASTER_ADDR, and NCCL
    chooses.

    Args:
        size: number of ranks.
    """
    if size in (1, int(os.environ.get("LOCAL_WORLD_SIZE", "0"))):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        return
    name = interface_to(os.environ["MASTER_ADDR"])
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_to(host: str) -> str | None:
    """Return the name of the network interface that leads to a host; None if the host is not known."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing, but chooses the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = [name for name, found in psutil.net_if_addrs().items() if own in {entry.address for entry in found}]
    return names[0] if names else None
