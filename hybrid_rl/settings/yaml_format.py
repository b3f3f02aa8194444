"""The YAML of settings files: how plain words are read, and how settings are written so that they are read again.

A number with a leading zero is decimal, 1e-6 is a number, and 1:30 or 2026-01-01 is text. Where a setting does not ask
for text, `yes`, `no`, `on` and `off` are booleans.
"""

import re
from typing import Any

import yaml

PREFIX = "tag:yaml.org,2002:"
PLAIN_WORDS = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF",
    "int": r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}
"""Kind of value -> the plain words, without quotes, that are of it; the first kind that fits counts."""


class SettingsLoader(yaml.SafeLoader):
    """A loader of settings files."""

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """Return a whole number, which is decimal unless it begins with 0x."""
        return parse_int(self.construct_scalar(node))


class SettingsDumper(yaml.SafeDumper):
    """A dumper that puts text in quotes where this or another reader of YAML would take it for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that equal values are written out."""
        return True


SettingsLoader.yaml_implicit_resolvers = {}
for _kind, _words in PLAIN_WORDS.items():
    for _class in (SettingsLoader, SettingsDumper):
        _class.add_implicit_resolver(f"{PREFIX}{_kind}", re.compile(rf"(?:{_words})\Z"), None)
SettingsLoader.add_constructor(f"{PREFIX}int", SettingsLoader.construct_decimal)


def is_kind(word: str, kind: str) -> bool:
    """Return whether a plain word is a value of a kind of PLAIN_WORDS."""
    return re.fullmatch(PLAIN_WORDS[kind], word) is not None


def parse_int(word: str) -> int:
    """Return the whole number that a plain word means.

    Raises:
        ValueError: it has more digits than Python reads.
    """
    return int(word, 16) if word.startswith("0x") else int(word.replace("_", ""))


def parse_float(word: str) -> float:
    """Return the number that a plain word means; infinity where it is too large."""
    return float(word.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


def load(text: str) -> Any:
    """Return the value of a YAML text."""
    return yaml.load(text, Loader=SettingsLoader)


def dump(tree: Any, **options: Any) -> str:
    """Return plain values as YAML, which `load` and other readers of YAML read to equal values; ASCII, sorted as given.

    Args:
        options: further arguments of yaml.dump.
    """
    return yaml.dump(tree, Dumper=SettingsDumper, sort_keys=False, **options)
