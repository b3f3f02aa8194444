"""Former names of settings, which the command line and settings files still accept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from hybrid_rl.config import check

RENAMED = {
    "checkpoint.overlap": "checkpoint.async_save",
    "models.reference_alpha": "models.reference_mixup_alpha",
    "models.reference_every_steps": "models.reference_sync_steps",
    "prompts.num_eval": "prompts.max_eval_samples",
    "prompts.overlong": "prompts.overlong_prompts",
    "rollout.keep_scores": "rollout.dynamic_filtering_reward_range",
    "rollout.max_refills": "rollout.dynamic_filtering_max_retries",
}
"""Former name of a setting -> its name."""

PREFIXES = {"config": "", **{name.split(".")[0]: f"{name.split('.')[0]}." for name in RENAMED}}
"""Option that takes YAML or the path of a YAML file -> what precedes the keys in it: `--config`, `--rollout`, ..."""


def accept_former_names(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line with every former name replaced, and the former names that it used.

    Args:
        arguments: the command line. Files that `--config` names are read, too; one with a former name is replaced by
            its text. Nothing after an option such as `--from-openrlhf` is ours.
    Raises:
        ConfigError: the command line, or a file, gives a setting under both names.
    """
    renamed: list[str] = []
    used: list[str] = []
    given: set[str] = set()
    option = ""  # of which the next word is the value
    for position, word in enumerate(arguments):
        if word.startswith("--from-"):
            return [*renamed, *arguments[position:]], used
        name, equals, value = word.removeprefix("--").partition("=")
        if option:
            renamed.append(_rename_yaml(word, PREFIXES[option], used))
            option = ""
        elif not word.startswith("--"):
            renamed.append(word)
        elif name in PREFIXES:
            renamed.append(f"--{name}={_rename_yaml(value, PREFIXES[name], used)}" if equals else word)
            option = "" if equals else name
        else:
            given.add(name)
            renamed.append(f"--{_current(name, used)}{equals}{value}")
    _check_given_once(given)
    return renamed, used


def _rename_yaml(text: str, prefix: str, used: list[str]) -> str:
    """Return YAML, or the path of a YAML file, as it is, or as YAML where a former name had to be replaced."""
    try:
        content = Path(text).read_text() if Path(text).is_file() else text
        tree = get_loader("yaml")(content)
    except (OSError, UnicodeError, yaml.YAMLError):
        return text  # the parser reports it
    found: list[str] = []
    tree = _rename_keys(tree, prefix, found)
    used += found
    return yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, width=float("inf")) if found else text


def _rename_keys(tree: Any, prefix: str, used: list[str]) -> Any:
    """Return the tree with former names replaced; a key may hold a section or be a whole dotted name."""
    if not isinstance(tree, dict):
        return tree
    _check_given_once({f"{prefix}{key}" for key in tree})
    renamed = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        key = _current(name, used).removeprefix(prefix) if name in RENAMED else key
        renamed[key] = _rename_keys(value, f"{name}.", used)
    return renamed


def _current(name: str, used: list[str]) -> str:
    """Return the current name of a setting, and note a former one as used."""
    if name in RENAMED:
        used.append(name)
    return RENAMED.get(name, name)


def _check_given_once(names: set[str]) -> None:
    for former, current in RENAMED.items():
        check(
            not {former, current} <= names,
            f"{former} and {current} are one setting, which has two values: remove {former}, its former name",
        )
