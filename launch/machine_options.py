"""The options `--gpu`, `--gpu-memory`, `--gpus`, `--nodes`, `--host-memory`, which describe the machine of a plan."""

import re
from argparse import Namespace
from typing import TYPE_CHECKING

from hybrid_rl.config import ModelsConfig, check
from hybrid_rl.planning.cards import CARDS, Card, find_card

from .settings import SettingsParser

if TYPE_CHECKING:  # it imports torch, for which --help need not wait
    from hybrid_rl.planning.plan import Machine

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
DEFAULT_BYTES = 80 << 30
"""Memory of a GPU where no option names any, and this machine has none."""
GPU = f"The card, one of {', '.join(CARDS)}; null is the one of this machine, if it is among these."
GPU_MEMORY = "Memory of a GPU, such as 80GiB or 40GB; null is the card's. Without --gpu no seconds are predicted."
HOST_MEMORY = "Memory of a node, such as 512GiB; null only says what the run takes."


def add_machine_options(parser: SettingsParser) -> None:
    """Add the options that describe a machine."""
    parser.add_argument("--gpu", default=None, help=GPU)
    parser.add_argument("--gpu-memory", default=None, help=GPU_MEMORY)
    parser.add_argument("--gpus", type=int | None, default=None, help="GPUs of a node.")
    parser.add_argument("--nodes", type=int | None, default=None, help="Nodes.")
    parser.add_argument("--host-memory", default=None, help=HOST_MEMORY)


def parse_bytes(text: str, *, field: str) -> int:
    """Return the number of bytes of a size with its unit: 80GiB, 40 GB, 512MiB, 1073741824.

    Args:
        text: the size.
        field: name of the argument, for messages.

    Raises:
        ConfigError: the text is not a size, or the size is not positive.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(found[2].upper()) if found else None
    number = float(found[1]) * unit if found and unit else 0.0
    check(number >= 1, f"{field} = {text}: must be a size such as 80GiB, 40GB or 85899345920")
    return int(number)


def parse_card(name: str) -> Card:
    """Return the card of a name.

    Raises:
        ConfigError: no card has the name.
    """
    check(
        name.lower() in CARDS,
        f"--gpu {name}: must be one of {', '.join(CARDS)}; for another card give --gpu-memory alone",
    )
    return CARDS[name.lower()]


def parse_machine(settings: Namespace, found: "Machine | None" = None) -> "Machine":
    """Return the machine that the options describe.

    Args:
        settings: the options.
        found: the machine whose numbers count where the options give none; None is one GPU of this machine. With
            --gpu-memory and without --gpu, the card is unknown.

    Raises:
        ConfigError: a memory is not a size, or a card is not known.
    """
    from hybrid_rl.planning.plan import Machine

    found = found or machine_here()
    gpu_memory, host_memory = settings.gpu_memory, settings.host_memory
    card = None if settings.gpu is None else parse_card(settings.gpu)
    memory = None if gpu_memory is None else parse_bytes(gpu_memory, field="--gpu-memory")
    if card is None and memory is None:
        card, memory = found.card, found.gpu_memory_bytes
    host = found.host_memory_bytes if host_memory is None else parse_bytes(host_memory, field="--host-memory")
    return Machine(
        gpu_memory_bytes=memory or (card.memory_bytes if card else DEFAULT_BYTES),
        num_gpus=settings.gpus or found.num_gpus,
        num_nodes=settings.nodes or found.num_nodes,
        card=card,
        host_memory_bytes=host,
    )


def machine_here() -> "Machine":
    """Return one GPU of this machine; without one, an unknown card of DEFAULT_BYTES."""
    import torch

    from hybrid_rl.planning.plan import Machine

    if not torch.cuda.is_available():
        return Machine(gpu_memory_bytes=DEFAULT_BYTES)
    properties = torch.cuda.get_device_properties(0)
    return Machine(gpu_memory_bytes=properties.total_memory, card=find_card(properties.name))


def check_card(machine: "Machine", models: ModelsConfig) -> None:
    """Check that a known card can compute what the settings of the models ask for; see check_capability.

    Raises:
        ConfigError: it cannot.
    """
    from hybrid_rl.machine.gpus import check_capability

    if machine.card:
        check_capability(machine.card.name, machine.card.capability, models, ())
