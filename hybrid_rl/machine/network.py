"""Checks of the addresses by which ranks meet."""

from collections.abc import Mapping

from hybrid_rl.config import ConfigError, check
from hybrid_rl.distributed import free_port
from hybrid_rl.distributed.joining import listen_at

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
"""Environment variables of torch that are numbers."""


def check_loopback() -> None:
    """Check that a port of the loopback interface can be opened.

    Raises:
        ConfigError: none can.
    """
    try:
        free_port()
    except OSError as error:
        raise ConfigError(
            f"no port of 127.0.0.1 can be opened ({error.strerror}): ranks and engine meet there; bring the loopback "
            "interface up"
        ) from error


def check_rendezvous(environment: Mapping[str, str]) -> None:
    """Check the variables by which a launcher such as torchrun tells a rank its place.

    Raises:
        ConfigError: a variable is no number, or missing; rank 0 cannot open the port.
    """
    numbers = {name: environment[name] for name in NUMBERS if name in environment}
    for name, value in numbers.items():
        check(value.isdecimal(), f"{name} = {value}: must be a number; unset it, or start with torchrun")
    rank, size = int(numbers.get("RANK", "0")), int(numbers.get("WORLD_SIZE", "1"))
    check(size > 0, f"WORLD_SIZE = {size}: must be at least 1")
    check(rank < size, f"RANK = {rank}: must be below WORLD_SIZE = {size}; unset both, or start with torchrun")
    if size == 1:
        return
    address = environment.get("MASTER_ADDR")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        check(
            bool(environment.get(name)),
            f"WORLD_SIZE = {size}: {name} is not set, by which ranks meet; unset WORLD_SIZE, or start with torchrun",
        )
    port = int(numbers["MASTER_PORT"])
    if rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        check(0 < port < 1 << 16, f"MASTER_PORT = {port}: a port is a number from 1 to 65535")
        listen_at(str(address), port).close()
