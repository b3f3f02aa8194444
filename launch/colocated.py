"""Train on this node: one process per visible GPU, or one process on a CPU.

python launch/colocated.py                                    the embedded demo
python launch/colocated.py --config my.yaml                   a run of your own
python launch/colocated.py --config my.yaml --update.actor.lr 1e-6
python launch/colocated.py --help                             every setting
python launch/colocated.py check --config my.yaml             all mistakes that show before a model loads
python launch/colocated.py plan --config my.yaml --gpus 8     memory and time of a run, without a GPU
python launch/colocated.py --from-openrlhf "$(cat train.sh)" > my.yaml
"""

import logging
import os
import signal
import sys
import time
import traceback
from argparse import REMAINDER, SUPPRESS, Action, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # so that a checkout runs without being installed

from jsonargparse.typing import PositiveInt  # noqa: E402

from hybrid_rl.config import Config, check  # noqa: E402
from hybrid_rl.errors import PreemptedError  # noqa: E402
from hybrid_rl.machine.visible_devices import VARIABLE, name_of_rank  # noqa: E402
from hybrid_rl.monitoring.signals import exit_with, handle_signals, raise_if_received  # noqa: E402
from launch.settings import (  # noqa: E402
    SettingsParser,
    exit_on_config_error,
    make_parser,
    prepare,
    read_settings,
)

NUM_PROCESSES = "Ranks; null takes one per visible GPU, or one on a CPU."
AGENT_TIMEOUT_S = 5.0
"""How long a rank that has lost another waits for torch's agent to end it: the other one has printed the reason."""


class Translate(Action):
    """Prints the settings that correspond to a command line of another system, and exits."""

    def __call__(
        self, parser: Any, namespace: Namespace, values: str | Sequence[Any] | None, option_string: str | None = None
    ) -> NoReturn:
        """Translate the rest of the command line, quoted as one argument or not; exit code 2 if it cannot be read."""
        from launch.translate.command import translate
        from launch.translate.systems import SYSTEMS

        with exit_on_config_error():
            print(translate(SYSTEMS[self.option_strings[0]], list(values or ())), end="")
        sys.exit(0)


def parse(arguments: list[str] | None = None) -> tuple[Config, int | None]:
    """Return the settings of the run and the number of processes, None for one per visible GPU; see read_settings."""
    parser = make_translating_parser()
    parser.add_argument("--num_processes", type=int | None, default=None, help=NUM_PROCESSES)
    config, settings = read_settings(parser, sys.argv[1:] if arguments is None else arguments)
    return config, settings.num_processes


def make_translating_parser() -> SettingsParser:
    """Return a parser that also takes the command line of another system."""
    parser = make_parser("colocated.py", __doc__)
    for option, program in {"openrlhf": "OpenRLHF's train_ppo_ray", "coati": "ColossalChat's train_ppo.py"}.items():
        text = f"Print the settings that correspond to a command line of {program}, with every difference, and exit."
        parser.add_argument(f"--from-{option}", action=Translate, nargs=REMAINDER, default=SUPPRESS, help=text)
    return parser


def plan(arguments: list[str]) -> bool:
    """Print what a run would put on each GPU, and return whether it fits; loads nothing and needs no GPU.

    Raises:
        SystemExit: an argument cannot be read; with code 2, after one sentence on stderr.
        ConfigError: a setting or a model's folder cannot work.
    """
    parser = make_translating_parser()
    parser.add_argument("--gpu-memory", default="80GiB", help="Memory of a GPU, such as 80GiB or 40GB.")
    parser.add_argument("--gpus", type=PositiveInt, default=1, help="GPUs of a node.")
    parser.add_argument("--nodes", type=PositiveInt, default=1, help="Nodes.")
    config, settings = read_settings(parser, arguments)
    from launch.plan import show_plan

    choose_accelerator()
    return show_plan(prepare(config), parse_machine(settings))


def parse_machine(settings: Namespace) -> Any:
    """Return the machine that `--gpus`, `--gpu-memory` and `--nodes` describe.

    Raises:
        ConfigError: the memory is not a size.
    """
    from hybrid_rl.planning.plan import Machine
    from launch.plan import parse_bytes

    memory = parse_bytes(settings.gpu_memory, field="--gpu-memory")
    return Machine(gpu_memory_bytes=memory, num_gpus=settings.gpus, num_nodes=settings.nodes)


def check_only(arguments: list[str]) -> None:
    """Print what a run would start with, on this machine or on the GPUs that the arguments describe; loads no model.

    Raises:
        SystemExit: an argument cannot be read; with code 2, after one sentence on stderr.
        ConfigError: everything that is wrong and can be known before a model loads.
    """
    parser = make_translating_parser()
    parser.add_argument("--num_processes", type=int | None, default=None, help=NUM_PROCESSES)
    parser.add_argument("--gpus", type=int | None, default=None, help="GPUs of a node of another machine.")
    parser.add_argument("--gpu-memory", default="80GiB", help="Memory of a GPU of the other machine.")
    parser.add_argument("--nodes", type=PositiveInt, default=1, help="Nodes of the other machine.")
    config, settings = read_settings(parser, arguments)
    from launch.check import check_run_elsewhere, check_run_here

    choose_accelerator()
    if settings.gpus is None:
        check(settings.nodes == 1, f"--nodes {settings.nodes}: needs --gpus, the GPUs of a node")
        lines = check_run_here(config, settings.num_processes)
    else:
        lines = check_run_elsewhere(config, parse_machine(settings))
    print("\n".join(lines))


def run_rank(config: Config) -> None:
    """Train as the rank that torch's environment variables name; the process sees the GPU of this rank alone."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    is_alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1
    if not is_alone:
        os.environ[VARIABLE] = name_of_rank(os.environ, local_rank)
    handle_signals(is_quiet=not is_alone)
    if config.checkpoint.on_sigterm:
        exit_with(signal.SIGTERM, PreemptedError.exit_code)
    from transformers.utils.logging import disable_progress_bar

    from hybrid_rl.distributed import leave_world
    from hybrid_rl.trainer import train

    disable_progress_bar()
    try:
        with exit_on_config_error():
            train(config)
            leave_world()
            raise_if_received()
    except Exception as error:
        if "Connection closed by peer" in str(error):
            time.sleep(AGENT_TIMEOUT_S)
        if not is_alone:  # torch's agent shows one failed rank only, perhaps one that lost the connection to another
            traceback.print_exc()
        raise


def num_visible_gpus() -> int:
    """Return the number of GPUs that this process may use, without initialising CUDA in it."""
    import torch

    return torch.cuda.device_count()


def choose_accelerator() -> None:
    """Let DeepSpeed use the CPU if no GPU is visible, because it warns if it detects that itself.

    Called before the demo's models are built: transformers imports DeepSpeed when it saves a model.
    """
    if not num_visible_gpus():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def launch(config: Config, num_processes: int) -> None:
    """Run one process per rank under torch's elastic agent; a single rank runs in this process."""
    if num_processes == 1:
        run_rank(config)
        return
    # torch's agent would give each rank one thread, which is too few for an optimizer on the host.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_processes)))
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):  # each rank prints its own error
        logging.getLogger(name).setLevel(logging.CRITICAL)
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=config.run.name,
        max_restarts=0,
    )
    try:
        elastic_launch(agent, run_rank)(config)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} ended with exit code {failure.exitcode}", file=sys.stderr)
        sys.exit(failure.exitcode)


def main() -> None:
    """Read and check the settings, then train or plan; a plan that does not fit exits with code 1."""
    handle_signals()
    with exit_on_config_error():
        if sys.argv[1:2] == ["plan"]:
            sys.exit(0 if plan(sys.argv[2:]) else 1)
        if sys.argv[1:2] == ["check"]:
            check_only(sys.argv[2:])
            return
        config, num_processes = parse()
        from launch.check import start_checked

        choose_accelerator()
        launch(*start_checked(config, num_processes))


if __name__ == "__main__":
    main()
