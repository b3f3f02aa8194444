"""A guessing game: the model names a number, and the environment says whether the secret one is higher or lower.

The last word of a turn is the guess; thoughts may stand before it. The reward is 1 for the right one, which ends the
game; `environment.max_turns` is the number of guesses.
"""

from typing import Any


class Guessing:
    """A game; the row's answer is the secret number."""

    def reset(self, row: dict[str, Any]) -> None:
        """Take the secret number; the prompt of the row is what the model reads first."""
        self.secret = int(row["answer"])

    def step(self, response: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Judge a guess."""
        guess = (response.split() or [""])[-1]
        if not guess.isdecimal():
            return "number ?", 0.0, False, {}
        if int(guess) == self.secret:
            return "right", 1.0, True, {}
        return "higher" if int(guess) < self.secret else "lower", 0.0, False, {}
