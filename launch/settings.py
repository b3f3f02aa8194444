"""Code of both launchers: the parser of settings, the checks before a run, and the exit on an error."""

import itertools
import logging
import os
import sys
from argparse import REMAINDER, Action, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_dumper, set_loader, set_parsing_settings
from yaml import YAMLError

from hybrid_rl.config import Config, ConfigError, Findings, as_dict, check
from hybrid_rl.errors import RunError
from hybrid_rl.printable import hide_passwords, printable
from hybrid_rl.settings.ranges import COUNT, COUNT_OR_ZERO, NOT_NEGATIVE
from hybrid_rl.settings.types import with_settings
from hybrid_rl.settings.yaml_format import dump, load
from hybrid_rl.validate import validate

from .command_line import read_command_line
from .configurations import FOLDER
from .renamed import RENAMED

DEMO = FOLDER / "demo.yaml"

FORMAT = "settings"
"""Name under which jsonargparse has the YAML of settings files."""
OPTION_RANGES = {
    "num_processes": COUNT,
    "gpus": COUNT,
    "nodes": COUNT,
    "num_workers": COUNT,
    "max_failures": COUNT_OR_ZERO,
    "wait_s": NOT_NEGATIVE,
}
"""Option of a launcher -> range of its number."""

# While it is imported, vLLM logs before it reads VLLM_LOGGING_LEVEL. Its engine's process imports the launcher first.
logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper())


class HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help texts in which the lines of the description stay as they are."""


class SettingsParser(ArgumentParser):
    """A parser that reports an error in one sentence, without the usage text."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the sentence and exit with code 2."""
        print_error(" ".join(message.split()))
        sys.exit(2)

    def options(self) -> dict[str, Any]:
        """Return the launcher's own options -> the type of the value; a settings file may have them, too."""
        others = {"help", "config", "print_config"}
        return {a.dest: _type_of(a) for a in self._actions if a.dest not in others and a.nargs != REMAINDER}

    def flags(self) -> set[str]:
        """Return the options that take no value."""
        return {"print_config", *(action.dest for action in self._actions if action.nargs == 0)}


def _type_of(option: Action) -> Any:
    if option.nargs == 0:
        return bool
    kind = getattr(option, "_typehint", None) or str  # jsonargparse keeps the type of an option here
    return int if isinstance(kind, type) and issubclass(kind, int) else kind


def make_parser(program: str, description: str | None) -> SettingsParser:
    """Return a parser of `--config`; the launcher adds its own options, `read_settings` the settings of a run.

    Args:
        program: how the command is called, for its help.
        description: what it does, for its help.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    set_loader(FORMAT, load, (YAMLError,))
    set_dumper(FORMAT, dump)
    usage = f"{program} [--config FILE ...] [--OPTION VALUE ...] [--SETTING VALUE ...]"
    parser = SettingsParser(
        prog=program, usage=usage, description=description, parser_mode=FORMAT, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file with any of the settings below, or the name of a configuration of this package, such as grpo.",
    )
    return parser


def read_settings(parser: SettingsParser, arguments: list[str]) -> tuple[Config, Any]:
    """Return the settings of the run, and everything that the parser read.

    Without `--config`, the demo's settings are the base. Settings may have their former names, each with a warning.

    Raises:
        SystemExit: an argument or a settings file cannot be read; with code 2, after one sentence on stderr for each.
    """
    options = parser.options()
    flags = parser.flags()
    parser.add_class_arguments(Config)
    own = itertools.takewhile(lambda word: not word.startswith("--from-"), arguments)
    if {"-h", "--help"} & set(own):
        parser.parse_args(["--help"])
    if not any(a == "--config" or a.startswith("--config=") for a in arguments):
        arguments = ["--config", str(DEMO), *arguments]
    with exit_on_config_error():
        given = read_command_line(arguments, options=options, flags=flags)
        check_options(given.options)
    for name in dict.fromkeys(given.former_names):
        print(f"warning: {name} is now {RENAMED[name]}", file=sys.stderr)
    config = with_settings(Config(), given.settings)
    tree = as_dict(config) | given.options
    return config, parser.parse_args([f"--config={dump(tree, default_flow_style=True)}", *given.flags])


def check_options(options: Mapping[str, Any]) -> None:
    """Check that the numbers among the options of a launcher are in range.

    Raises:
        ConfigError: one sentence for every number that is not.
    """
    findings = Findings()
    for name in options.keys() & OPTION_RANGES.keys():
        rule = OPTION_RANGES[name].broken_rule(options[name]) if options[name] is not None else None
        findings.run(partial(check, rule is None, f"--{name} = {options[name]}: {rule}"))
    findings.raise_any()


def prepare(config: Config) -> Config:
    """Return the checked settings, in which the names of the demo's models and data are paths.

    Raises:
        ConfigError: a setting cannot work.
    """
    return with_demo(validate(config))


def with_demo(config: Config) -> Config:
    """Return the settings with paths in place of the names of files of the demo and the examples, built if needed."""
    from transformers.utils.logging import disable_progress_bar  # imported here, so that --help need not wait

    from hybrid_rl.demo import resolve_demo
    from hybrid_rl.examples.building import resolve_examples

    disable_progress_bar()  # of the demo's models, which are saved and loaded in a moment
    return resolve_examples(resolve_demo(config))


def print_error(error: object) -> None:
    """Print an error that the user can correct."""
    print(f"error: {printable(hide_passwords(str(error)))}", file=sys.stderr)


@contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Turn a ConfigError into one sentence per finding on stderr and exit code 2, and a RunError into its exit code."""
    try:
        yield
    except ConfigError as error:
        for message in error.messages:
            print_error(message)
        sys.exit(2)
    except RunError as error:
        print_error(error)
        sys.exit(error.exit_code)
