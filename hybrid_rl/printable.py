"""Text for terminals and logs, of which a model, a scorer or a settings file may have written a part."""

import io
import logging
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

logger = logging.getLogger(__name__)


def printable(text: str) -> str:
    """Return a text in which a terminal finds nothing to obey: control characters are written as JSON escapes.

    They are the characters of Unicode's categories for control, format (which also turn the direction of writing),
    surrogates, and line and paragraph separators. Line feeds and tabs stay. A JSON text keeps its meaning.
    """
    return text if text.isprintable() else "".join(c if _is_harmless(c) else _escaped(c) for c in text)


def hide_passwords(text: str) -> str:
    """Return a text with *** in place of user name, password and secret parameters in every URL."""
    return _SECRET_PARAMETER.sub(r"\1=***", _USER_IN_URL.sub("***@", text))


def secret_in_url(text: str) -> str | None:
    """Return what is secret in a URL, without the secret itself; None if nothing is."""
    if "://" not in text:
        return None
    if _USER_IN_URL.search(text):
        return "a user name or password"
    found = _SECRET_PARAMETER.search(text)
    return f"the parameter {found[1]}" if found else None


_USER_IN_URL = re.compile(r"(?<=//)[^/\s]*@")
_SECRET = r"\w*token|api_?key|key|\w*secret|passw\w*|pwd|auth|credential|signature|sig"
_SECRET_PARAMETER = re.compile(rf"(?<=[?&;])((?:[\w.-]*[-_.])?(?:{_SECRET}))=[^&;#\s'\"]+", re.IGNORECASE)


def _is_harmless(character: str) -> bool:
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


class PrintableRecord(logging.LogRecord):
    """A message of a log, escaped by `printable` and without passwords in URLs."""

    def getMessage(self) -> str:  # noqa: N802
        """Return the text of the message."""
        return printable(hide_passwords(super().getMessage()))


class PrintableStream(io.TextIOWrapper):
    """A text stream that escapes what is written to it by `printable`, and hides passwords in URLs."""

    def write(self, text: str) -> int:
        """Write a text and return its length."""
        super().write(printable(hide_passwords(text)))
        return len(text)


class OutputStream:
    """A text stream that goes on into nothing where it cannot be written: its pipe is closed, or its disk is full."""

    def __init__(self, stream: TextIO, on_loss: Callable[[str], None]) -> None:
        """Take a stream with a file descriptor.

        Args:
            stream: the stream to write to.
            on_loss: called once, with the reason, after the stream could not be written.
        """
        self.stream = stream
        self._on_loss = on_loss

    def write(self, text: str) -> int:
        """Write a text and return its length."""
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what is in the buffer."""
        self._try(self.stream.flush)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.stream.fileno())  # which takes the buffer, too, and what C libraries write
            os.close(nothing)
            self._on_loss(error.strerror or str(error))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def keep_output(on_loss: Callable[[str], None] | None = None) -> None:
    """Let this process go on where its output cannot be written; a second call replaces the first.

    Args:
        on_loss: called once if stdout is lost, and may raise; None warns.
    """

    def warn(name: str) -> Callable[[str], None]:
        return lambda reason: logger.warning("%s cannot be written (%s): the run goes on without it", name, reason)

    streams = [s.stream if isinstance(s, OutputStream) else s for s in (sys.stdout, sys.stderr)]
    sys.stdout = OutputStream(streams[0], on_loss or warn("stdout"))  # type: ignore[assignment]
    sys.stderr = OutputStream(streams[1], warn("stderr"))  # type: ignore[assignment]


def escape_messages() -> None:
    """Let every logger of this process, and the trace of an exception that ends it, write escaped text."""
    logging.setLogRecordFactory(PrintableRecord)
    sys.excepthook = print_trace


def print_trace(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception with its trace to stderr, escaped and without passwords in URLs."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(printable(hide_passwords(text)), end="", file=sys.stderr)
