"""What a reward function returned, as a score. Worker processes import this module, so it imports no torch."""

import math
import numbers
from decimal import Decimal


def score_of(value: object) -> float:
    """Return what a reward function returned as a finite float64.

    A number is a bool (True is 1), int, float, Fraction or Decimal, or an array or tensor of NumPy or torch with one
    real element. An int beyond 2**53, a Fraction and a Decimal are rounded to float64.

    Raises:
        ValueError: the value is not a number, or not finite as float64; None, text and lists are no numbers.
    """
    try:
        number = value.item() if hasattr(value, "item") else value
    except Exception as error:  # an array with several elements, for example
        raise ValueError(f"returned {_shown(value)}, not a number") from error
    if not isinstance(number, numbers.Real | Decimal):
        raise ValueError(f"returned {_shown(value)}, not a number")
    try:
        score = float(number)
    except (OverflowError, ValueError):  # an integer above 1.8e308, or a signalling NaN of Decimal
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"returned {_shown(value)}, which is not finite as float64")
    return score


def _shown(value: object) -> str:
    """Return the type of a value and, shortened, the value itself."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of more than 4300 digits, or a repr of the user's own
        return f"a value of type {type(value).__name__}"
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return text if value is None else f"{type(value).__name__} {text}"
