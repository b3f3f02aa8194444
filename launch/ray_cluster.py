"""Train on a Ray cluster: one worker per GPU, on one node or many.

python launch/ray_cluster.py --address auto --config my.yaml                  every GPU of a running cluster
python launch/ray_cluster.py --address local --cpu --num_workers 2            two ranks in a new cluster on this node
python launch/ray_cluster.py --config my.yaml --max_failures 3                restarts after the failure of a node

The checkout, the models, the data and `run.dir` must have the same path on every node.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # so that a checkout runs without being installed

import ray  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, get_context  # noqa: E402
from ray.train.torch import TorchConfig, TorchTrainer  # noqa: E402

from hybrid_rl.config import Config, ConfigError, check  # noqa: E402
from hybrid_rl.printable import escape_messages, printable  # noqa: E402
from launch.settings import exit_on_config_error, make_parser, prepare, print_error, read_settings  # noqa: E402

FORWARDED = ("CUDA_", "DS_", "HF_", "HYBRID_RL_", "NCCL_", "OMP_", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_", "VLLM_")
"""Prefixes of the environment variables that workers inherit from this process, besides those of their node."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster, and how many workers train on it."""

    address: str = "auto"
    """Address of a running cluster, host:port or auto for the cluster of this node; local starts one and stops it."""
    num_workers: int | None = None
    """Number of ranks; null is one per GPU of the cluster, or per CPU with `cpu`."""
    cpu: bool = False
    """Train on CPUs, one per worker."""
    max_failures: int = 0
    """Number of times that all workers restart from the latest checkpoint after a worker or its node failed."""
    wait_s: float = 300.0
    """Seconds to wait at every start until the cluster has free resources for all workers."""

    @property
    def resource(self) -> str:
        """Ray's name of the resource of which a worker takes one."""
        return "CPU" if self.cpu else "GPU"


class OneGpuEach(TorchConfig):
    """A torch backend whose workers see their own GPU only, because a worker's engine must not see other GPUs."""

    @property
    def backend_cls(self) -> Any:
        """Return Ray's backend without the GPUs of the node's other workers."""
        return type("OneGpuEachBackend", (super().backend_cls,), {"share_cuda_visible_devices": False})


def parse(arguments: list[str] | None = None) -> tuple[Config, Cluster]:
    """Return the settings of the run and of the cluster; see read_settings."""
    parser = make_parser("ray_cluster.py", __doc__)
    parser.add_argument("--cpu", action="store_true", help="Train on CPUs, one per worker.")
    parser.add_class_arguments(Cluster, skip={"cpu"})
    config, settings = read_settings(parser, sys.argv[1:] if arguments is None else arguments)
    return config, Cluster(**{field.name: settings[field.name] for field in fields(Cluster)})


def work(job: Mapping[str, Any]) -> None:
    """Train as one rank, in a worker; Ray has set torch's environment variables and joined the ranks."""
    for stream in (sys.stdout, sys.stderr):  # Ray prints this name before every line of the worker
        stream.write(f":actor_name:rank {get_context().get_world_rank()}\n")
        stream.flush()
    escape_messages()
    folder = Path(job["folder"])
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist on {socket.gethostname()}: every node must have it")
    os.chdir(folder)  # paths in the settings are relative to the driver's folder
    from transformers.utils.logging import disable_progress_bar

    from hybrid_rl.trainer import train

    disable_progress_bar()
    train(job["config"])


def wait_for_resources(cluster: Cluster) -> int:
    """Wait until the cluster has free resources for all workers, and return their number.

    Raises:
        ConfigError: it does not within wait_s; the message lists the request and the resources of every node.
    """
    kind, deadline = cluster.resource, time.monotonic() + cluster.wait_s
    while True:
        free = int(ray.available_resources().get(kind, 0))
        wanted = cluster.num_workers or int(ray.cluster_resources().get(kind, 0))
        if 0 < wanted <= free:
            return wanted
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    nodes = [f"{n['NodeManagerAddress']} has {n['Resources'].get(kind, 0):.0f}" for n in ray.nodes() if n["Alive"]]
    asked = f"{wanted} workers with one {kind} each" if wanted else f"a worker for every {kind}"
    raise ConfigError(
        f"asked for {asked}; after {cluster.wait_s:.0f} s {free} of them are free ({', '.join(nodes)}): start more "
        "nodes, stop other jobs, or lower --num_workers"
    )


def make_trainer(config: Config, cluster: Cluster, num_workers: int) -> TorchTrainer:
    """Return Ray's trainer, which places the workers node by node, joins them, and restarts them after a failure."""
    return TorchTrainer(
        work,
        train_loop_config={"config": config, "folder": os.getcwd()},
        torch_config=OneGpuEach(backend="gloo" if cluster.cpu else "cpu:gloo,cuda:nccl"),
        scaling_config=ScalingConfig(
            num_workers=num_workers, use_gpu=not cluster.cpu, resources_per_worker={cluster.resource: 1}
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(config.run_dir.absolute()),
            failure_config=FailureConfig(
                max_failures=cluster.max_failures, controller_failure_limit=cluster.max_failures
            ),
        ),
    )


def launch(config: Config, cluster: Cluster) -> None:
    """Run all steps on the cluster.

    Raises:
        ConfigError: a setting cannot work, or the cluster has too few resources.
        TrainingFailedError: the run failed more often than max_failures.
    """
    check(
        not cluster.max_failures or config.run.resume != "never",
        f"--max_failures {cluster.max_failures}: a restart needs run.resume = auto or must, not never",
    )
    environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    # Ray waits 60 s by default, also after a failure, when the cluster may have to wait for another node.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(cluster.wait_s))
    ray.init(address=cluster.address, runtime_env={"env_vars": environment}, log_to_driver=True)
    try:
        make_trainer(config, cluster, wait_for_resources(cluster)).fit()
    finally:
        ray.shutdown()


def report_failure(error: TrainingFailedError) -> int:
    """Print why the run failed, and return the exit code: 2 for a setting that cannot work, else 1."""
    failures = getattr(error, "worker_failures", {})
    for rank, failure in sorted(failures.items()):
        if isinstance(failure, ConfigError):
            for message in failure.messages:
                print_error(message)
            return 2
        print(printable(f"rank {rank}: {type(failure).__name__}: {failure}"), file=sys.stderr)
    if not failures:
        print(printable(str(error)), file=sys.stderr)
    return 1


def main() -> None:
    """Read and check the settings, then train."""
    escape_messages()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))  # on which Ray stops the workers
    config, cluster = parse()
    try:
        with exit_on_config_error():
            launch(prepare(config), cluster)
    except TrainingFailedError as error:
        sys.exit(report_failure(error))


if __name__ == "__main__":
    main()
