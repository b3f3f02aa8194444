"""Train on this node: one process per visible GPU, or one process on a CPU.

python launch/colocated.py                                    the embedded demo
python launch/colocated.py --config my.yaml                   a run of your own
python launch/colocated.py --config my.yaml --update.actor.lr 1e-6
python launch/colocated.py --help                             every setting
python launch/colocated.py check --config my.yaml             all mistakes that show before a model loads
python launch/colocated.py data --config my.yaml              prompts, their lengths, and what the rewards make of them
python launch/colocated.py plan --config my.yaml --gpu h100   memory and time of a run, without a GPU
python launch/colocated.py --from-openrlhf "$(cat train.sh)" > my.yaml
"""

import os
import sys
from argparse import REMAINDER, SUPPRESS, Action, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script, perhaps of a checkout that is not installed
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    __package__ = "launch"

from hybrid_rl.config import Config, ConfigError, check  # noqa: E402
from hybrid_rl.errors import FileWriteError  # noqa: E402
from hybrid_rl.machine.packages import check_imports  # noqa: E402
from hybrid_rl.machine.visible_devices import without_spaces  # noqa: E402
from hybrid_rl.monitoring.signals import handle_signals  # noqa: E402
from hybrid_rl.printable import escape_messages, keep_output, printable  # noqa: E402

from .commands import description  # noqa: E402
from .settings import (  # noqa: E402
    SettingsParser,
    exit_on_config_error,
    make_parser,
    prepare,
    read_settings,
)

PROGRAM = "python launch/colocated.py"
NUM_PROCESSES = "Ranks; null takes one per visible GPU, or one on a CPU."
TRANSLATED = {
    "openrlhf": "OpenRLHF's train_ppo_ray",
    "coati": "ColossalChat's train_ppo.py, train_grpo.py or train_prompts_on_ray.py",
    "verl": "verl's main_ppo",
    "trl": "TRL's grpo, or a YAML file of it",
}
"""System -> its programs, for the help of `--from-<system>`."""


class Translate(Action):
    """Prints the settings that correspond to a command line of another system, and exits."""

    def __call__(
        self, parser: Any, namespace: Namespace, values: str | Sequence[Any] | None, option_string: str | None = None
    ) -> NoReturn:
        """Translate the rest of the command line, quoted as one argument or not.

        Raises:
            SystemExit: code 0; 2 if the command line cannot be read, or the printed settings are not complete.
        """
        print_translation(self.option_strings[0], list(values or ()))
        sys.exit(0)


def print_translation(option: str, words: Sequence[str]) -> None:
    """Print the settings that correspond to a command line of another system.

    Args:
        option: `--from-<system>`.
        words: the command line, quoted as one word or not.

    Raises:
        SystemExit: with code 2, if the command line cannot be read, or the printed settings are not complete.
    """
    from .translate.command import translate
    from .translate.systems import SYSTEMS

    with exit_on_config_error():
        translation = translate(SYSTEMS[option], words)
        print(translation.text, end="", flush=True)
        if translation.findings:
            raise ConfigError(*translation.findings)


def parse(arguments: list[str] | None = None, program: str = PROGRAM) -> tuple[Config, int | None]:
    """Return the settings of the run and the number of processes, None for one per visible GPU; see read_settings.

    Args:
        arguments: the command line; None is the one of this process.
        program: name of the command in its help; by this and the other functions.
    """
    parser = make_translating_parser(program, __doc__ if program == PROGRAM else description("run", program))
    parser.add_argument("--num_processes", type=int | None, default=None, help=NUM_PROCESSES)
    config, settings = read_settings(parser, sys.argv[1:] if arguments is None else arguments)
    return config, settings.num_processes


def make_translating_parser(program: str, text: str | None) -> SettingsParser:
    """Return a parser that also takes the command line of another system."""
    parser = make_parser(program, text)
    for option, program in TRANSLATED.items():
        text = f"Print the settings that correspond to a command line of {program}, with every difference, and exit."
        parser.add_argument(f"--from-{option}", action=Translate, nargs=REMAINDER, default=SUPPRESS, help=text)
    return parser


def plan(arguments: list[str], program: str = f"{PROGRAM} plan") -> bool:
    """Print what a run would put on each GPU, and return whether it fits; loads nothing and needs no GPU.

    Raises:
        SystemExit: an argument cannot be read; with code 2, after one sentence on stderr.
        ConfigError: a setting or a model's folder cannot work.
    """
    check_imports()
    from .machine_options import add_machine_options, parse_machine

    parser = make_translating_parser(program, description("plan", program))
    add_machine_options(parser)
    config, settings = read_settings(parser, arguments)
    from .plan import show_plan

    choose_accelerator()
    return show_plan(prepare(config), parse_machine(settings))


def check_only(arguments: list[str], program: str = f"{PROGRAM} check") -> bool:
    """Print what a run would start with, on this machine or on the GPUs that the arguments describe; loads no model.

    Returns:
        True: nothing is wrong.

    Raises:
        SystemExit: an argument cannot be read; with code 2, after one sentence on stderr.
        ConfigError: everything that is wrong and can be known before a model loads.
    """
    check_imports()
    from .machine_options import add_machine_options, parse_machine

    parser = make_translating_parser(program, description("check", program))
    parser.add_argument("--num_processes", type=int | None, default=None, help=NUM_PROCESSES)
    add_machine_options(parser)
    config, settings = read_settings(parser, arguments)
    from .check import check_run_elsewhere, check_run_here

    choose_accelerator()
    if settings.gpus is None and settings.gpu is None and settings.gpu_memory is None:
        check(settings.nodes is None, f"--nodes {settings.nodes}: needs --gpu, the card, or --gpus, the GPUs of a node")
        lines = check_run_here(config, settings.num_processes)
    else:
        lines = check_run_elsewhere(config, parse_machine(settings))
    print(printable("\n".join(lines)))
    return True


def data(arguments: list[str], program: str = f"{PROGRAM} data") -> bool:
    """Print the data of a run, and return whether the rule functions tell answers from empty responses.

    Raises:
        SystemExit: an argument cannot be read; with code 2, after one sentence on stderr.
        ConfigError: a setting, a model's folder or the data cannot work.
    """
    check_imports()
    config, _ = read_settings(make_translating_parser(program, description("data", program)), arguments)
    from .data import show_data

    choose_accelerator()
    return show_data(config)


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
    """Run one process per rank; a single rank runs in this process."""
    from .ranks import launch_ranks, run_rank  # imports torch, for which --help need not wait

    if num_processes == 1:
        run_rank(config)
    else:
        launch_ranks(config, num_processes)


def run(arguments: list[str], program: str = PROGRAM) -> bool:
    """Check the settings, then train.

    Returns:
        True: the run has ended as it should.
    """
    check_imports()
    config, num_processes = parse(arguments, program)
    from .check import start_checked

    choose_accelerator()
    keep_output()
    launch(*start_checked(config, num_processes))
    return True


COMMANDS: Mapping[str, Callable[[list[str], str], bool]] = {"plan": plan, "check": check_only, "data": data}
"""First word of a command line -> what it does instead of training."""


def refuse_output(reason: str) -> None:
    """End a command that does nothing but print.

    Raises:
        FileWriteError: always.
    """
    raise FileWriteError(f"stdout cannot be written ({reason}): what it has is not complete")


def execute(command: Callable[[list[str], str], bool], arguments: list[str], program: str) -> None:
    """Run a command in this process.

    Raises:
        SystemExit: with code 1, if the command answers no; for errors see hybrid_rl.errors.
    """
    escape_messages()
    keep_output(refuse_output)
    handle_signals()
    os.environ |= without_spaces(os.environ)
    with exit_on_config_error():
        is_done = command(arguments, program)
        sys.stdout.flush()
        if not is_done:
            sys.exit(1)


def main() -> None:
    """Train, or run the command that the first word names."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        execute(COMMANDS[arguments[0]], arguments[1:], f"{PROGRAM} {arguments[0]}")
    else:
        execute(run, arguments, PROGRAM)


if __name__ == "__main__":
    main()
