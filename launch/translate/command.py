"""Translation of the command line of another system into settings, with comments that say what differs."""

import dataclasses
import functools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.printable import printable
from hybrid_rl.settings.types import takes_tuple, with_settings
from hybrid_rl.validate import validate

from .program import KEEP_DEFAULT, Argument, Command, Effect, Program
from .reading import find_program, read_arguments, written
from .shell import commands

FOR_CRITICS = ("models.critic", "update.critic.", "advantage.gae_lambda", "update.value_clip")
"""Settings, or prefixes of them, that are written only if the estimator trains a critic."""
PARAGRAPHS: Mapping[str, tuple[Effect, ...]] = {
    "Differs here:": ("maps", "fixed"),
    "Not carried over, and it changes the run:": ("lost",),
    "Missing here; it changes speed, memory or output, not the results:": ("missing",),
    "Has no meaning here:": ("moot",),
}


@dataclass(frozen=True, kw_only=True)
class Translation:
    """The settings that a command line means."""

    text: str
    """YAML that `--config` reads, after comments that say what differs."""
    findings: tuple[str, ...]
    """One sentence for everything that must be added or changed before a run can start."""


def translate(programs: Sequence[Program], words: Sequence[str]) -> Translation:
    """Return the settings that a command line of another system means.

    Args:
        programs: programs of the system; if the command line names none, the one whose arguments fit best counts.
        words: the command line as one text, such as a whole script, or word by word.

    Raises:
        ConfigError: arguments are unknown, or a value cannot be read or translated.
    """
    program, arguments, num_processes = _find(programs, words)
    command = read_arguments(program, arguments, num_processes)
    settings = settings_of(program, command)
    try:
        validate(configured(settings))
        findings: tuple[str, ...] = ()
    except ConfigError as error:
        findings = tuple(error.messages)
    text = _comments(program, command, findings) + yaml.safe_dump(_nested(settings), sort_keys=False)
    return Translation(text=text, findings=findings)


def settings_of(program: Program, command: Command) -> dict[str, Any]:
    """Return dotted setting -> value, for every setting whose value is not the default."""
    settings = {}
    for field in program.fields:
        if field in program.rules:
            value = program.rules[field](command)
        else:
            source = next(argument for argument in program.arguments if field in argument.fields)
            value = command[source.names[0]]
            value = source.choices[value] if source.choices else value
        if value is not KEEP_DEFAULT and value != _plain(default_of(field)):
            settings[field] = value
    if configured(settings).has_critic:
        return settings
    return {field: value for field, value in settings.items() if not field.startswith(FOR_CRITICS)}


@functools.cache
def default_of(field: str) -> Any:
    """Return the default of a dotted setting.

    Raises:
        AttributeError: there is no such setting.
    """
    value: Any = Config()
    for name in field.split("."):
        value = getattr(value, name)
    return value


def configured(settings: Mapping[str, Any]) -> Config:
    """Return the default config with some dotted settings changed, unchecked; a list may stand for a tuple."""
    as_tuples = {n: tuple(v) for n, v in settings.items() if isinstance(v, list) and takes_tuple(n)}
    return with_settings(Config(), {**settings, **as_tuples})


def _find(programs: Sequence[Program], words: Sequence[str]) -> tuple[Program, Sequence[str], int | None]:
    """Return the program, its arguments and the number of its processes; a YAML text is the only argument."""
    is_text = len(words) == 1
    if is_text and programs[0].syntax == "switches" and _is_mapping(words[0]):
        return programs[0], words, None
    return find_program(programs, commands(words[0]) if is_text else [list(words)])


def _is_mapping(text: str) -> bool:
    """Return whether a text is YAML with the names of arguments as its keys."""
    try:
        tree = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError:
        return False
    return isinstance(tree, dict) and all(str(name).isidentifier() for name in tree)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for field in sorted(settings, key=_place):
        *sections, name = field.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = settings[field]
    return tree


def _place(field: str) -> list[int]:
    """Return the position of a setting, so that the YAML has the order of `--help`."""
    place, section = [], Config()
    for name in field.split("."):
        place.append([f.name for f in dataclasses.fields(section)].index(name))
        section = getattr(section, name)
    return place


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _comments(program: Program, command: Command, findings: Sequence[str]) -> str:
    paragraphs = [f"Settings that mean what a command line of {program.title} means.", *_gpus(program, command)]
    if findings:
        paragraphs += ["", "NOT COMPLETE, it will not start like this:", *(f"- {message}" for message in findings)]
    feeding = [argument.names[0] for argument in program.arguments if argument.effect == "maps"]
    used = [name for name in feeding if name in command.given and "$" in str(command[name])]
    variables = [f"{command.given[name]} {written(command[name])}" for name in used]
    if variables:
        paragraphs += ["", "Shell variables, to be replaced:", *(f"- {text}" for text in variables)]
    for title, effects in PARAGRAPHS.items():
        notes = _notes(program, command, effects)
        paragraphs += ["", title, *notes] if notes else []
    wrap = textwrap.TextWrapper(116, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False).wrap
    wrapped = [line for text in paragraphs for line in wrap(text) or [""]]
    return "".join(f"# {printable(line)}".rstrip() + "\n" for line in wrapped) + "\n"


def _gpus(program: Program, command: Command) -> list[str]:
    """Return a line with the GPUs of the command line, if it gives them."""
    found = program.num_gpus(command)
    if found is None:
        return []
    per_node, nodes = found
    return [f"Its GPUs, for `colocated.py plan` and `check`: --gpus {per_node}" + f" --nodes {nodes}" * (nodes > 1)]


def _notes(program: Program, command: Command, effects: tuple[Effect, ...]) -> list[str]:
    """Return the notes that apply, each after all arguments that have it."""
    names: dict[str, list[str]] = {}
    for argument in program.arguments:
        if argument.note and argument.effect in effects and _applies(argument, command):
            first = argument.names[0]
            spelling = command.given.get(first, f"{program.dashes}{first}")
            names.setdefault(argument.note, []).append(first if argument.effect == "fixed" else spelling)
    return [f"- {', '.join(dict.fromkeys(spellings))}: {note}" for note, spellings in names.items()]


def _applies(argument: Argument, command: Command) -> bool:
    if argument.when is not None:
        return argument.when(command)
    return argument.effect == "fixed" or argument.names[0] in command.given
