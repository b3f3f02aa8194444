"""The command `hybrid-rl`, whose first word names what it does."""

import difflib
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping

from hybrid_rl import __version__
from hybrid_rl.config import ConfigError, check
from hybrid_rl.settings.types import shorten

from .colocated import TRANSLATED, check_only, data, execute, plan, print_translation, run
from .commands import COMMANDS, description
from .configurations import configurations, title
from .rollouts import rollouts
from .settings import exit_on_config_error

PROGRAM = "hybrid-rl"
HELP = ("-h", "--help")


def translate(arguments: list[str], program: str) -> bool:
    """Print the settings that correspond to a command line of another system, whose name is the first word.

    Returns:
        True: the settings are complete.

    Raises:
        SystemExit: with code 2, if the command line cannot be read, or the printed settings are not complete.
        ConfigError: the first word names no system.
    """
    system = (arguments or [""])[0]
    if system in HELP:
        print(f"usage: {program} SYSTEM COMMAND_LINE\n\n{description('translate', program)}\n\nsystems:")
        print("\n".join(f"  {name:10}  {programs}" for name, programs in TRANSLATED.items()))
        return True
    systems = ", ".join(TRANSLATED)
    check(system in TRANSLATED, f"{program} {shorten(system)}: the first word must be one of {systems}")
    print_translation(f"--from-{system}", arguments[1:])
    return True


def configs(arguments: list[str], program: str) -> bool:
    """List the settings files of this package, or print one of them.

    Returns:
        True.

    Raises:
        ConfigError: there is no file of the name.
    """
    parser = ArgumentParser(
        prog=program, description=description("configs", program), formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="name of the configuration that is printed; none lists all names")
    name, files = parser.parse_args(arguments).name, configurations()
    if name is None:
        width = max(map(len, files))
        print("\n".join(f"{name:{width}}  {title(file)}" for name, file in files.items()))
        return True
    check(name in files, f"{program} {shorten(name)}: there is no such configuration{suggestion(name, files)}")
    print(files[name].read_text(encoding="utf-8"), end="")
    return True


COMMANDS_HERE: Mapping[str, Callable[[list[str], str], bool]] = {
    "run": run,
    "check": check_only,
    "plan": plan,
    "data": data,
    "rollouts": rollouts,
    "translate": translate,
    "configs": configs,
}
"""Name of a command of this node -> what it does; it gets its arguments and its own name, and answers yes or no."""


def overview() -> str:
    """Return the help that lists the commands."""
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {command.title}" for name, command in COMMANDS.items())
    return (
        f"usage: {PROGRAM} COMMAND [--OPTION VALUE ...]\n\n"
        "Train language models by reinforcement learning; training and generation take turns on every GPU.\n\n"
        f"commands:\n{listing}\n\n"
        f"`{PROGRAM} COMMAND --help` lists the options of a command, `{PROGRAM} run --help` every setting of a run."
    )


def main() -> None:
    """Run the command that the first word names; end quietly where the reader of the output has ended."""
    try:
        run_command()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end of the process
        sys.exit(1)


def run_command() -> None:
    """Run the command that the first word names."""
    name, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    program = f"{PROGRAM} {name}"
    if name in COMMANDS_HERE:
        execute(COMMANDS_HERE[name], arguments, program)
    elif name == "ray":
        from .ray_cluster import main as train_on_ray  # imports Ray, which takes seconds

        train_on_ray(arguments, program)
    elif name in HELP:
        print(overview())
    elif name == "--version":
        print(f"hybrid_rl {__version__}")
    else:
        with exit_on_config_error():
            known = f"the first word must be one of {', '.join(COMMANDS)}"
            raise ConfigError(f"{program}: there is no such command{suggestion(name, COMMANDS)}" if name else known)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the closest known one, if any is close."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
