"""Names of rule functions in the settings, and the functions themselves, which only worker processes load."""

import hashlib
import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hybrid_rl.config import ConfigError, check
from hybrid_rl.rewards.given import GIVEN, PREFIX, check_given, restore
from hybrid_rl.rewards.reward_files import RewardFiles, RewardFolder, package_root
from hybrid_rl.rewards.rules import FUNCTIONS, PREPARATIONS
from hybrid_rl.rewards.signatures import (
    OWN,
    Call,
    Form,
    LoadedFunction,
    arguments_for,
    is_async,
    recognise,
    required_columns,
)


@dataclass(frozen=True, kw_only=True)
class RuleFunction:
    """A function that is ready to score responses in this process."""

    scorer: Callable[..., object]
    form: Form = OWN
    """Its signature."""
    is_async: bool = False
    """Whether its calls must be awaited."""
    path: Path | None = None
    """The reward file; None for a function of `rules.FUNCTIONS` or one that was given as an object."""
    folder: RewardFolder | None = None
    """The file's folder, which must be active while the function runs."""

    @property
    def runs_together(self) -> bool:
        """Whether the function gets several responses at once."""
        return self.form.is_batched or self.is_async

    def described(self) -> LoadedFunction:
        """Return what a pool knows of the function."""
        columns = tuple(required_columns(self.scorer, self.form))
        return LoadedFunction(title=self.form.title, runs_together=self.runs_together, columns=columns)

    def __call__(self, call: Call) -> object:
        """Return what the function returns; an awaitable if it is asynchronous.

        Raises:
            ValueError: a parameter of the function is no column of the data.
        """
        if self.folder is not None:
            self.folder.activate()
        by_position, by_name = arguments_for(self.scorer, self.form, call)
        return self.scorer(*by_position, **by_name)


def split_name(name: str, *, field: str) -> tuple[Path, str] | None:
    """Return the file and the function that a name stands for; None for one that is built in or given as an object.

    Args:
        name: a name in `rules.FUNCTIONS`, or `path.py:function` with a path relative to the working directory, or the
            name of a function that hybrid_rl.train was given.
        field: setting that holds the name.
    Raises:
        ConfigError: the name has another form, or there is no such file.
    """
    if name in FUNCTIONS or name in GIVEN:
        return None
    check_given(name, field=field)
    path, _, function = name.rpartition(":")
    check(
        path.endswith(".py") and function.isidentifier(),
        f"{field}: '{name}' is unknown; give one of {', '.join(FUNCTIONS)}, or path.py:function",
    )
    file = Path(os.path.realpath(Path(path).expanduser()))
    check(file.is_file(), f"{field}: '{name}': there is no file {file}")
    return file, function


def reward_file_hashes(names: Sequence[str]) -> dict[str, str]:
    """Return name -> SHA-256 of its reward file, without the modules that the file imports, or of a given function.

    Names of `rules.FUNCTIONS` are left out.
    """
    places = {name: split_name(name, field="reward.functions") for name in names}
    files = {name: hashlib.sha256(place[0].read_bytes()).hexdigest() for name, place in places.items() if place}
    return files | {name: GIVEN[name].digest for name in names if name in GIVEN}


def load_functions(
    names: Sequence[str], *, field: str, report: Callable[[str], None], given: Mapping[str, bytes]
) -> list[RuleFunction]:
    """Import the files of rule functions, each once, and return the functions.

    Args:
        names: see `split_name`.
        field: setting that holds the names.
        report: called with each name before its file is imported.
        given: name -> serialized function, of those that hybrid_rl.train was given.
    Raises:
        ConfigError: some functions cannot be used; one message for each of them, and one for each file that fails.
    """
    files, found, messages, failed = RewardFiles(), [], [], set[Path]()
    for name in names:
        report(name)
        place = None if name in given else split_name(name, field=field)
        try:
            if name in given:
                found.append(load_given(name, given[name]))
            elif place is None:
                found.append(load_rule(name))
            elif place[0] not in failed:
                found.append(_load(files, *place))
        except _ImportFailedError as error:
            failed.add(error.path)
            messages.append(f"{field}: '{name}': importing {error.path} fails with {error}")
        except ConfigError as error:
            messages.append(f"{field}: '{name}': {error}")
    if messages:
        raise ConfigError(*messages)
    return found


def load_rule(name: str) -> RuleFunction:
    """Return a function of `rules.FUNCTIONS`, whose library is then imported and works.

    Raises:
        ConfigError: its library is missing or broken.
    """
    if name in PREPARATIONS:
        PREPARATIONS[name]()  # slow, which must not count against the time limit of the first response
    return RuleFunction(scorer=FUNCTIONS[name])


def load_given(name: str, content: bytes) -> RuleFunction:
    """Return a function that hybrid_rl.train was given.

    Raises:
        ConfigError: a module that it needs cannot be imported, or its signature is not recognised.
    """
    try:
        scorer = restore(content)
    except Exception as error:
        raise ConfigError(f"it cannot be rebuilt in a worker process: {describe(error, None)}") from error
    return RuleFunction(scorer=scorer, form=recognise(scorer, name.removeprefix(PREFIX)), is_async=is_async(scorer))


def describe(error: BaseException, path: Path | None) -> str:
    """Return type and message of an error in one line, and where in the user's code it was raised.

    Args:
        error: raised by a reward file or by one of its functions.
        path: the reward file; None for a function of `rules.FUNCTIONS`.
    """
    try:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # a __str__ of the user's own
        message = ""
    message = " ".join(message.split())
    message = message if len(message) <= 500 else f"{message[:500]}..."
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = None if path is None else _place(error, package_root(path.parent))
    return text if place is None else f"{text} ({place})"


class _ImportFailedError(Exception):
    """A reward file raised when it was imported."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def _load(files: RewardFiles, path: Path, function: str) -> RuleFunction:
    folder = files.folder_of(path)
    try:
        module = folder.import_file(path)
        scorer = getattr(module, function, None)
    except BaseException as error:  # includes SystemExit
        raise _ImportFailedError(path, describe(error, path)) from error
    if not callable(scorer):
        defined = ", ".join(_functions_of(module)) or "none"
        raise ConfigError(f"{path} defines no function '{function}'; its functions: {defined}")
    form = recognise(scorer, function)
    return RuleFunction(scorer=scorer, form=form, is_async=is_async(scorer), path=path, folder=folder)


def _functions_of(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name


def _place(error: BaseException, folder: Path) -> str | None:
    """Return file, line and code where an error was raised: the innermost place in a folder."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return _line(error.filename, error.lineno, error.text)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(folder) and "site-packages" not in Path(frame.filename).parts
    ]
    return _line(frames[-1].filename, frames[-1].lineno, frames[-1].line) if frames else None


def _line(filename: str, number: int | None, code: str | None) -> str:
    code = " ".join((code or "").split())
    return f"{Path(filename).name}, line {number}" + (f": {code[:120]}" if code else "")
