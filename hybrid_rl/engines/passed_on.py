"""What a run passes on to the libraries of its engines: merged with the run's own values, and checked by name."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from hybrid_rl.config import ConfigError

MAX_SHOWN = 400
"""Number of characters of a library's sentence that a message shows."""


def merged(settings: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries with the keys of both; where both have a value that is no dictionary, `further`'s."""
    both = dict(settings)
    for key, value in further.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return both


def check_names(field: str, given: Iterable[str], known: Iterable[str], *, library: str) -> None:
    """Check that a library knows the keys of a dictionary.

    Args:
        field: setting that holds the dictionary, for messages.
        given: its keys.
        known: names that the library takes.
        library: name and version of the library.
    Raises:
        ConfigError: one sentence for every key that it does not know, with the names that resemble it.
    """
    names = sorted(known)
    sentences = []
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(key, names) or names
            sentences.append(f"{field}.{key}: {library} has no such key; it has {shorten(', '.join(near))}")
    if sentences:
        raise ConfigError(*sentences)


def sentence_of(error: Exception) -> str:
    """Return what a library says about a value, on one line; of a pydantic error, what it says about each value."""
    parts = getattr(error, "errors", None)
    if not callable(parts):
        return shorten(" ".join(str(error).split()) or type(error).__name__)
    found = [f"{'.'.join(map(str, part['loc']))}: {part['msg']}" if part["loc"] else part["msg"] for part in parts()]
    return shorten("; ".join(found).replace("Value error, ", ""))


def shorten(text: str) -> str:
    """Return a text that is cut if it is long."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
