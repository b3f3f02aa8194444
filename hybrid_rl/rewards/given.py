"""Functions and classes that a program gives to hybrid_rl.train as objects, and their way into worker processes.

The program's own process serializes them with cloudpickle, and sends them over the socket pair that it shares with each
worker process, which is its child. Nothing is read from a file or a port.
"""

import functools
import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle

from hybrid_rl.config import ConfigError, Findings, check

PREFIX = "given:"
"""Beginning of the name of a function or class that was given as an object."""


@dataclass(frozen=True, kw_only=True)
class GivenFunction:
    """A serialized function or class."""

    argument: str
    """Argument of hybrid_rl.train that held it."""
    content: bytes
    digest: str
    """SHA-256 of its source text, or of the serialized object where there is none."""


GIVEN: dict[str, GivenFunction] = {}
"""Name -> function or class, of the run of this process."""


@contextmanager
def giving(objects: Mapping[str, Sequence[Callable[..., Any]]]) -> Iterator[dict[str, list[str]]]:
    """Return the names by which the settings know some functions and classes while the block runs.

    Args:
        objects: argument of hybrid_rl.train -> the functions or classes that it holds.
    Returns:
        names: argument -> a name for each object.
    Raises:
        ConfigError: one is not callable, cannot be serialized, or has the name of another one.
    """
    findings, found = Findings(), dict[str, GivenFunction]()
    names = dict[str, list[str]]()
    for argument, functions in objects.items():
        names[argument] = [PREFIX + str(getattr(f, "__name__", type(f).__name__)) for f in functions]
        for name, function in zip(names[argument], functions, strict=True):
            serialized = findings.run(functools.partial(serialize, function, name, argument=argument))
            found |= {name: serialized} if serialized else {}
    numbers = Counter(name for of_argument in names.values() for name in of_argument)
    for name in sorted(name for name, number in numbers.items() if number > 1):
        arguments = " and ".join(argument for argument, own in names.items() if name in own)
        shown = name.removeprefix(PREFIX)
        findings.messages.append(f"{arguments}: two are called {shown}; give each a __name__ of its own")
    findings.raise_any()
    GIVEN.update(found)
    try:
        yield names
    finally:
        for name in found:
            GIVEN.pop(name, None)


def receive_objects(contents: Mapping[str, bytes]) -> None:
    """Keep the objects that the program's process has sent to this worker process.

    Args:
        contents: name -> serialized object.
    """
    GIVEN.update({name: GivenFunction(argument="", content=content, digest="") for name, content in contents.items()})


def check_given(name: str, *, field: str) -> None:
    """Check that a name is not that of an object of another program.

    Args:
        field: setting that holds the name.
    Raises:
        ConfigError: the name begins with PREFIX, and this process was not given such an object.
    """
    check(
        name in GIVEN or not name.startswith(PREFIX),
        f"{field}: '{name}' is a function or class that hybrid_rl.train was given: start the run with that program, or "
        "put it into a file",
    )


def serialize(function: Callable[..., Any], name: str, *, argument: str) -> GivenFunction:
    """Return a function or class as bytes.

    Args:
        name: in the settings.
        argument: of hybrid_rl.train, for messages.
    Raises:
        ConfigError: it is not callable, or holds something that cannot be sent to another process.
    """
    shown = name.removeprefix(PREFIX)
    if not callable(function):
        remedy = "; a reward model belongs into models.reward" if argument == "reward_functions" else ""
        raise ConfigError(f"{argument}: {function!r} is not a function or class{remedy}")
    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # whatever the objects raise that the function holds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{argument}: {shown} cannot be sent to a worker process ({reason}): create locks, files, clients "
            "and models inside it, or put it into a file that the settings name, instead of using those of the program"
        ) from error
    try:
        source = inspect.getsource(function).encode()
    except (OSError, TypeError):
        source = content
    return GivenFunction(argument=argument, content=content, digest=hashlib.sha256(source).hexdigest())


def restore(content: bytes) -> Callable[..., Any]:
    """Return the function or class that `serialize` made bytes of, in a worker process."""
    found: Callable[..., Any] = cloudpickle.loads(content)
    return found
