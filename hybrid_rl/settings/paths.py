"""The settings that name files and folders: `~` in them, and the name of a run's folder."""

import os
from collections.abc import Iterator
from typing import Any

from hybrid_rl.config import Config
from hybrid_rl.config_data import paths_in, with_paths
from hybrid_rl.settings.types import get_setting, show, with_settings

PATHS = (
    "run.dir",
    "run.eval_function",
    "models.actor",
    "models.critic",
    "models.reference",
    "models.reward",
    "prompts.path",
    "prompts.eval_path",
    "prompts.template_path",
    "environment.name",
    "environment.tools",
    "reward.functions",
    "reward.by_source",
    "reward.gates",
    "ptx.path",
)
"""Settings that hold a path, a list of paths, or what may be a path, such as `~/rewards.py:function`."""
MAX_NAME_BYTES = 255
"""Largest number of bytes of a folder's name on Linux."""


def expand_home(config: Config) -> Config:
    """Return the config with `~` and `~user` at the start of a path replaced by the home folder; types must be right.

    A home folder that is not known stays as it is, which `broken_paths` reports.
    """
    values = {name: get_setting(config, name) for name in PATHS}
    changed = {name: _expanded(value) for name, value in values.items() if _expanded(value) != value}
    return with_settings(config, changed) if changed else config


def broken_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the name of every setting that cannot be a path, and a sentence; of a config with expanded paths."""
    name = config.run.name
    num_bytes = len(name.encode(errors="replace"))
    if os.sep in name or name in (os.curdir, os.pardir):
        yield (
            "run.name",
            f"run.name = {show(name)}: must name a folder in run.dir, so not hold a {os.sep} or be . or ..",
        )
    elif num_bytes > MAX_NAME_BYTES:
        yield "run.name", f"run.name has {num_bytes} bytes: must have at most {MAX_NAME_BYTES}"
    for field in PATHS:
        for path in paths_in(get_setting(config, field)):
            if path.startswith("~"):
                yield (
                    field,
                    f"{field} = {show(path)}: no such home folder; write the whole path, or ./{path} for that name",
                )


def _expanded(value: Any) -> Any:
    return with_paths(value, os.path.expanduser)
