"""Gymnasium environments whose observations and actions are text, or become text by the user's functions."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium

from hybrid_rl.config import ConfigError, check
from hybrid_rl.environments.adapters.user_code import file_of, finite_numbers, user_code
from hybrid_rl.environments.loading import load_object
from hybrid_rl.environments.protocol import ConversationError, Observation, Step

FIELD = "environment.arguments"
"""Setting of the arguments, for messages."""
INVALID = "That is not a valid action."


class GymnasiumEnvironment:
    """The environment of one conversation, whose turns are the actions of an episode."""

    def __init__(
        self,
        id: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        to_text: str | None = None,
        to_action: str | None = None,
        opening: str = "{observation}",
        invalid: str = INVALID,
        invalid_reward: float = 0.0,
    ) -> None:
        """Make the Gymnasium environment.

        Args:
            id: registered name, `module:name` of one that a module registers, or `path.py:ClassName`.
            kwargs: keyword arguments of the Gymnasium environment.
            to_text: `path.py:function` of the function that returns the text or the messages of an observation; None
                takes observations that are text.
            to_action: `path.py:function` of the function that returns the action of a turn's text, and raises
                ValueError if there is none; None takes the text.
            opening: text before the first turn, with the fields {observation} and {prompt}, the text of the row.
            invalid: observation after a turn without a valid action, which does not reach the environment.
            invalid_reward: reward of such a turn.
        """
        self._to_text, self._text_file = _function(to_text, "to_text")
        self._to_action, self._action_file = _function(to_action, "to_action")
        self._opening, self._invalid, self._invalid_reward = opening, invalid, invalid_reward
        with user_code(f"making the environment {id}", file_of(id)):
            self._env = _make(id, dict(kwargs or {}))
        self._file = file_of(id)

    @classmethod
    def prepare(cls, id: str, **arguments: Any) -> None:
        """Make one environment and look at its spaces.

        Raises:
            ConfigError: it cannot be made, or has observations or actions that are no text and have no function.
        """
        try:
            made = cls(id, **arguments)
        except ConversationError as error:
            raise ConfigError(f"{FIELD}.id = {id}: {error}") from error
        spaces = {"to_text": made._env.observation_space, "to_action": made._env.action_space}
        for name, space in spaces.items():
            check(
                arguments.get(name) is not None or isinstance(space, gymnasium.spaces.Text),
                f"{FIELD}.{name} is missing: {id} has {space}, which is no text: name a function with path.py:function",
            )
        opening = arguments.get("opening", "{observation}")
        try:
            opening.format(observation="", prompt="")
        except (AttributeError, IndexError, KeyError, ValueError):
            raise ConfigError(
                f"{FIELD}.opening = {opening}: must be text with {{observation}} and {{prompt}}"
            ) from None
        made.close()

    def reset(self, row: dict[str, Any]) -> Observation:
        """Start an episode with the row's seed, and its column `options` if there is one."""
        seed, options = row.get("seed"), row.get("options")
        with user_code("reset of the environment", self._file):
            found, _ = self._env.reset(seed=None if seed is None else int(seed), options=options)
        text = self._observation(found)
        if not isinstance(text, str):
            return text
        return self._opening.format(observation=text, prompt=row["prompt_messages"][-1]["content"])

    def step(self, response: str) -> Step:
        """Return what follows the action in a turn."""
        action = self._action(response)
        if action is None:
            return Step(observation=self._invalid, reward=self._invalid_reward, info={"invalid_actions": 1})
        with user_code("step of the environment", self._file):
            found, reward, terminated, truncated, info = self._env.step(action)
        return Step(
            observation=self._observation(found),
            reward=float(reward),
            done=bool(terminated or truncated),
            info={"invalid_actions": 0, **finite_numbers(info)},
        )

    def close(self) -> None:
        """Close the Gymnasium environment."""
        self._env.close()

    def _observation(self, found: Any) -> Observation:
        if self._to_text is None:
            return found
        with user_code("to_text", self._text_file):
            return self._to_text(found)

    def _action(self, response: str) -> Any:
        """Return the action of a turn; None if it has none that the environment takes."""
        action: Any = response
        if self._to_action is not None:
            with user_code("to_action", self._action_file):
                try:
                    action = self._to_action(response)
                except ValueError:
                    return None
        return action if self._env.action_space.contains(action) else None


def _make(id: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    if file_of(id) is None:
        return gymnasium.make(id, disable_env_checker=True, **kwargs)
    return load_object(id, field=f"{FIELD}.id")[0](**kwargs)


@functools.cache
def _function(name: str | None, argument: str) -> tuple[Callable[[Any], Any] | None, Path | None]:
    if name is None:
        return None, None
    found, path, _ = load_object(name, field=f"{FIELD}.{argument}")
    return found, path
