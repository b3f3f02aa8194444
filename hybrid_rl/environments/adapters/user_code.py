"""What adapters have in common: names of the user's classes, their errors as sentences, and their numbers."""

import contextlib
import math
import numbers
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.protocol import ConversationError
from hybrid_rl.rewards.loading import describe


@contextlib.contextmanager
def user_code(name: str, path: Path | None) -> Iterator[None]:
    """Name what raises inside.

    Args:
        name: of the user's function or object, the subject of the sentence.
        path: its file; None for code of a package.
    Raises:
        ConversationError: the code has raised an error.
    """
    try:
        yield
    except (ConversationError, ConfigError):
        raise
    except Exception as error:
        raise ConversationError(f"{name} raises {describe(error, path)}") from error


def file_of(name: str) -> Path | None:
    """Return the file of a name `path.py:ClassName`; None for the name of something that a package registers."""
    path = Path(name.rpartition(":")[0])
    return path if path.suffix == ".py" else None


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among further values of a step."""
    found = {str(name): float(value) for name, value in values.items() if isinstance(value, numbers.Real)}
    return {name: value for name, value in found.items() if math.isfinite(value)}
