"""Where ranks listen, and what a stranger who writes into their store can do."""

import datetime
import os
import pickle
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from hybrid_rl.config import ConfigError
from hybrid_rl.distributed import free_port, join_world, leave_world
from hybrid_rl.distributed.board import FolderBoard, StoreBoard, own_note
from hybrid_rl.distributed.joining import FOLDER_VARIABLE, interface_to, listen_at
from tests.programs import PATHS

NOWHERE = "192.0.2.1"
"""An address that no machine has."""


def listening() -> set[str]:
    """Return the addresses at which this process listens."""
    return {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def main() -> None:
    """Join as one of some ranks, and save the sum of all ranks' numbers and the addresses of this one."""
    world = join_world(timeout_s=60.0)
    found = world.sum(torch.tensor(world.rank + 1)), listening()
    torch.save(found, Path(sys.argv[1]) / f"rank{world.rank}.pt")
    leave_world()


def test_ranks_that_meet_at_an_address_listen_there_and_nowhere_else(fork_servers, tmp_path):
    """Like a start by hand, on a node with an address of its own: 127.0.0.2 stands for it."""
    common = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for rank, server in enumerate(fork_servers):
        places = {"RANK": str(rank), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        server.start(__file__, str(tmp_path), environment={**os.environ, **PATHS, **common, **places})
    ended = [server.wait() for server in fork_servers]
    assert [e.code for e in ended] == [0, 0], "".join(e.output[-3000:] for e in ended)
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert [int(total) for total, _ in found] == [3, 3]
    assert [addresses for _, addresses in found] == [{"127.0.0.1", "127.0.0.2"}, {"127.0.0.1"}]


def test_a_single_rank_listens_on_loopback_alone(fork_servers, tmp_path):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", FOLDER_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in names} | PATHS
    fork_servers[0].start(__file__, str(tmp_path), environment=environment)
    ended = fork_servers[0].wait()
    assert ended.code == 0, ended.output
    total, addresses = torch.load(tmp_path / "rank0.pt", weights_only=False)
    assert (int(total), addresses) == (1, {"127.0.0.1"})


def test_an_address_of_another_machine_is_refused_by_name():
    expected = f"MASTER_ADDR = {NOWHERE}, MASTER_PORT = 29500: this machine, on which rank 0 runs, has no such address"
    with pytest.raises(ConfigError, match=expected):
        listen_at(NOWHERE, 29500)


def test_a_port_in_use_is_refused_by_name():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"MASTER_PORT = {port}: the port is in use"):
            listen_at("127.0.0.1", port)


def test_gloo_uses_the_interface_that_leads_to_rank_0():
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("a name that nobody has") is None


class Payload:
    """A value that runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self._marker),)


def test_a_pickle_in_the_store_runs_no_code(tmp_path):
    """A stranger who reaches the port of the store writes it under the name of rank 1."""
    payload = pickle.dumps(Payload(tmp_path / "ran"))
    with listen_at("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        second = datetime.timedelta(seconds=10)
        store = dist.TCPStore(
            "127.0.0.1", port, 2, True, second, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    stranger = dist.TCPStore("127.0.0.1", port, 2, False, second, wait_for_workers=False)
    stranger.set("hybrid_rl/rank1", payload)
    board = StoreBoard(store.clone(), 2, address=f"127.0.0.1:{port}")
    board.write(0, own_note(os.getpid(), count=1, work="start"))
    deadline = time.monotonic() + 30
    while board.failure() is None and board.read(0) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert board.read(1) is None
    assert not (tmp_path / "ran").exists()
    pickle.loads(payload)
    assert (tmp_path / "ran").exists()  # the payload does work where something unpickles it


def test_a_pickle_in_the_folder_runs_no_code(tmp_path):
    (tmp_path / "rank1.json").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    assert FolderBoard(tmp_path).read(1) is None
    assert not (tmp_path / "ran").exists()


if __name__ == "__main__":
    main()
