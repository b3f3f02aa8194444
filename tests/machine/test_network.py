"""The variables by which torch's launchers tell a rank its place."""

import socket

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.machine.network import check_loopback, check_rendezvous

ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def test_a_machine_has_a_loopback_interface():
    check_loopback()


def test_variables_of_a_launcher_are_accepted():
    check_rendezvous({})
    check_rendezvous(ALONE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check_rendezvous({**TWO, "MASTER_PORT": str(port)})


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": "first"}, "RANK = first: must be a number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = 0: must be at least 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2: must be below WORLD_SIZE = 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE = 2: MASTER_ADDR is not set"),
        (TWO, "WORLD_SIZE = 2: MASTER_PORT is not set"),
        ({**TWO, "MASTER_PORT": "70000"}, "a port is a number from 1 to 65535"),
        ({**TWO, "MASTER_ADDR": "no such host", "MASTER_PORT": "29500"}, "no such address"),
    ],
)
def test_variables_that_would_make_a_rank_wait_for_ever_are_refused(environment, sentence):
    with pytest.raises(ConfigError) as error:
        check_rendezvous(environment)
    assert sentence in str(error.value)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"MASTER_PORT = {port}: the port is in use; give a free one"):
            check_rendezvous({**TWO, "MASTER_PORT": port})
