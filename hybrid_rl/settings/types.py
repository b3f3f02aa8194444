"""The types of all settings: which values each one takes, and the sentence about a value of another type."""

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from hybrid_rl.algorithms.specs import ESTIMATORS, POLICY_LOSSES
from hybrid_rl.config import Config
from hybrid_rl.printable import hide_passwords, printable

CHOICES: dict[str, Mapping[str, Any]] = {"advantage.estimator": ESTIMATORS, "update.policy_loss": POLICY_LOSSES}
"""Setting -> the table that has its choices, to which a program may add."""
NAMES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a mapping from names to values",
    list: "a list",
    type(None): "null",
}
"""Type -> what a message calls it."""
MAX_SHOWN = 80
"""Number of characters of a value that a message shows."""


def sections(config: Any, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield the dotted name and the dataclass of every section, a section before those that it holds."""
    for field in dataclasses.fields(config):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield f"{prefix}{field.name}", field.type
            yield from sections(field.type, f"{prefix}{field.name}.")


@functools.cache
def setting_types() -> Mapping[str, Any]:
    """Return dotted name of a setting -> its type, for all settings of a run, in the order of `--help`."""
    found: dict[str, Any] = {}
    for name, section in sections(Config):
        found |= {
            f"{name}.{field.name}": field.type
            for field in dataclasses.fields(section)
            if not dataclasses.is_dataclass(field.type)
        }
    return types.MappingProxyType(found)


@functools.cache
def section_types() -> Mapping[str, type]:
    """Return dotted name of a section -> its dataclass."""
    return types.MappingProxyType(dict(sections(Config)))


def get_setting(config: Config, name: str) -> Any:
    """Return the value of the setting, or the section, with a dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def with_settings(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a config, or a section of one, in which the settings with these dotted names have new values."""
    if not values:
        return config
    own = {name: value for name, value in values.items() if "." not in name}
    for section in {name.split(".")[0] for name in values if "." in name}:
        prefix = f"{section}."
        inner = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        own[section] = with_settings(getattr(config, section), inner)
    return dataclasses.replace(config, **own)


def is_optional(annotation: Any) -> bool:
    """Return whether a type takes null."""
    return get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types of which the values that are not null have one: several for a union, else the type itself."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return tuple(a for a in get_args(annotation) if a is not type(None)) if is_union else (annotation,)


def without_null(annotation: Any) -> Any:
    """Return the type of the values that are not null."""
    return Union[alternatives(annotation)]  # noqa: UP007  # of types that are known at run time only


def takes_tuple(name: str) -> bool:
    """Return whether the setting with a dotted name is a tuple, for which a settings file has a list."""
    return get_origin(without_null(setting_types()[name])) is tuple


def has_type(value: Any, annotation: Any) -> bool:
    """Return whether a value is of a type, exactly: a bool is no whole number, a tuple no list, a Path no text.

    A whole number is a number, too. What is of no such type could not be written to config.yaml and read again.
    """
    if is_optional(annotation) and value is None:
        return True
    if len(kinds := alternatives(annotation)) > 1:
        return any(has_type(value, kind) for kind in kinds)
    (annotation,) = kinds
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is list:
        return type(value) is list and all(has_type(item, arguments[0]) for item in value)
    if origin is tuple:
        pairs = zip(value, arguments, strict=False) if type(value) is tuple else ()
        return type(value) is tuple and len(value) == len(arguments) and all(has_type(*pair) for pair in pairs)
    if annotation is float:
        return type(value) in (int, float)
    if annotation is dict:
        return type(value) is dict and all(type(key) is str and is_plain(item) for key, item in value.items())
    if annotation is list:
        return type(value) is list and is_plain(value)
    return type(value) is annotation


def is_plain(value: Any) -> bool:
    """Return whether a value consists of null, booleans, numbers, text, lists, and mappings with text as keys."""
    if type(value) is list:
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str) or has_type(value, dict)


def broken_sections(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the name of every section that is not of its dataclass, and a sentence."""
    found: list[str] = []
    for name, section in section_types().items():
        if name.rpartition(".")[0] not in found and not isinstance(get_setting(config, name), section):
            found.append(name)
            yield name, f"{name} = {show(get_setting(config, name))}: must be of the class {section.__name__}"


def broken_types(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the name of every setting whose value is not of its type, and a sentence; sections must be right."""
    for name, annotation in setting_types().items():
        value = get_setting(config, name)
        if name in CHOICES:
            annotation = Literal[tuple(CHOICES[name])]
        if not has_type(value, annotation):
            yield name, wrong_type(name, show(value, is_quoted=get_origin(annotation) is not Literal), annotation)


def wrong_type(name: str, value: str, annotation: Any) -> str:
    """Return the sentence about a setting whose value is not of its type.

    Args:
        value: the value as the user wrote it, or as `show` returns it.
    """
    return f"{name} = {shorten(value)}: must be {describe(annotation)}"


def describe(annotation: Any) -> str:
    """Return in words which values a type takes: `null or a whole number`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if is_optional(annotation):
        return f"null or {describe(without_null(annotation))}"
    if len(kinds := alternatives(annotation)) > 1:
        return " or ".join(map(describe, kinds))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is list:
        return f"a list, each item {describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)} values (in Python a tuple), each {describe(arguments[0])}"
    return NAMES[annotation]


def show(value: Any, *, is_quoted: bool = False) -> str:
    """Return a value as a settings file has it, on one line and cut if it is long.

    Args:
        is_quoted: show text in quotes and a tuple as Python does, to tell them from numbers and lists.
    """
    if not isinstance(value, tuple) and not is_plain(value):
        return f"a Python object of type {type(value).__name__}"
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else "null"
    if isinstance(value, str | tuple) and is_quoted:
        return shorten(repr(value))
    if isinstance(value, tuple | list):
        return shorten(f"[{', '.join(map(show, value))}]")
    return shorten(str(value))


def shorten(text: str) -> str:
    """Return a text on one line, control characters as escapes and without passwords in URLs, cut if it is long."""
    text = printable(hide_passwords(" ".join(text.split())))
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
