"""Train on this node: one process per visible GPU, or one process on a CPU.

python launch/colocated.py                                    the embedded demo
python launch/colocated.py --config my.yaml                   your run
python launch/colocated.py --config my.yaml --update.actor.lr 1e-6
python launch/colocated.py --help                             every setting
python launch/colocated.py plan --config my.yaml --gpus 8     what will be on each GPU, and whether it fits
python launch/colocated.py --from-openrlhf "$(cat train.sh)" > my.yaml
"""

import logging
import os
import signal
import sys
import traceback
from argparse import REMAINDER, SUPPRESS, Action, Namespace
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # so that a checkout runs without being installed

from jsonargparse import ArgumentParser, set_parsing_settings  # noqa: E402
from jsonargparse.typing import PositiveInt  # noqa: E402

from hybrid_rl.config import Config, ConfigError, check  # noqa: E402
from hybrid_rl.validate import validate  # noqa: E402

DEMO = ROOT / "launch" / "configs" / "demo.yaml"


class SettingsParser(ArgumentParser):
    """Says what is wrong in one sentence, without a page of usage before it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the sentence and end with code 2."""
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)


class Translate(Action):
    """Prints the settings that a command line of another system means, and ends."""

    def __call__(
        self, parser: Any, namespace: Namespace, values: str | Sequence[Any] | None, option_string: str | None = None
    ) -> NoReturn:
        """Read the rest of the command line, quoted as one argument or not; what cannot be read ends with code 2."""
        from launch.translate.command import translate
        from launch.translate.systems import SYSTEMS

        try:
            print(translate(SYSTEMS[self.option_strings[0]], list(values or ())), end="")
        except ConfigError as error:
            parser.error(str(error))
        sys.exit(0)


def make_parser() -> SettingsParser:
    """Return a parser of everything a run can be told, to which a command adds its own options."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = SettingsParser(prog="colocated.py", description=__doc__)
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below.")
    for option, program in {"openrlhf": "OpenRLHF's train_ppo_ray", "coati": "ColossalChat's train_ppo.py"}.items():
        says = f"Print the settings that a command line of {program} means, with all that differs, and end."
        parser.add_argument(f"--from-{option}", action=Translate, nargs=REMAINDER, default=SUPPRESS, help=says)
    parser.add_class_arguments(Config)
    return parser


def read_settings(parser: SettingsParser, arguments: list[str]) -> tuple[Config, Any]:
    """Return the settings, and all that the parser read; without --config, the demo's settings are the base.

    Raises:
        SystemExit: with code 2 and one sentence, for anything that cannot be read.
    """
    if not any(a == "--config" or a.startswith("--config=") for a in arguments):
        arguments = ["--config", str(DEMO), *arguments]
    settings = parser.instantiate(parser.parse_args(arguments))
    return Config(**{name: settings[name] for name in Config.__dataclass_fields__}), settings


def parse(arguments: list[str] | None = None) -> tuple[Config, int | None]:
    """Return the settings and the number of processes asked for; see read_settings."""
    parser = make_parser()
    parser.add_argument("--num_processes", type=int | None, default=None, help="Ranks; null takes one per visible GPU.")
    config, settings = read_settings(parser, sys.argv[1:] if arguments is None else arguments)
    return config, settings.num_processes


def plan(arguments: list[str]) -> bool:
    """Print what a run would put on each GPU, and return whether it fits; loads nothing and needs no GPU.

    Raises:
        SystemExit: with code 2 and one sentence, for anything that cannot be read.
        ConfigError: a setting or a model's folder cannot work.
    """
    parser = make_parser()
    parser.add_argument("--gpu-memory", default="80GiB", help="Size of a card, such as 80GiB or 40GB.")
    parser.add_argument("--gpus", type=PositiveInt, default=1, help="GPUs of a node.")
    parser.add_argument("--nodes", type=PositiveInt, default=1, help="Nodes.")
    config, settings = read_settings(parser, arguments)
    from hybrid_rl.demo import resolve_demo
    from hybrid_rl.planning.plan import Machine
    from launch.plan import parse_bytes, show_plan

    memory = parse_bytes(settings.gpu_memory, field="--gpu-memory")
    machine = Machine(gpu_memory_bytes=memory, num_gpus=settings.gpus, num_nodes=settings.nodes)
    return show_plan(resolve_demo(validate(config)), machine)


def run_rank(config: Config) -> None:
    """Train as the rank that the environment describes, seeing only its own GPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    is_alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not is_alone:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local_rank] if visible else str(local_rank)
    from transformers.utils.logging import disable_progress_bar

    from hybrid_rl.distributed import leave_world
    from hybrid_rl.trainer import train

    disable_progress_bar()
    try:
        train(config)
        leave_world()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:
        if not is_alone:  # torch's agent would show one failed rank, perhaps one that only lost its neighbour
            traceback.print_exc()
        raise


def num_visible_gpus() -> int:
    """Return how many GPUs this process may use, without touching CUDA in it."""
    import torch

    return torch.cuda.device_count()


def launch(config: Config, num_processes: int | None) -> None:
    """Run one process per rank under torch's elastic agent; a single rank runs in this process."""
    num_gpus = num_visible_gpus()
    num_processes = num_processes or max(1, num_gpus)
    check(
        not num_gpus or num_processes <= num_gpus, f"--num_processes {num_processes}: only {num_gpus} GPUs are visible"
    )
    if num_processes == 1:
        run_rank(config)
        return
    # torch's agent would give each rank one thread, with which an optimizer on the host takes minutes.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_processes)))
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):  # the ranks print their own errors
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


def end_cleanly(signal_number: int, _: FrameType | None) -> NoReturn:
    """Turn a request to end into an exception, so that the engine and the scorers are ended too."""
    sys.exit(128 + signal_number)


def main() -> None:
    """Read the settings, check them, train or plan; a plan that does not fit ends with code 1."""
    for request in (signal.SIGTERM, signal.SIGINT):
        signal.signal(request, end_cleanly)
    try:
        if sys.argv[1:2] == ["plan"]:
            sys.exit(0 if plan(sys.argv[2:]) else 1)
        config, num_processes = parse()
        from hybrid_rl.demo import resolve_demo

        config = resolve_demo(validate(config))
        launch(config, num_processes)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
