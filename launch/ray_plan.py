"""Plans a run on a Ray cluster: its nodes and GPUs come from the options, or from a cluster that runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybrid_rl.config import check
from hybrid_rl.machine.gpus import driver_names
from hybrid_rl.planning.cards import find_card
from hybrid_rl.planning.plan import Machine
from hybrid_rl.planning.startup import machine_of

from .machine_options import DEFAULT_BYTES, add_machine_options, parse_machine
from .plan import show_plan
from .settings import SettingsParser, prepare, read_settings

ADDRESS = "Cluster whose nodes and GPUs are planned for, host:port or auto; null takes --gpus and --nodes."


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a cluster that has GPUs."""

    num_gpus: int
    """GPUs that Ray counts."""
    gpus: Sequence[tuple[str, int]]
    """Name and bytes of memory of the GPUs that the driver lists; none if it lists none."""
    memory_bytes: int
    """Memory of the node."""


def plan(parser: SettingsParser, arguments: list[str], environment: dict[str, str]) -> bool:
    """Print what a run would put on each GPU, and return whether it fits.

    Args:
        parser: parser of the settings of a run.
        arguments: the command line.
        environment: variables of the processes that look at the nodes.

    Raises:
        SystemExit: an argument cannot be read; with code 2, after one sentence on stderr.
        ConfigError: a setting or a model's folder cannot work; the cluster has no GPU.
    """
    add_machine_options(parser)
    parser.add_argument("--address", default=None, help=ADDRESS)
    config, settings = read_settings(parser, arguments)
    found = machine_of_nodes(read_nodes(settings.address, environment)) if settings.address else None
    return show_plan(prepare(config), parse_machine(settings, found))


def read_nodes(address: str, environment: dict[str, str]) -> list[Node]:
    """Return the nodes of a cluster that have GPUs, each as a process on it sees them.

    Raises:
        ConfigError: there are none.
    """
    ray.init(address=address, runtime_env={"env_vars": environment}, log_to_driver=False)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU", 0) >= 1]
        check(
            bool(nodes),
            f"--address {address}: no node of the cluster has a GPU; leave it out, and give --gpu, --gpus and --nodes",
        )
        looks = [_look.options(scheduling_strategy=_on(node)).remote() for node in nodes]
        return [
            Node(num_gpus=int(node["Resources"]["GPU"]), gpus=gpus, memory_bytes=memory)
            for node, (gpus, memory) in zip(nodes, ray.get(looks), strict=True)
        ]
    finally:
        ray.shutdown()


def _on(node: dict[str, Any]) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)


@ray.remote(num_cpus=0)
def _look() -> tuple[list[tuple[str, int]], int]:
    """Return the GPUs that the driver lists, and the memory of the node."""
    return driver_names(), psutil.virtual_memory().total


def machine_of_nodes(nodes: Sequence[Node]) -> Machine:
    """Return the machine of a cluster: by node, or as one node if the nodes have different numbers of GPUs.

    The card is known if all GPUs are of one known kind; the least memory of any GPU and of any node counts.
    """
    listed = [gpu for node in nodes for gpu in node.gpus]
    cards = {find_card(name) for name, _ in listed}
    least = min((memory for _, memory in listed), default=DEFAULT_BYTES)
    counts = [node.num_gpus for node in nodes for _ in range(node.num_gpus)]
    machine = machine_of(counts, least)
    return Machine(
        gpu_memory_bytes=least,
        num_gpus=machine.num_gpus,
        num_nodes=machine.num_nodes,
        card=cards.pop() if len(cards) == 1 else None,
        host_memory_bytes=min(node.memory_bytes for node in nodes),
    )
