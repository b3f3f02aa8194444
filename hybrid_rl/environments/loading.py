"""Names of environments in the settings, and their classes, which only worker processes load."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.config import ConfigError, check
from hybrid_rl.environments.protocol import Environment
from hybrid_rl.rewards.loading import describe
from hybrid_rl.rewards.reward_files import RewardFiles, RewardFolder

FIELD = "environment"
"""Setting that names the environment, for messages."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentClass:
    """A class of environments that is ready in this process."""

    make: Callable[..., Environment]
    arguments: Mapping[str, Any]
    """Keyword arguments of every object."""
    is_async: bool
    """Whether all calls are asynchronous, so that many environments of a process can run at the same time."""
    path: Path
    folder: RewardFolder
    """The file's folder, which must be active while the user's code runs."""

    def __call__(self) -> Environment:
        """Return a new environment."""
        return self.make(**self.arguments)


def split_name(name: str) -> tuple[Path, str]:
    """Return the file and the class that a name `path.py:ClassName` stands for.

    Raises:
        ConfigError: the name has another form, or there is no such file.
    """
    path, _, class_name = name.rpartition(":")
    check(path.endswith(".py") and class_name.isidentifier(), f"{FIELD} = {name}: must be path.py:ClassName")
    file = Path(os.path.realpath(Path(path).expanduser()))
    check(file.is_file(), f"{FIELD} = {name}: there is no file {file}")
    return file, class_name


def load_environment(name: str, arguments: Mapping[str, Any]) -> EnvironmentClass:
    """Import the file of an environment and return its class.

    Raises:
        ConfigError: the import fails, or the class is missing or lacks a method.
    """
    path, class_name = split_name(name)
    folder = RewardFiles().folder_of(path)
    try:
        module = folder.import_file(path)
    except BaseException as error:  # includes SystemExit
        raise ConfigError(f"{FIELD} = {name}: importing {path} fails with {describe(error, path)}") from error
    made = getattr(module, class_name, None)
    check(callable(made), f"{FIELD} = {name}: {path} defines no class '{class_name}'")
    assert made is not None
    missing = [method for method in ("reset", "step") if not callable(getattr(made, method, None))]
    check(not missing, f"{FIELD} = {name}: '{class_name}' has no method {' and no method '.join(missing)}")
    is_async = all(inspect.iscoroutinefunction(getattr(made, method)) for method in ("reset", "step"))
    return EnvironmentClass(make=made, arguments=dict(arguments), is_async=is_async, path=path, folder=folder)
