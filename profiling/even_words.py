"""A cheap reward for random models, which differs within a group: profiling/even_words.py:even_words."""

from typing import Any


def even_words(_: Any, response: str) -> float:
    """Return the fraction of words with an even number of letters."""
    words = response.split()
    return sum(len(word) % 2 == 0 for word in words) / max(1, len(words))
