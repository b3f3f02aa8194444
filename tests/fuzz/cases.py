"""Fuzz cases: a number draws one case of a subject, whose check passes or raises; the number alone reproduces it."""

import random
import re
import shutil
import tempfile
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.config import ConfigError

MAX_SENTENCE_CHARACTERS = 900
INTERNALS = re.compile(r"Traceback|\b[A-Z]\w*(?:Error|Exception)\(|<class '|\bobject at 0x|site-packages|Errno")
"""What a sentence for a user never holds: a repr of an exception or of an object."""
UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}
"""Unicode categories of control characters, half surrogate pairs and line ends."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A kind of input, and the check of one random case of it."""

    name: str
    check: Callable[[random.Random, Path], None]
    """Draws a case from the generator, and raises if the product treats it wrongly. The folder is empty."""
    num_cases: int
    """Cases of one run of the tests; a soak takes more, in the same proportions."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A case that the product treats wrongly."""

    subject: str
    case: str
    """Seed and number, as `soak.py --case` takes them."""
    error: BaseException

    def __str__(self) -> str:
        return f"{self.subject} {self.case}: {''.join(traceback.format_exception(self.error))}"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The sentences with which the product refuses an input."""

    messages: tuple[str, ...]


def run_case(subject: Subject, case: str) -> Failure | None:
    """Return the failure of a case; None if it passes.

    Args:
        case: `seed/number`, for example 0/17.
    """
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        subject.check(random.Random(f"{subject.name}/{case}"), folder)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Failure(subject=subject.name, case=case, error=error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def failures(subject: Subject, *, seed: int = 0, first: int = 0, num_cases: int | None = None) -> Iterator[Failure]:
    """Yield the failures of consecutive cases as they are found.

    Args:
        num_cases: None is the number of one run of the tests.
    """
    for number in range(first, first + (subject.num_cases if num_cases is None else num_cases)):
        failure = run_case(subject, f"{seed}/{number}")
        if failure is not None:
            yield failure


def outcome(call: Callable[[], Any], *names: str) -> Any:
    """Return the result of a call, or its Refusal; every other exception passes on, which fails the case.

    Args:
        names: fields, files or tensors, one of which every sentence must name.
    """
    try:
        return call()
    except ConfigError as error:
        for message in error.messages:
            check_sentence(message, *names)
        assert error.messages, "a ConfigError without a sentence"
        return Refusal(messages=error.messages)


def check_sentence(message: str, *names: str) -> None:
    """Check that a message is one line for a user, and names one of the given fields or files."""
    assert isinstance(message, str) and message.strip(), f"no sentence: {message!r}"
    assert not any(unicodedata.category(c) in UNPRINTABLE for c in message), f"not one printable line: {message!r}"
    assert not INTERNALS.search(message), f"shows internals of Python: {message!r}"
    assert len(message) <= MAX_SENTENCE_CHARACTERS, f"{len(message)} characters: {message!r}"
    assert not names or any(name in message for name in names), f"names none of {names}: {message!r}"


def check_refused(found: Any, what: str) -> None:
    """Check that an input was refused, where nothing else is right."""
    assert isinstance(found, Refusal), f"accepted: {what}; gave {str(found)[:300]!r}"


def check_close(found: Any, expected: Any, what: str, *, tolerance: float = 1e-5) -> None:
    """Check nested lists of numbers against each other, relative to the larger of 1 and the expected number."""
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{what}: {len(found)} entries instead of {len(expected)}"
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_close(one, other, f"{what}[{place}]", tolerance=tolerance)
        return
    limit = tolerance * max(1.0, abs(expected))
    assert abs(found - expected) <= limit, f"{what}: {found} instead of {expected}"
