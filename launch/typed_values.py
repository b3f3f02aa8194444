"""Reads the value of a setting as its type asks for it: what is text for one setting is a boolean for another."""

from itertools import repeat
from typing import Any, Literal, get_args, get_origin

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from hybrid_rl.config import ConfigError
from hybrid_rl.settings.types import alternatives, has_type, is_optional, without_null, wrong_type
from hybrid_rl.settings.yaml_format import SettingsLoader, is_kind, parse_float, parse_int

from .yaml_nodes import Source, compose

BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "y"), True),
    **dict.fromkeys(("false", "no", "off", "n"), False),
}
"""Words of a boolean, in lower case."""
_NODES: dict[Any, type[Node]] = {str: ScalarNode, list: SequenceNode, dict: MappingNode}
"""Type, of several that a setting takes -> the YAML node that holds it."""


class WrongTypeError(ValueError):
    """A value that is not of the type that is asked for."""


def read_yaml(name: str, node: Node, annotation: Any, source: Source) -> Any:
    """Return the value of a setting in a YAML text.

    Args:
        name: dotted name of the setting.
        node: its value.
        annotation: its type.

    Raises:
        ConfigError: it is not of this type.
    """
    try:
        return _read_node(node, annotation)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source.place(node)}{name} cannot be read: {error.problem or error.context}") from error
    except (ValueError, RecursionError) as error:
        written = source.written(node)
        raise ConfigError(f"{source.place(node)}{wrong_type(name, written, annotation)}") from error


def read_argument(name: str, text: str, annotation: Any) -> Any:
    """Return the value of a setting on the command line; text needs no quotes there, whatever it holds.

    Args:
        name: name of the setting.
        text: the argument.
        annotation: type of the setting; Any for what YAML takes the argument for.

    Raises:
        ConfigError: the argument is not of this type.
    """
    if text == "null" and is_optional(annotation):
        return None
    inner = _kind_of(text, annotation)
    if inner is str and text != "null":
        return text
    is_tree = get_origin(inner) in (list, tuple, Literal) or inner in (dict, list, Any)
    node = compose(Source(name=f"--{name}", text=text, is_file=False)) if is_tree else None
    try:
        return _read_node(node, inner) if is_tree else _read_word(text.strip(), inner)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"--{name} cannot be read: {error.problem or error.context}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(wrong_type(name, text, annotation)) from error


def _kind_of(text: str, annotation: Any) -> Any:
    """Return the type that an argument has, of several that a setting takes: a list or a mapping by its bracket."""
    kinds = alternatives(annotation)
    wanted = {"[": list, "{": dict}.get(text.lstrip()[:1])
    return wanted if len(kinds) > 1 and wanted in kinds else kinds[0]


def read_item(name: str, text: str, annotation: Any) -> list[Any]:
    """Return the items that an argument of `--<name>+` adds to a list: all of a list, or one without brackets.

    Raises:
        ConfigError: the argument is neither.
    """
    inner = without_null(annotation)
    if text.lstrip().startswith("["):
        return list(read_argument(name, text, inner))
    return [read_argument(name, text, get_args(inner)[0])]


def is_null(node: Node | None) -> bool:
    """Return whether a value is null, or nothing at all."""
    return node is None or (isinstance(node, ScalarNode) and not node.style and is_kind(node.value, "null"))


def read_free(node: Node) -> Any:
    """Return a value of a setting that does not say which type its values have.

    Raises:
        yaml.MarkedYAMLError: the node has a tag of its own, or holds itself.
    """
    return SettingsLoader("").construct_object(node, deep=True)  # type: ignore[no-untyped-call]


def _read_node(node: Node | None, annotation: Any) -> Any:
    if is_optional(annotation) and is_null(node):
        return None
    if len(kinds := alternatives(annotation)) > 1:
        return _read_node(node, next((kind for kind in kinds if isinstance(node, _NODES[kind])), kinds[0]))
    (annotation,) = kinds
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return read_free(node) if node else None
    if annotation in (dict, list):
        return _read_plain(node, annotation)
    if origin in (list, tuple):
        if not isinstance(node, SequenceNode) or (origin is tuple and len(node.value) != len(arguments)):
            raise WrongTypeError
        types = arguments if origin is tuple else repeat(arguments[0])
        return origin(_read_node(item, kind) for item, kind in zip(node.value, types, strict=False))
    if not isinstance(node, ScalarNode) or not node.tag.startswith("tag:yaml.org"):
        raise WrongTypeError
    return _read_word(node.value, annotation, is_plain=not node.style)


def _read_plain(node: Node | None, annotation: Any) -> Any:
    value = read_free(node) if node else None
    if not has_type(value, annotation):
        raise WrongTypeError
    return value


def _read_word(word: str, annotation: Any, *, is_plain: bool = True) -> Any:
    """Return the value of a scalar.

    Args:
        word: the scalar without quotes.
        is_plain: it has none.
    """
    if get_origin(annotation) is Literal:
        for choice in get_args(annotation):
            if str(choice) == word and (is_plain or isinstance(choice, str)):
                return choice
    elif annotation is str and not (is_plain and is_kind(word, "null")):
        return word
    elif annotation is bool and is_plain and word.lower() in BOOLEANS:
        return BOOLEANS[word.lower()]
    elif annotation is int and is_plain and is_kind(word, "int"):
        return parse_int(word)
    elif annotation is float and is_plain and is_kind(word, "float"):
        return parse_float(word)
    raise WrongTypeError
