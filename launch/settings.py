"""Code of both launchers: the parser of settings, the checks before a run, and the exit on an error."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, set_parsing_settings

from hybrid_rl.config import Config, ConfigError, RunError
from hybrid_rl.validate import validate
from launch.renamed import RENAMED, accept_former_names

DEMO = Path(__file__).parent / "configs" / "demo.yaml"

# While it is imported, vLLM logs before it reads VLLM_LOGGING_LEVEL. Its engine's process imports the launcher first.
logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR").upper())


class SettingsParser(ArgumentParser):
    """A parser that reports an error in one sentence, without the usage text."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the sentence and exit with code 2."""
        print_error(" ".join(message.split()))
        sys.exit(2)


def make_parser(program: str, description: str | None) -> SettingsParser:
    """Return a parser of `--config`; the launcher adds its own options, `read_settings` those of the run."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = SettingsParser(prog=program, description=description)
    parser.add_argument("--config", action="config", help="YAML file with any of the settings below.")
    return parser


def read_settings(parser: SettingsParser, arguments: list[str]) -> tuple[Config, Any]:
    """Return the settings of the run, and everything that the parser read.

    Without `--config`, the demo's settings are the base. Settings may have their former names, each with a warning.

    Raises:
        SystemExit: an argument or a settings file cannot be read; with code 2, after one sentence on stderr.
    """
    parser.add_class_arguments(Config)
    if not any(a == "--config" or a.startswith("--config=") for a in arguments):
        arguments = ["--config", str(DEMO), *arguments]
    try:
        arguments, former_names = accept_former_names(arguments)
    except ConfigError as error:
        parser.error(str(error))
    for name in dict.fromkeys(former_names):
        print(f"warning: {name} is now {RENAMED[name]}", file=sys.stderr)
    settings = parser.instantiate(parser.parse_args(arguments))
    return Config(**{name: settings[name] for name in Config.__dataclass_fields__}), settings


def prepare(config: Config) -> Config:
    """Return the checked settings, in which the names of the demo's models and data are paths.

    Raises:
        ConfigError: a setting cannot work.
    """
    from transformers.utils.logging import disable_progress_bar  # imported here, so that --help need not wait

    from hybrid_rl.demo import resolve_demo

    disable_progress_bar()  # of the demo's models, which are saved and loaded in a moment
    return resolve_demo(validate(config))


def print_error(error: object) -> None:
    """Print an error that the user can correct."""
    print(f"error: {error}", file=sys.stderr)


@contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Turn a ConfigError into one sentence per finding on stderr and exit code 2, and a RunError into exit code 1."""
    try:
        yield
    except ConfigError as error:
        for message in error.messages:
            print_error(message)
        sys.exit(2)
    except RunError as error:
        print_error(error)
        sys.exit(1)
