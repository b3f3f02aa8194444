"""Reads the arguments of another system's program from the words of a command line."""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from hybrid_rl.config import ConfigError, check

from .program import GROUP, Argument, Command, Program
from .shell import up_to_operator

TRUE, FALSE = ("true", "yes", "t", "y", "1", "on"), ("false", "no", "f", "n", "0", "off")
Word = tuple[str, list[str | None]]
"""The name of an argument as it is written, and its values; None is a null."""


def count(text: str) -> int:
    """Return a whole number above 0."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def finite(text: str) -> float:
    """Return a number that is neither infinite nor nan."""
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


def optional(text: str) -> float | None:
    """Return a number, or None for the word `none` or `null`."""
    return None if text.lower() in ("none", "null") else finite(text)


def truth(text: str) -> bool:
    """Return a truth value, as Transformers and Hydra write it."""
    if text.lower() not in TRUE + FALSE:
        raise ValueError(text)
    return text.lower() in TRUE


KINDS = {
    int: "a whole number",
    count: "a whole number above 0",
    finite: "a number",
    optional: "a number or none",
    truth: "true or false",
    bool: "true or false",
    str: "a text",
}


def find_program(programs: Sequence[Program], lines: Sequence[list[str]]) -> tuple[Program, list[str], int | None]:
    """Return the program, its arguments up to a pipe or redirection, and the number of processes of its launcher.

    Raises:
        ConfigError: the lines name none of the programs, and are not arguments alone.
    """
    for line in lines:
        for position in range(len(line)):
            for program in programs:
                for name in program.names:
                    length = len(name.split())
                    words = line[position : position + length]
                    if words == name.split() or (length == 1 and PurePath(words[0]).name == name):
                        arguments = up_to_operator(line[position + length :])
                        return program, arguments, _num_processes(line[:position])
    words = [word for line in lines for word in line]
    names = " or ".join(program.names[0] for program in programs)
    check(bool(words) and _is_argument(words[0]), f"expected a command line of {names}, or its arguments alone")
    options = [word.partition("=")[0] for word in words if _is_argument(word)]
    best = min(programs, key=lambda program: sum(option not in program.spellings for option in options))
    return best, words, None


def read_arguments(program: Program, words: Sequence[str], num_processes: int | None = None) -> Command:
    """Return the values of a program's arguments on a command line.

    Raises:
        ConfigError: arguments are unknown, all of which are named, or a value cannot be read or translated.
    """
    spellings = program.spellings
    values = {argument.names[0]: argument.default for argument in program.arguments}
    given: dict[str, str] = {}
    unknown = []
    for name, items in READERS[program.syntax](program, words):
        arguments = _arguments_of(name, spellings)
        if not arguments:
            unknown.append(name)
        for argument in arguments:
            values[argument.names[0]] = _value(argument, name, items, takes_truth=program.syntax != "flags")
            earlier = given.get(argument.names[0], "") if argument.names[0].endswith(GROUP) else ""
            given[argument.names[0]] = f"{earlier}, {name}" if earlier else name
    check(not unknown, f"{program.title} has no {', '.join(_with_suggestion(name, spellings) for name in unknown)}")
    command = Command(values=values, given=given, num_processes=num_processes)
    for argument in program.arguments:
        if argument.effect == "refused" and argument.when and argument.when(command):
            raise ConfigError(f"{given[argument.names[0]]} {written(command[argument.names[0]])}: {argument.note}")
    return command


def written(value: Any) -> str:
    """Return a value as it is written on a command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments_of(name: str, spellings: Mapping[str, list[Argument]]) -> list[Argument]:
    """Return the arguments with a spelling, else those of the longest group that it belongs to."""
    parts = name.split(".")
    groups = (".".join(parts[:length]) + GROUP for length in range(len(parts), 0, -1))
    return next((spellings[spelling] for spelling in (name, *groups) if spelling in spellings), [])


def _read_flags(program: Program, words: Sequence[str]) -> Iterator[Word]:
    """Yield `--name`, and as many of the words after it as the argument takes; the other words stand alone."""
    spellings = program.spellings
    position = 0
    while position < len(words):
        name, equals, attached = words[position].partition("=")
        following = _values_after(words, position)
        position += 1
        if name not in spellings:
            yield name if name.startswith("-") else words[position - 1], []
            position += 0 if equals else len(following)
            continue
        counts = [argument.num_values for argument in spellings[name]]
        used = following if None in counts else following[: max(number or 0 for number in counts)]
        yield name, [attached] if equals else [*used]
        position += 0 if equals else len(used)


def _read_switches(program: Program, words: Sequence[str]) -> Iterator[Word]:
    """Yield arguments as Transformers reads them: dashes are underscores, and `--no_name` is false.

    The file that `--config` names, or the words if they are one YAML text, gives values, which those on the command
    line replace.
    """
    text = words[0] if len(words) == 1 and not words[0].startswith("-") else None
    if text is not None:
        yield from _read_yaml(program, text, "the YAML text")
        return
    pairs: list[Word] = []
    for position, word in enumerate(words):
        if _is_argument(word):
            name, equals, attached = word.partition("=")
            values = [attached] if equals else _values_after(words, position)
            name = "--" + name[2:].replace("-", "_")
            if name == "--config":
                yield from _read_yaml_file(program, values)
            elif name.startswith("--no_") and name not in program.spellings:
                pairs.append((f"--{name[5:]}", ["false"]))
            else:
                pairs.append((name, [value.rstrip(",") for value in values]))
    yield from pairs


def _read_yaml_file(program: Program, values: Sequence[str]) -> Iterator[Word]:
    check(len(values) == 1, f"--config takes one value, got {len(values)}")
    try:
        text = Path(values[0]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {values[0]}: cannot be read: {error}") from error
    yield from _read_yaml(program, text, f"--config {values[0]}")


def _read_yaml(program: Program, text: str, where: str) -> Iterator[Word]:
    try:
        tree = yaml.load(text, Loader=yaml.BaseLoader)  # values stay text, as on a command line
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: is no YAML: {str(error).splitlines()[0]}") from error
    check(isinstance(tree, dict), f"{where}: must hold arguments in the form `name: value`")
    for name, value in tree.items():
        if name != "env":
            yield f"{program.dashes}{name}", _items(value)


def _read_overrides(program: Program, words: Sequence[str]) -> Iterator[Word]:
    """Yield overrides as Hydra reads them: `name=value`, `+name=value` and `++name=value`; a value may be a list."""
    for position, word in enumerate(words):
        name, equals, text = word.partition("=")
        if not equals:
            is_value = position > 0 and words[position - 1].startswith("--") and "=" not in words[position - 1]
            if not is_value:
                values: list[str | None] = [*words[position + 1 : position + 2]] if name.startswith("--") else []
                yield name, values
            continue
        try:
            value = yaml.load(text, Loader=yaml.BaseLoader) if text[:1] in "[{'\"" else text
        except yaml.YAMLError:
            value = text
        yield name.lstrip("+"), _items(value)


def _items(value: Any) -> list[str | None]:
    """Return a value of YAML as the words of a command line."""
    items = value if isinstance(value, list) else [value]
    return [None if item in ("null", "None", "~") or item is None else str(item) for item in items]


READERS: Mapping[str, Callable[[Program, Sequence[str]], Iterator[Word]]] = {
    "flags": _read_flags,
    "switches": _read_switches,
    "overrides": _read_overrides,
}


def _is_argument(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z_]|[+~]*[A-Za-z_][\w.]*=", word))


def _values_after(words: Sequence[str], position: int) -> list[str]:
    """Return the words up to the next argument; a negative number is a value."""
    values = []
    for word in words[position + 1 :]:
        if re.match(r"--?[A-Za-z_]", word):
            break
        values.append(word)
    return values


def _num_processes(launcher: Sequence[str]) -> int | None:
    """Return the processes that torchrun, accelerate launch or colossalai run start."""
    text = " ".join(launcher)
    total = re.search(r"--num[_-]processes[= ](\d+)", text)
    if total:
        return int(total[1])
    per_node = re.search(r"--nproc[_-]per[_-]node[= ](\d+)", text)
    nodes = re.search(r"--(?:nnodes|num[_-]nodes)[= ](\d+)", text)
    return int(per_node[1]) * (int(nodes[1]) if nodes else 1) if per_node else None


def _value(argument: Argument, name: str, words: Sequence[str | None], *, takes_truth: bool) -> Any:
    """Return the value of an argument; a flag may have a truth value as its value if `takes_truth`."""
    number, parse = argument.num_values, argument.parse
    if argument.effect == "moot" and takes_truth:
        return list(words)
    if parse is bool and words and takes_truth:
        number, parse = 1, truth
    wanted = {0: "no value", None: "one value or more"}.get(number, f"{number} values" if number != 1 else "one value")
    check(len(words) == number if number is not None else bool(words), f"{name} takes {wanted}, got {len(words)}")
    if number == 0:
        return True
    if list(words) == [None]:
        is_allowed = argument.default is None or parse is optional
        check(is_allowed, f"{name} null: must be {KINDS.get(parse, 'a text')}")
        return None
    values = [_parsed(parse, name, word) for word in words]
    for item in values:
        known = argument.choices
        check(known is None or item in known, f"{name} {item}: has no counterpart here, only {_listed(known)}")
    return values[0] if number == 1 else values


def _parsed(parse: Callable[[str], Any], name: str, word: str | None) -> Any:
    try:
        return parse(str(word))
    except ValueError:
        rule = f"must be {KINDS.get(parse, 'a number')}"
        if "$" in str(word):
            rule = "the script does not set this variable; replace it by its value"
        raise ConfigError(f"{name} {word}: {rule}") from None


def _listed(choices: Mapping[Any, Any] | None) -> str:
    return ", ".join(str(choice) for choice in choices or ())


def _with_suggestion(name: str, spellings: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, spellings, n=1, cutoff=0.75)
    return f"{name} (did you mean {close[0]}?)" if close else name
