"""A program of another system as a table: its arguments, and the settings that they map to.

A setting that is not a copy of one argument has a rule. Arguments without a counterpart are listed in the comments of a
translation; an unknown argument is an error. In names, `fields` and `settings` are this trainer's, `arguments` the
other system's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

KEEP_DEFAULT: Any = object()
"""Result of a rule that leaves a setting at its default."""
GROUP = ".*"
"""End of a name that stands for all arguments with the part before it."""

Effect = Literal["maps", "lost", "missing", "moot", "refused", "fixed"]
"""What an argument does here: it sets fields; it changes the results but is not carried over; it changes speed, memory
or output but not the results, and is not carried over; it has no meaning here; no value but its default can be
translated; it is a fact about the code of the other system and no argument."""
Syntax = Literal["flags", "switches", "overrides"]
"""How arguments are written: `--name value`, and `--name` alone for a bool; the same where a bool may have a value, as
in Transformers; `name=value`, as in Hydra."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line that was read."""

    values: Mapping[str, Any]
    """First name of every argument of the program -> its value, given or default."""
    given: Mapping[str, str]
    """First name of every argument on the command line -> its spelling there."""
    num_processes: int | None
    """Number of processes that the launcher starts; None if the command line does not give it."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of another system, or one fact about its code that no argument changes."""

    names: tuple[str, ...]
    """Spellings without dashes, the newest first; an older one may belong to several arguments."""
    effect: Effect
    parse: Callable[[str], Any] = str
    """Converts a value; bool is a flag."""
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
    choices: Sequence[Any] | None = None,
    num_values: int | None = 1,
    when: Callable[[Command], bool] | None = None,
) -> Argument:
    """Return an argument without a counterpart that changes the results; its note appears unless it has its default.

    Args:
        choices: values that the other system knows; None is any.
    """
    argument = _without_counterpart("lost", names, parse, default, note, num_values, when)
    return replace(argument, choices={choice: choice for choice in choices}) if choices else argument


def missing(
    names: str,
    parse: Callable[[str], Any],
    default: Any,
    note: str,
    *,
    num_values: int | None = 1,
    when: Callable[[Command], bool] | None = None,
) -> Argument:
    """Return an argument without a counterpart that changes speed, memory or output; its note appears as in `lost`."""
    return _without_counterpart("missing", names, parse, default, note, num_values, when)


def refused(
    names: str, parse: Callable[[str], Any], default: Any, note: str, *, num_values: int | None = 1
) -> Argument:
    """Return an argument that ends the translation unless it has its default; the note ends the sentence."""
    return _without_counterpart("refused", names, parse, default, note, num_values, None)


def moot(names: str, parse: Callable[[str], Any], note: str, *, num_values: int | None = 1) -> Argument:
    """Return an argument that has no meaning here; the note says why."""
    count = 0 if parse is bool else num_values
    return Argument(names=tuple(names.split()), effect="moot", parse=parse, num_values=count, note=note)


def fixed(name: str, note: str, *fields: str, when: Callable[[Command], bool] | None = None) -> Argument:
    """Return a fact about the code of the other system; rules give the values of its fields."""
    return Argument(names=(f"({name})",), effect="fixed", fields=fields, note=note, when=when)


def _without_counterpart(
    effect: Effect,
    names: str,
    parse: Callable[[str], Any],
    default: Any,
    note: str,
    num_values: int | None,
    when: Callable[[Command], bool] | None,
) -> Argument:
    first = names.split()[0]
    return Argument(
        names=tuple(names.split()),
        effect=effect,
        parse=parse,
        num_values=0 if parse is bool else num_values,
        default=default,
        note=note,
        when=when or (lambda command: command[first] != default),
    )


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program of another system."""

    title: str
    names: tuple[str, ...]
    """Names of its module or file, or its words on a command line; the words that follow are its arguments."""
    arguments: tuple[Argument, ...]
    rules: Mapping[str, Callable[[Command], Any]] = field(default_factory=dict)
    """Setting -> its value, for settings that are not a copy of one argument."""
    syntax: Syntax = "flags"
    num_gpus: Callable[[Command], tuple[int, int] | None] = lambda command: None
    """Returns GPUs per node and nodes of the run, None if the command line does not give them."""

    @property
    def dashes(self) -> str:
        """What precedes the name of an argument on a command line."""
        return "" if self.syntax == "overrides" else "--"

    @property
    def spellings(self) -> dict[str, list[Argument]]:
        """Spelling on a command line -> the arguments that have it."""
        spellings: dict[str, list[Argument]] = {}
        for argument in self.arguments:
            for name in argument.names if argument.effect != "fixed" else ():
                spellings.setdefault(f"{self.dashes}{name}", []).append(argument)
        return spellings

    @property
    def fields(self) -> list[str]:
        """Every setting that an argument sets."""
        return list(dict.fromkeys(field for argument in self.arguments for field in argument.fields))
