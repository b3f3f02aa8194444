"""Functions that a program gives to hybrid_rl.train as objects, and their way into scorer processes.

The program's own process serializes them with cloudpickle, and sends them over the socket pair that it shares with each
scorer process, which is its child. Nothing is read from a file or a port.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import cloudpickle

from hybrid_rl.config import ConfigError, Findings

PREFIX = "given:"
"""Beginning of the name of a function that was given as an object."""


@dataclass(frozen=True, kw_only=True)
class GivenFunction:
    """A serialized function."""

    content: bytes
    digest: str
    """SHA-256 of its source text, or of the serialized function where there is none."""


GIVEN: dict[str, GivenFunction] = {}
"""Name -> function, of the run of this process."""


@contextmanager
def giving(functions: Sequence[Callable[..., object]]) -> Iterator[list[str]]:
    """Return the names by which the settings know some functions while the block runs.

    Raises:
        ConfigError: one is not callable, cannot be serialized, or has the name of another one.
    """
    findings, found = Findings(), dict[str, GivenFunction]()
    names = [PREFIX + str(getattr(function, "__name__", type(function).__name__)) for function in functions]
    for name, function in zip(names, functions, strict=True):
        serialized = findings.run(lambda name=name, function=function: serialize(function, name))  # type: ignore[misc]
        found |= {name: serialized} if serialized else {}
    twice = sorted({name.removeprefix(PREFIX) for name in names if names.count(name) > 1})
    findings.messages += [f"reward_functions: two are called {name}; give each a __name__ of its own" for name in twice]
    findings.raise_any()
    GIVEN.update(found)
    try:
        yield names
    finally:
        for name in found:
            GIVEN.pop(name, None)


def serialize(function: Callable[..., object], name: str) -> GivenFunction:
    """Return a function as bytes.

    Raises:
        ConfigError: it is not callable, or holds something that cannot be sent to another process.
    """
    shown = name.removeprefix(PREFIX)
    if not callable(function):
        raise ConfigError(
            f"reward_functions: {function!r} is not a function; a reward model belongs into models.reward"
        )
    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # whatever the objects raise that the function holds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"reward_functions: {shown} cannot be sent to a scorer process ({reason}): create locks, files, clients "
            "and models inside the function or in the file of reward.functions instead of using those of the program"
        ) from error
    try:
        source = inspect.getsource(function).encode()
    except (OSError, TypeError):
        source = content
    return GivenFunction(content=content, digest=hashlib.sha256(source).hexdigest())


def restore(content: bytes) -> Callable[..., object]:
    """Return the function that `serialize` made bytes of, in a scorer process."""
    found: Callable[..., object] = cloudpickle.loads(content)
    return found
