"""Names of environments in the settings, and their classes, which only worker processes load."""

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.config import ConfigError, check
from hybrid_rl.environments.builtin import BUILT_IN, BuiltIn
from hybrid_rl.environments.protocol import Environment
from hybrid_rl.rewards.given import GIVEN, check_given, restore
from hybrid_rl.rewards.loading import describe
from hybrid_rl.rewards.reward_files import RewardFiles, RewardFolder

FIELD = "environment.name"
"""Setting that names the environment, for messages."""
_FILES = RewardFiles()


@dataclass(frozen=True, kw_only=True)
class EnvironmentClass:
    """A class of environments that is ready in this process."""

    make: Callable[..., Environment]
    arguments: Mapping[str, Any]
    """Keyword arguments of every object."""
    is_async: bool
    """Whether all calls are asynchronous, so that many environments of a process can run at the same time."""
    path: Path | None
    """The user's file with the class, for messages; None for a class without one."""
    folder: RewardFolder | None
    """The file's folder, which must be active while the user's code runs; None for a class without a file."""

    def __call__(self) -> Environment:
        """Return a new environment."""
        return self.make(**self.arguments)


def split_name(name: str, *, field: str = FIELD) -> tuple[Path, str]:
    """Return the file and the object that a name `path.py:ClassName` stands for.

    Args:
        name: with a path relative to the working directory.
        field: setting that holds the name.
    Raises:
        ConfigError: the name has another form, or there is no such file.
    """
    check_given(name, field=field)
    path, _, object_name = name.rpartition(":")
    known = f", or one of {', '.join(BUILT_IN)}" if field == FIELD else ""
    check(path.endswith(".py") and object_name.isidentifier(), f"{field} = {name}: must be path.py:name{known}")
    file = Path(os.path.realpath(Path(path).expanduser()))
    check(file.is_file(), f"{field} = {name}: there is no file {file}")
    return file, object_name


def check_name(name: str) -> None:
    """Check that the name is built in, and its package installed, or that its file exists; nothing is imported.

    Raises:
        ConfigError: otherwise.
    """
    if name in BUILT_IN:
        _check_package(name, BUILT_IN[name])
    elif name not in GIVEN:
        split_name(name)


def load_object(name: str, *, field: str) -> tuple[Any, Path | None, RewardFolder | None]:
    """Import a file and return one of its objects, the file, and its folder, which is then active.

    Args:
        name: `path.py:name`, or the name of an object that hybrid_rl.train was given, which has no file and no folder.
        field: setting that holds the name.
    Raises:
        ConfigError: the import fails, or the file has no callable object of this name.
    """
    if name in GIVEN:
        try:
            return restore(GIVEN[name].content), None, None
        except Exception as error:
            reason = describe(error, None)
            raise ConfigError(f"{field} = {name}: it cannot be rebuilt in a worker process: {reason}") from error
    path, object_name = split_name(name, field=field)
    folder = _FILES.folder_of(path)
    try:
        module = folder.import_file(path)
    except BaseException as error:  # includes SystemExit
        raise ConfigError(f"{field} = {name}: importing {path} fails with {describe(error, path)}") from error
    found = getattr(module, object_name, None)
    check(callable(found), f"{field} = {name}: {path} defines no class or function '{object_name}'")
    return found, path, folder


def load_environment(name: str, arguments: Mapping[str, Any]) -> EnvironmentClass:
    """Import the class of an environment, let it prepare this process, and return it.

    Raises:
        ConfigError: the import fails, or the class is missing, lacks a method or does not take the arguments.
    """
    path: Path | None = None
    folder: RewardFolder | None = None
    if name in BUILT_IN:
        made = _import_built_in(name, BUILT_IN[name])
    else:
        made, path, folder = load_object(name, field=FIELD)
    missing = [method for method in ("reset", "step") if not callable(getattr(made, method, None))]
    check(not missing, f"{FIELD} = {name}: '{made.__name__}' has no method {' and no method '.join(missing)}")
    is_async = _prepare(made, arguments, path)
    if is_async is None:
        is_async = all(inspect.iscoroutinefunction(getattr(made, method)) for method in ("reset", "step"))
    return EnvironmentClass(make=made, arguments=dict(arguments), is_async=is_async, path=path, folder=folder)


def _import_built_in(name: str, found: BuiltIn) -> Any:
    _check_package(name, found)
    try:
        module = importlib.import_module(found.module)
    except ImportError as error:
        raise ConfigError(f"{FIELD} = {name}: importing {found.package or found.module} fails with {error}") from error
    return getattr(module, found.class_name)


def _check_package(name: str, found: BuiltIn) -> None:
    if found.package is not None and importlib.util.find_spec(found.package) is None:
        raise ConfigError(
            f"{FIELD} = {name}: the package {found.package} is not installed: "
            f"python -m pip install 'hybrid_rl[{found.extra}]'"
        )


def _prepare(made: Any, arguments: Mapping[str, Any], path: Path | None) -> bool | None:
    """Let a class prepare the process, and return whether it is asynchronous; None if it does not say."""
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment.arguments = {dict(arguments)}: '{made.__name__}' takes others: {error}"
        ) from error
    prepare = getattr(made, "prepare", None)
    if not callable(prepare):
        return None
    try:
        found = prepare(**arguments)
    except ConfigError:
        raise
    except BaseException as error:  # includes SystemExit
        message = f"{FIELD}: preparing '{made.__name__}' fails with {describe(error, path)}"
        raise ConfigError(message) from error
    return None if found is None else bool(found)
