"""Compares the outcome of a fault with what is expected."""

import re
from collections.abc import Iterator

from tests.faults.cases import Ends, GoesOn, Outcome


def faults_of(outcome: Outcome, expected: Ends | GoesOn, *, patience: float = 1.0) -> list[str]:
    """Return what is not as expected, one sentence each.

    Args:
        patience: factor on the limits of time, for a machine with other work.
    """
    kept = [f"leaves {leftover}" for leftover in outcome.leftovers]
    kept += [f"listens at {address}" for address in outcome.open_ports]
    kept += [f"differs from an undisturbed run: {difference}" for difference in outcome.differences]
    if "Traceback" in outcome.output:
        kept.append("prints a traceback")
    if isinstance(expected, Ends):
        return [*_end_faults(outcome, expected, patience), *kept]
    return [*_completion_faults(outcome, expected), *kept]


def _end_faults(outcome: Outcome, expected: Ends, patience: float) -> Iterator[str]:
    if outcome.code != expected.code:
        yield f"exit code {outcome.code} instead of {expected.code}"
    if outcome.seconds > patience * expected.within_s:
        yield f"ends after {outcome.seconds:.0f} s, more than {patience * expected.within_s:g} s"
    num_expected = 1 if expected.sentence else 0
    if len(outcome.sentences) != num_expected:
        yield f"{len(outcome.sentences)} sentences instead of {num_expected}"
    elif expected.sentence and not re.search(expected.sentence, outcome.sentences[0]):
        yield f"the sentence has no {expected.sentence!r}"


def _completion_faults(outcome: Outcome, expected: GoesOn) -> Iterator[str]:
    if outcome.code != 0:
        yield f"exit code {outcome.code} instead of 0"
    if outcome.sentences:
        yield "prints an error"
    if not re.search(expected.warning, outcome.output):
        yield f"the output has no {expected.warning!r}"
