"""Errors of the user's code that an adapter runs, as sentences with the line of that code."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

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
