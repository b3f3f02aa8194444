"""Reads the settings of a command line and of the files that it names, each as the type of the setting asks for it.

A setting on the command line counts before one in a file, a later one before an earlier one.
"""

import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_origin

from yaml import MappingNode, Node, ScalarNode

from hybrid_rl.config import Config, ConfigError, Findings, check
from hybrid_rl.settings.types import get_setting, section_types, setting_types, shorten, without_null

from .configurations import configurations
from .renamed import RENAMED, check_one_name
from .typed_values import is_null, read_argument, read_item, read_yaml
from .yaml_nodes import Source, compose_settings, entries, given_twice, read_file


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a command line gives."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted name of a setting of the run -> its value."""
    options: dict[str, Any] = field(default_factory=dict)
    """Name of an option of the launcher -> its value."""
    flags: list[str] = field(default_factory=list)
    """Options without a value, and `--from-...` with all words after it."""
    former_names: list[str] = field(default_factory=list)


def read_command_line(arguments: Sequence[str], *, options: Mapping[str, Any], flags: Collection[str]) -> Given:
    """Return what a command line gives.

    Args:
        arguments: the command line.
        options: options of the launcher that take a value -> its type.
        flags: options that take none.

    Raises:
        ConfigError: one sentence for everything that cannot be read.
    """
    words, rest = _split(arguments, flags)
    reader = _Reader(options, flags)
    findings = Findings()
    for name, value in sorted(words, key=lambda word: word[0] != "config"):
        findings.run(partial(reader.add, name, value))
    findings.run(partial(check_one_name, {name for name, _ in words}))
    findings.raise_any()
    reader.given.flags.extend(rest)
    return reader.given


def _split(arguments: Sequence[str], flags: Collection[str]) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Return (name, value) of each option, the value None if there is none, and the words from `--from-...` on."""
    words: list[tuple[str, str | None]] = []
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word.startswith("--from-"):
            break
        position += 1
        name, equals, text = word.removeprefix("--").partition("=")
        value = text if equals else None
        if not word.startswith("--"):
            name, value = "", word
        elif not equals and name not in flags and _has_value(arguments, position):
            value = arguments[position]
            position += 1
        words.append((name, value))
    return words, list(arguments[position:])


def _has_value(arguments: Sequence[str], position: int) -> bool:
    return position < len(arguments) and not arguments[position].startswith("--")


NAMED_SECTIONS = {"environment": "environment.name"}
"""Section -> its setting that a word in place of the section sets, such as `environment: guess.py:Guess`."""


class _Reader:
    """Adds one option after the other to what is given."""

    def __init__(self, options: Mapping[str, Any], flags: Collection[str]) -> None:
        self.given = Given()
        self._options, self._flags = options, flags

    def add(self, name: str, value: str | None) -> None:
        """Add an option.

        Args:
            name: without `--`; empty for a word that belongs to no option.
            value: None if there is none.

        Raises:
            ConfigError: there is no such option, or it does not take the value.
        """
        check(bool(name), f"{shorten(value or '')}: belongs to no option; put a value with spaces in quotes")
        if name in self._flags:
            self.given.flags.append(f"--{name}" if value is None else f"--{name}={value}")
            return
        name, plus = name.removesuffix("+"), name.endswith("+")
        current = self._current(name if "." in name else name.replace("-", "_"))
        self._check_known(name, current, plus)
        if value is None:
            raise ConfigError(f"--{name}: needs a value")
        if current in NAMED_SECTIONS and _is_name(value):
            current = NAMED_SECTIONS[current]
        if current == "config" or current in section_types():
            prefix = "" if current == "config" else f"{current}."
            self._add_text(_open(name, value), prefix)
        elif current in self._options:
            self.given.options[current] = read_argument(f"--{name}", value, self._options[current])
        else:
            self._add_setting(current, value, plus)

    def _add_setting(self, name: str, text: str, plus: bool) -> None:
        settings, types = self.given.settings, setting_types()
        mapping, _, key = name.rpartition(".")
        if plus:
            earlier = settings.get(name, get_setting(Config(), name)) or []
            settings[name] = [*earlier, *read_item(name, text, types[name])]
        elif name in types:
            settings[name] = read_argument(name, text, types[name])
        else:
            settings[mapping] = settings.get(mapping, {}) | {key: read_argument(name, text, Any)}

    def _add_text(self, source: Source, prefix: str) -> None:
        """Add the settings of a YAML text, whose keys follow `prefix`."""
        findings, first = Findings(), dict[str, tuple[str, Node]]()
        for written, key, value in _leaves(compose_settings(source, prefix), prefix):
            name = self._current(written)
            if name in first:
                earlier, node = first[name]
                findings.run(partial(check_one_name, {earlier, written}))
                findings.run(partial(check, earlier != written, given_twice(name, source, node, key)))
            first[name] = (written, key)
            findings.run(partial(self._add_node, name, key, value, source))
        findings.raise_any()

    def _add_node(self, name: str, key: Node, value: Node, source: Source) -> None:
        place, written = source.place(key), source.written(value)
        if name in setting_types():
            self.given.settings[name] = read_yaml(name, value, setting_types()[name], source)
        elif name in self._options:
            self.given.options[name] = read_yaml(name, value, self._options[name], source)
        elif name in section_types():
            check(not is_null(value), f"{place}{name} is empty: give settings below it, or remove it")
            raise ConfigError(f"{place}{name} = {shorten(written)}: must hold settings in the form `name: value`")
        else:
            known = [*setting_types(), *section_types(), *self._options]
            raise ConfigError(f"{place}{shorten(name)}: there is no such setting{_suggestion(name, known)}")

    def _check_known(self, written: str, name: str, plus: bool) -> None:
        types = setting_types()
        is_item = types.get(name.rpartition(".")[0]) is dict and not plus
        known = [*types, *section_types(), *self._options, *self._flags, "config"]
        check(
            name in known or is_item, f"--{shorten(written)}: there is no such option{_suggestion(name, known, '--')}"
        )
        takes_items = get_origin(without_null(types.get(name))) is list
        check(takes_items or not plus, f"--{name}+: only a list takes further items; use --{name}")

    def _current(self, name: str) -> str:
        """Return the current name of a setting, and note a former one as used."""
        if name in RENAMED:
            self.given.former_names.append(name)
        return RENAMED.get(name, name)


def _open(option: str, value: str) -> Source:
    """Return the text that an option such as `--config` has as its value, or the text of the file that it names.

    `--config` may also name a settings file of this package; a file of the user counts first.
    """
    is_text = value.lstrip().startswith("{") or "\n" in value or ": " in value
    if is_text:
        return Source(name=f"--{option}", text=value, is_file=False)
    path = os.path.expanduser(value)
    if option == "config" and not os.path.exists(path):
        path = str(configurations().get(value, path))
    check(os.path.exists(path), f"--{option} {shorten(value)}: no such file")
    check(not os.path.isdir(path), f"--{option} {shorten(value)}: is a folder, not a file")
    return read_file(Path(path))


def _leaves(node: MappingNode, prefix: str) -> Iterator[tuple[str, Node, Node]]:
    """Yield dotted name, key and value of all settings of a text; a key may be a section or a whole dotted name."""
    for key, value in entries(node).values():
        name = f"{prefix}{key.value}"
        if name in section_types() and isinstance(value, MappingNode):
            yield from _leaves(value, f"{name}.")
        elif name in NAMED_SECTIONS and isinstance(value, ScalarNode) and not is_null(value):
            yield NAMED_SECTIONS[name], key, value
        else:
            yield name, key, value


def _is_name(value: str) -> bool:
    """Return whether the value of a section that may be a name is no text and no file of settings."""
    return not value.lstrip().startswith("{") and not value.endswith((".yaml", ".yml"))


def _suggestion(name: str, known: Collection[str], dashes: str = "") -> str:
    """Return the end of a sentence about an unknown name: the names with the same last part, or the closest one."""
    last = name.rpartition(".")[2]
    close = [other for other in known if other.rpartition(".")[2] == last] or difflib.get_close_matches(name, known, 1)
    return f"; did you mean {' or '.join(f'{dashes}{other}' for other in close)}?" if close else ""
