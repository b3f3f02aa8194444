"""Train on a Ray cluster: one worker per GPU, on one node or many.

python launch/ray_cluster.py --address auto --config my.yaml                  every GPU of a running cluster
python launch/ray_cluster.py --address local --cpu --num_workers 2            two ranks in a new cluster on this node
python launch/ray_cluster.py --config my.yaml --max_failures 3                restarts after the failure of a node
python launch/ray_cluster.py plan --config my.yaml --address auto             memory and time of a run on a cluster

The checkout, the models, the data and `run.dir` must have the same path on every node.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script, perhaps of a checkout that is not installed
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    __package__ = "launch"

import ray  # noqa: E402
from ray.exceptions import RayError  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, get_context  # noqa: E402
from ray.train.torch import TorchConfig, TorchTrainer  # noqa: E402
from ray.train.v2._internal.exceptions import RayTrainError  # noqa: E402

from hybrid_rl.config import Config, ConfigError, check  # noqa: E402
from hybrid_rl.errors import RankLostError, RunError  # noqa: E402
from hybrid_rl.machine.packages import check_imports  # noqa: E402
from hybrid_rl.monitoring import signals  # noqa: E402
from hybrid_rl.monitoring.start import Start  # noqa: E402
from hybrid_rl.printable import escape_messages  # noqa: E402
from hybrid_rl.settings.types import shorten  # noqa: E402

from .commands import description  # noqa: E402
from .ray_end import ending_workers, follow  # noqa: E402
from .ray_plan import plan  # noqa: E402
from .settings import exit_on_config_error, make_parser, prepare, print_error, read_settings  # noqa: E402

logger = logging.getLogger(__name__)

PROGRAM = "python launch/ray_cluster.py"
FORWARDED = (
    *("CUDA_", "DS_", "GLOO_", "HF_", "HUGGING_FACE_HUB_", "HYBRID_RL_", "NCCL_", "OMP_", "TOKENIZERS_", "TORCH_"),
    *("TRANSFORMERS_", "VLLM_"),
    *("MLFLOW_", "TRACKIO_", "WANDB_"),
)
"""Prefixes of the environment variables that workers inherit from this process, besides those of their node."""
SECRET = frozenset({"TOKEN", "KEY", "SECRET", "PASSWORD"})
"""Words in the names of variables that Ray may not log, as it logs the environment of a job."""


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


class Secrets:
    """Environment variables that workers get with their job, in which Ray shows their names only."""

    def __init__(self, values: dict[str, str]) -> None:
        """Take name -> value."""
        self.values = values

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self.values)})"


class RanksJoinThemselves(TorchConfig):
    """A torch backend that only tells workers their place; each sees its own GPU only, as its engine must.

    Ray's own would let rank 0 listen on every interface.
    """

    @property
    def backend_cls(self) -> Any:
        """Return the backend."""
        methods = {"share_cuda_visible_devices": False, "on_start": _set_places, "on_shutdown": _leave_to_workers}
        return type("RanksJoinThemselvesBackend", (super().backend_cls,), methods)


def _set_places(_: Any, workers: Any, __: TorchConfig) -> None:
    """Set the variables by which join_world finds the ranks, in all workers."""
    address, port = workers.execute_single(0, _address_of_rank_0)
    workers.execute(_set_place, address, port)


def _leave_to_workers(_: Any, __: Any, ___: TorchConfig) -> None:
    """Do nothing: workers that succeed have left the group, and the others are killed."""


def _address_of_rank_0() -> tuple[str, int]:
    """Return the address of this node in the cluster and a free port; loopback where all ranks are on this node."""
    context = get_context()
    is_one_node = context.get_local_world_size() == context.get_world_size()
    address = "127.0.0.1" if is_one_node else ray.util.get_node_ip_address()
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        return address, listener.getsockname()[1]


def _set_place(address: str, port: int) -> None:
    context = get_context()
    os.environ.update(
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
    )


def parse(arguments: list[str] | None = None, program: str = PROGRAM) -> tuple[Config, Cluster]:
    """Return the settings of the run and of the cluster; see read_settings.

    Args:
        arguments: the command line; None is the one of this process.
        program: how the command is called, for its help.
    """
    parser = make_parser(program, __doc__ if program == PROGRAM else description("ray", program))
    parser.add_argument("--cpu", action="store_true", help="Train on CPUs, one per worker.")
    parser.add_class_arguments(Cluster, skip={"cpu"})
    config, settings = read_settings(parser, sys.argv[1:] if arguments is None else arguments)
    return config, Cluster(**{field.name: settings[field.name] for field in fields(Cluster)})


def work(job: Mapping[str, Any]) -> None:
    """Train as one rank, in a worker, in which the environment names the place of the rank."""
    for stream in (sys.stdout, sys.stderr):  # Ray prints this name before every line of the worker
        stream.write(f":actor_name:rank {get_context().get_world_rank()}\n")
        stream.flush()
    escape_messages()
    folder = Path(job["folder"])
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist on {socket.gethostname()}: every node must have it")
    os.chdir(folder)  # paths in the settings are relative to the driver's folder
    os.environ.update(job["secrets"].values)
    follow(job["request"])
    with Start(is_shown=get_context().get_world_rank() == 0) as start:
        with start.stage("imports"):
            from transformers.utils.logging import disable_progress_bar

            from hybrid_rl.distributed import end_for_lost_rank, leave_world
            from hybrid_rl.trainer import train

            disable_progress_bar()
        with end_for_lost_rank():
            train(job["config"], start)
            leave_world()


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


def make_trainer(config: Config, cluster: Cluster, num_workers: int, request: Any) -> TorchTrainer:
    """Return Ray's trainer, which places the workers node by node, joins them, and restarts them after a failure."""
    return TorchTrainer(
        work,
        train_loop_config={
            "config": config,
            "folder": os.getcwd(),
            "secrets": secrets(config, os.environ),
            "request": request,
        },
        torch_config=RanksJoinThemselves(),
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


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all processes of the job get, and that Ray logs."""
    names = [name for name in environment if name.startswith(FORWARDED) and not is_secret(name)]
    forwarded = {name: environment[name] for name in names if name != "CUDA_VISIBLE_DEVICES"}
    is_checkout = (ROOT / "pyproject.toml").is_file()
    paths = [str(ROOT), str(ROOT / "kernels")] if is_checkout else []
    return forwarded | {"PYTHONPATH": os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])}


def secrets(config: Config, environment: Mapping[str, str]) -> Secrets:
    """Return the variables that workers get besides: tokens, and what reward functions ask for."""
    names = {name for name in environment if name.startswith(FORWARDED) and is_secret(name)}
    names |= environment.keys() & {*config.reward.environment_variables}
    return Secrets({name: environment[name] for name in sorted(names)})


def is_secret(name: str) -> bool:
    """Return whether an environment variable holds a secret, by its name."""
    return not SECRET.isdisjoint(name.upper().split("_"))


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
    # Ray waits 60 s by default, also after a failure, when the cluster may have to wait for another node.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(cluster.wait_s))
    ray.init(address=cluster.address, runtime_env={"env_vars": job_environment(os.environ)}, log_to_driver=True)
    try:
        warn_of_open_ports([node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]], os.environ)
        num_workers = wait_for_resources(cluster)
        with ending_workers(config) as request:
            make_trainer(config, cluster, num_workers, request).fit()
    finally:
        ray.shutdown()


def warn_of_open_ports(addresses: Collection[str], environment: Mapping[str, str]) -> None:
    """Warn if the cluster spans several machines and takes commands without a token.

    Args:
        addresses: of the nodes that are alive.
        environment: of this process after it has joined the cluster, in which Ray names its way of authentication.
    """
    num_machines = len(set(addresses))
    if num_machines > 1 and environment.get("RAY_AUTH_MODE", "").lower() != "token":
        logger.warning(
            "the Ray cluster spans %d machines and asks for no token: a process that reaches one of its ports can run "
            "code in it; set RAY_AUTH_MODE=token on every node, or let only these machines reach their network",
            num_machines,
        )


def report_failure(error: TrainingFailedError) -> int:
    """Print why the run failed, and return the exit code, which hybrid_rl.errors lists; 2 is a wrong setting.

    The errors of ranks that have lost another one count if there are no others, and Ray's word that a worker has died
    if there is nothing else.
    """
    failures: dict[int, Exception] = dict(sorted(getattr(error, "worker_failures", {}).items()))
    if not failures:
        print_error(shorten(str(error)))
        return 1
    first = min(map(_precedence, failures.values()))
    told = [describe(rank, failure) for rank, failure in failures.items() if _precedence(failure) == first]
    for message in dict.fromkeys(message for messages, _ in told[: 1 if first else None] for message in messages):
        print_error(message)
    return told[0][1]


def _precedence(failure: Exception) -> int:
    """Return 0 for a rank's own error, 1 for the loss of another one, 2 for a worker that has died."""
    return 2 if isinstance(failure, RayError | RayTrainError) else int(isinstance(failure, RankLostError))


def describe(rank: int, failure: Exception) -> tuple[list[str], int]:
    """Return the sentences about the error of a rank, and the exit code for it."""
    if isinstance(failure, ConfigError):
        return list(failure.messages), 2
    if isinstance(failure, RunError):
        return [str(failure)], failure.exit_code
    if _precedence(failure):
        return [f"rank {rank} has ended: Ray lost its worker, whose last lines are above"], RankLostError.exit_code
    return [f"rank {rank}: {type(failure).__name__}: {failure}"], 1


def main(arguments: list[str] | None = None, program: str = PROGRAM) -> None:
    """Read and check the settings, then train, or plan where the first word is `plan`; see parse."""
    escape_messages()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    signals.handle_signals()
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["plan"]:
        parser = make_parser(f"{program} plan", description("plan", f"{program} plan"))
        with exit_on_config_error():
            sys.exit(0 if plan(parser, words[1:], job_environment(os.environ)) else 1)
    config, cluster = parse(words, program)
    try:
        with exit_on_config_error():
            check_imports()
            launch(prepare(config), cluster)
    except TrainingFailedError as error:
        signals.raise_if_received()
        sys.exit(report_failure(error))
    except BaseException:
        signals.raise_if_received()  # Ray's own error after it has stopped the workers
        raise
    signals.raise_if_received()


if __name__ == "__main__":
    main()
