"""A grid world of Gymnasium whose observations and actions are text.

The player starts on one field of a square and has to reach another one. An observation says how far away the goal is,
such as `2 down 3 right`. The last word of an action is the move; thoughts may stand before it.
"""

from typing import Any

import gymnasium
import numpy as np

MOVES = {"up": np.array([-1, 0]), "down": np.array([1, 0]), "left": np.array([0, -1]), "right": np.array([0, 1])}
"""Action -> change of row and column."""
TEXT = gymnasium.spaces.Text(min_length=0, max_length=64, charset="abcdefghijklmnopqrstuvwxyz0123456789 ")
"""Space of observations and actions."""


class GridWorld(gymnasium.Env[str, str]):
    """A square of fields; reaching the goal has the reward 1 and ends the episode."""

    observation_space = TEXT
    action_space = TEXT

    def __init__(self, size: int = 9) -> None:
        """Make a world with size * size fields."""
        self._size = size
        self._player = self._goal = np.zeros(2, dtype=int)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Place the player and the goal on two different fields."""
        super().reset(seed=seed)
        fields = self.np_random.choice(self._size**2, size=2, replace=False)
        self._player, self._goal = (np.array(divmod(int(field), self._size)) for field in fields)
        return self._text(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move the player; a wall, or a word that is no move, leaves it where it is."""
        move = MOVES.get((action.split() or [""])[-1], 0)
        self._player = np.clip(self._player + move, 0, self._size - 1)
        is_solved = not self.way.any()
        return self._text(), float(is_solved), is_solved, False, {}

    @property
    def way(self) -> np.ndarray:
        """Rows and columns from the player to the goal."""
        return self._goal - self._player

    def _text(self) -> str:
        rows, columns = self.way.tolist()
        parts = [f"{abs(rows)} {'down' if rows > 0 else 'up'}"] if rows else []
        parts += [f"{abs(columns)} {'right' if columns > 0 else 'left'}"] if columns else []
        return " ".join(parts) or "goal"
