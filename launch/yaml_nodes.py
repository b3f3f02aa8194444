"""Reads YAML as a tree of nodes, which know their lines, and refuses keys that are given twice."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from hybrid_rl.config import ConfigError, check
from hybrid_rl.settings.types import shorten
from hybrid_rl.settings.yaml_format import PREFIX, SettingsLoader


@dataclass(frozen=True, kw_only=True)
class Source:
    """A text with settings."""

    name: str
    """Path of the file, or the option that has the text as its value."""
    text: str
    is_file: bool

    def place(self, node: Node) -> str:
        """Return what a message about a node begins with: the file and the line, or the option."""
        return self.line(node.start_mark.line)

    def line(self, number: int) -> str:
        """Return what a message about a line, counted from 0, begins with."""
        return f"{self.name}, line {number + 1}: " if self.is_file else f"{self.name}: "

    def written(self, node: Node) -> str:
        """Return a value as the user wrote it; null for nothing."""
        return self.text[node.start_mark.index : node.end_mark.index].strip() or "null"


def read_file(path: Path) -> Source:
    """Return the text of a settings file.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        content = path.read_bytes()
        return Source(name=str(path), text=content.decode("utf-8-sig"), is_file=True)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: is not UTF-8; save the file in this encoding") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def compose(source: Source) -> Node | None:
    """Return the root of a YAML text; None where it holds no value.

    Raises:
        ConfigError: it is not YAML, or has a tag of its own.
    """
    loader = None
    try:
        loader = SettingsLoader(source.text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, error.problem or error.context
        if "'\\t'" in str(problem):
            problem = "a tab cannot indent; use spaces"
        raise ConfigError(f"{source.line(mark.line if mark else 0)}is not YAML: {problem}") from error
    except yaml.reader.ReaderError as error:
        line = source.text[: error.position].count("\n")
        raise ConfigError(f"{source.line(line)}holds the control character {error.character:#x}: remove it") from error
    except RecursionError as error:
        raise ConfigError(f"{source.line(0)}is nested too deeply") from error
    finally:
        if loader:
            loader.dispose()


def compose_settings(source: Source, prefix: str) -> MappingNode:
    """Return the root of a text with settings, in which every key is given once.

    Args:
        prefix: precedes the keys in messages, `rollout.`.

    Raises:
        ConfigError: there are no settings in it; one sentence for every key that is given twice.
    """
    root = compose(source)
    check(root is not None, f"{source.name}: holds no settings")
    where = source.place(root) if root else ""
    check(isinstance(root, MappingNode), f"{where}must hold settings in the form `name: value`, not a list or a text")
    assert isinstance(root, MappingNode)
    wrong = list(_wrong_keys(root, source, prefix, set()))
    if wrong:
        raise ConfigError(*wrong)
    return root


def entries(node: MappingNode) -> dict[str, tuple[ScalarNode, Node]]:
    """Return key -> its node and its value's, of a mapping with keys that are given once; `<<` adds further keys."""
    own: dict[str, tuple[ScalarNode, Node]] = {}
    merged: dict[str, tuple[ScalarNode, Node]] = {}
    for key, value in node.value:
        if key.tag == f"{PREFIX}merge":
            for mapping in value.value if isinstance(value, SequenceNode) else [value]:
                merged = entries(mapping) | merged
        else:
            own[key.value] = (key, value)
    return merged | own


def _wrong_keys(node: Node, source: Source, prefix: str, visited: set[int]) -> Iterator[str]:
    """Yield a sentence for everything that is wrong with the keys of a node and of all nodes in it."""
    if id(node) in visited or isinstance(node, ScalarNode):
        return
    visited.add(id(node))
    if isinstance(node, SequenceNode):
        for item in node.value:
            yield from _wrong_keys(item, source, prefix, visited)
        return
    first: dict[str, Node] = {}
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if not isinstance(key, ScalarNode):
            yield f"{source.place(key)}the key {shorten(source.written(key))} must be a name"
        elif key.tag == f"{PREFIX}merge":
            yield from _wrong_merge(value, source)
        elif key.value in first:
            yield given_twice(name, source, first[key.value], key)
        else:
            first[key.value] = key
            yield from _wrong_keys(value, source, f"{name}.", visited)


def _wrong_merge(value: Node, source: Source) -> Iterator[str]:
    mappings = value.value if isinstance(value, SequenceNode) else [value]
    if not all(isinstance(mapping, MappingNode) for mapping in mappings):
        written = shorten(source.written(value))
        yield f"{source.place(value)}<< = {written}: must be an alias of a section, such as *name"


def given_twice(name: str, source: Source, first: Node, second: Node) -> str:
    """Return the sentence about a setting that has two values."""
    lines = f", in lines {first.start_mark.line + 1} and {second.start_mark.line + 1}" if source.is_file else ""
    return f"{source.name}: {shorten(name)} is given twice{lines}; keep one"
