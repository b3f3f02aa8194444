"""Translation of the command line of another system into settings, with comments that say what differs.

A program of another system is a table of its arguments, each with the settings that it maps to. A setting that is not a
copy of one argument has a rule. Arguments without a counterpart are listed in the comments; an unknown argument is an
error. In names, `fields` and `settings` are this trainer's, `arguments` the other system's.
"""

import dataclasses
import difflib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import yaml

from hybrid_rl.config import Config, ConfigError, check
from hybrid_rl.settings.types import takes_tuple, with_settings
from hybrid_rl.validate import validate
from launch.translate.shell import commands, up_to_operator

KEEP_DEFAULT: Any = object()
"""Result of a rule that leaves a setting at its default."""


FOR_CRITICS = ("models.critic", "update.critic.", "advantage.gae_lambda", "update.value_clip")
"""Settings, or prefixes of them, that are written only if the estimator trains a critic."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line that was read."""

    values: Mapping[str, Any]
    """First name of every argument of the program -> its value, given or default."""
    given: Mapping[str, str]
    """First name of every argument on the command line -> its spelling there."""
    num_processes: int | None
    """Number of processes that torchrun or colossalai run starts; None if the command line does not give it."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of another system, or one fact about its code that no argument changes."""

    names: tuple[str, ...]
    """Spellings without dashes, the newest first; an older one may belong to several arguments."""
    effect: Literal["maps", "lost", "moot", "fixed"]
    """Sets a field; changes the run but has no counterpart; has no meaning here; is a fact, not an argument."""
    parse: Callable[[str], Any] = str
    """Converts a value; bool is a flag without a value."""
    num_values: int | None = 1
    """Number of values; None is one or more, up to the next argument."""
    default: Any = None
    fields: tuple[str, ...] = ()
    """Dotted names of the settings that it sets."""
    choices: Mapping[Any, Any] | None = None
    """Value -> value of the setting; other values are an error. None copies the value."""
    note: str = ""
    """What differs, as one phrase."""
    when: Callable[[Command], bool] | None = None
    """Whether the note applies; None is true if the argument is given, and always true for a fact."""


def maps(
    names: str,
    parse: Callable[[str], Any],
    default: Any,
    *fields: str,
    choices: Mapping[Any, Any] | None = None,
    num_values: int | None = 1,
    note: str = "",
    when: Callable[[Command], bool] | None = None,
) -> Argument:
    """Return an argument that sets fields; `names` are separated by blanks."""
    return Argument(
        names=tuple(names.split()),
        effect="maps",
        parse=parse,
        num_values=0 if parse is bool else num_values,
        default=default,
        fields=fields,
        choices=choices,
        note=note,
        when=when,
    )


def lost(
    names: str,
    parse: Callable[[str], Any],
    default: Any,
    note: str,
    *,
    when: Callable[[Command], bool] | None = None,
) -> Argument:
    """Return an argument without a counterpart, whose note appears unless it has its default."""
    return Argument(
        names=tuple(names.split()),
        effect="lost",
        parse=parse,
        num_values=0 if parse is bool else 1,
        default=default,
        note=note,
        when=when or (lambda command: command[names.split()[0]] != default),
    )


def moot(names: str, parse: Callable[[str], Any], note: str) -> Argument:
    """Return an argument that has no meaning here; the note says why."""
    num_values = 0 if parse is bool else 1
    return Argument(names=tuple(names.split()), effect="moot", parse=parse, num_values=num_values, note=note)


def fixed(name: str, note: str, *fields: str, when: Callable[[Command], bool] | None = None) -> Argument:
    """Return a fact about the code of the other system; rules give the values of its fields."""
    return Argument(names=(f"({name})",), effect="fixed", fields=fields, note=note, when=when)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of another system."""

    title: str
    names: tuple[str, ...]
    """Names of its module or file; the words that follow on a command line are its arguments."""
    arguments: tuple[Argument, ...]
    rules: Mapping[str, Callable[[Command], Any]]
    """Setting -> its value, for settings that are not a copy of one argument."""

    @property
    def spellings(self) -> dict[str, list[Argument]]:
        """Spelling with dashes -> the arguments that have it."""
        spellings: dict[str, list[Argument]] = {}
        for argument in self.arguments:
            for name in argument.names if argument.effect != "fixed" else ():
                spellings.setdefault(f"--{name}", []).append(argument)
        return spellings

    @property
    def fields(self) -> list[str]:
        """Every setting that an argument sets."""
        return list(dict.fromkeys(field for argument in self.arguments for field in argument.fields))


def translate(programs: Sequence[Program], words: Sequence[str]) -> str:
    """Return the settings as YAML that `--config` reads, after comments that say what differs.

    Args:
        programs: programs of the system; if the command line names none, the one whose arguments fit best counts.
        words: the command line as one text, such as a whole script, or word by word.
    Raises:
        ConfigError: arguments are unknown, or a value cannot be read.
    """
    lines = commands(words[0]) if len(words) == 1 else [list(words)]
    program, arguments, num_processes = _find_program(programs, lines)
    command = read_arguments(program, arguments, num_processes)
    settings = settings_of(program, command)
    return _comments(program, command, settings) + yaml.safe_dump(_nested(settings), sort_keys=False)


def read_arguments(program: Program, words: Sequence[str], num_processes: int | None = None) -> Command:
    """Return the values of a program's arguments on a command line.

    Raises:
        ConfigError: arguments are unknown, all of which are named, or a value cannot be read.
    """
    spellings = program.spellings
    values = {argument.names[0]: argument.default for argument in program.arguments}
    given: dict[str, str] = {}
    unknown = []
    position = 0
    while position < len(words):
        name, equals, attached = words[position].partition("=")
        following = [attached] if equals else _values_after(words, position)
        position += 1
        if name not in spellings:
            unknown.append(name if name.startswith("-") else words[position - 1])
            position += 0 if equals else len(following)
            continue
        for argument in spellings[name]:
            count = len(following) if argument.num_values is None else argument.num_values
            values[argument.names[0]] = _value(argument, name, following if equals else following[:count])
            given[argument.names[0]] = name
        position += 0 if equals else count
    check(not unknown, f"{program.title} has no {', '.join(_with_suggestion(name, spellings) for name in unknown)}")
    return Command(values=values, given=given, num_processes=num_processes)


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


def _find_program(programs: Sequence[Program], lines: Sequence[list[str]]) -> tuple[Program, Sequence[str], int | None]:
    """Return the program, its arguments up to a pipe or redirection, and the number of processes."""
    for line in lines:
        for position, word in enumerate(line):
            for program in programs:
                if word in program.names or PurePath(word).name in program.names:
                    return program, up_to_operator(line[position + 1 :]), _num_processes(line[:position])
    words = [word for line in lines for word in line]
    names = " or ".join(program.names[0] for program in programs)
    check(bool(words) and words[0].startswith("-"), f"expected a command line of {names}, or its arguments alone")
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    best = min(programs, key=lambda program: sum(option not in program.spellings for option in options))
    return best, words, None


def _num_processes(launcher: Sequence[str]) -> int | None:
    text = " ".join(launcher)
    per_node = re.search(r"--nproc[_-]per[_-]node[= ](\d+)", text)
    nodes = re.search(r"--(?:nnodes|num[_-]nodes)[= ](\d+)", text)
    return int(per_node[1]) * (int(nodes[1]) if nodes else 1) if per_node else None


def _values_after(words: Sequence[str], position: int) -> list[str]:
    """Return the words up to the next argument; a negative number is a value."""
    values = []
    for word in words[position + 1 :]:
        if re.match(r"--?[A-Za-z_]", word):
            break
        values.append(word)
    return values


def _value(argument: Argument, name: str, words: Sequence[str]) -> Any:
    count = argument.num_values
    wanted = {0: "no value", None: "one value or more"}.get(count, f"{count} values" if count != 1 else "one value")
    check(len(words) == count if count is not None else bool(words), f"{name} takes {wanted}, got {len(words)}")
    if count == 0:
        return True
    try:
        values = [argument.parse(word) for word in words]
    except ValueError:
        kind = "a whole number" if argument.parse is int else "a number"
        raise ConfigError(f"{name} {' '.join(words)}: must be {kind}") from None
    value = values[0] if count == 1 else values
    for item in values:
        known = argument.choices
        check(known is None or item in known, f"{name} {item}: has no counterpart here, only {_listed(known)}")
    return value


def _listed(choices: Mapping[Any, Any] | None) -> str:
    return ", ".join(str(choice) for choice in choices or ())


def _with_suggestion(name: str, spellings: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, spellings, n=1, cutoff=0.75)
    return f"{name} (did you mean {close[0]}?)" if close else name


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


def _comments(program: Program, command: Command, settings: Mapping[str, Any]) -> str:
    paragraphs = [f"Settings that mean what a command line of {program.title} means."]
    try:
        validate(configured(settings))
    except ConfigError as error:
        paragraphs += [
            "",
            "NOT COMPLETE, it will not start like this:",
            *(f"- {message}" for message in error.messages),
        ]
    feeding = [argument.names[0] for argument in program.arguments if argument.effect == "maps"]
    used = [name for name in feeding if name in command.given and "$" in str(command[name])]
    variables = [f"{command.given[name]} {_words(command[name])}" for name in used]
    if variables:
        paragraphs += ["", "Shell variables, to be replaced:", *(f"- {text}" for text in variables)]
    for title, effects in {
        "Differs here:": ("maps", "fixed"),
        "Not carried over, and it changes the run:": ("lost",),
        "Has no meaning here:": ("moot",),
    }.items():
        notes = _notes(program, command, effects)
        paragraphs += ["", title, *notes] if notes else []
    wrap = textwrap.TextWrapper(116, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False).wrap
    wrapped = [line for text in paragraphs for line in wrap(text) or [""]]
    return "".join(f"# {line}".rstrip() + "\n" for line in wrapped) + "\n"


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _notes(program: Program, command: Command, effects: tuple[str, ...]) -> list[str]:
    """Return the notes that apply, each after all arguments that have it."""
    names: dict[str, list[str]] = {}
    for argument in program.arguments:
        if argument.note and argument.effect in effects and _applies(argument, command):
            first = argument.names[0]
            name = first if argument.effect == "fixed" else command.given.get(first, f"--{first}")
            names.setdefault(argument.note, []).append(name)
    return [f"- {', '.join(dict.fromkeys(spellings))}: {note}" for note, spellings in names.items()]


def _applies(argument: Argument, command: Command) -> bool:
    if argument.when is not None:
        return argument.when(command)
    return argument.effect == "fixed" or argument.names[0] in command.given
