"""What a user's environment is, and what its answers must be. Worker processes import this, so it imports no torch.

    class Guess:
        def reset(self, row):
            self.number = int(row["answer"])
            return "Guess a number from 1 to 9."

        def step(self, response):
            guess = int(response)
            return "higher" if guess < self.number else "lower", float(guess == self.number), guess == self.number, {}

An object is created for every response, `reset` is called once and `step` after every sampled turn, until it is done.
Both may be asynchronous. An observation is text, or a list of chat messages.
"""

import json
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

Message = dict[str, Any]
"""A chat message, with at least a role and a content."""
Observation = str | list[Message]
"""Text, or chat messages."""


@runtime_checkable
class Environment(Protocol):
    """The environment of one conversation. A method `close()`, if there is one, is called at the end."""

    def reset(self, row: dict[str, Any]) -> Observation | Awaitable[Observation]:
        """Start the conversation on a row of the data, and return what the model reads first."""
        ...

    def step(self, response: str) -> "tuple[Any, ...] | Step | Awaitable[tuple[Any, ...] | Step]":
        """Return (observation, reward, done, info) for the text of a sampled turn."""
        ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """The answer of an environment to a sampled turn."""

    observation: Observation
    """What the model reads next; not read if the conversation is done."""
    reward: float = 0.0
    """Reward of the turn."""
    done: bool = False
    """Whether the conversation is over."""
    info: dict[str, Any] = field(default_factory=dict)
    """Further values, as JSON."""


def check_observation(value: object) -> Observation:
    """Return the value that `reset` or `step` has returned as the observation.

    Raises:
        ValueError: it is neither text nor a list of messages.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"the observation is of type {type(value).__name__}: must be text or a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f"message {number} of the observation must be an object with role and content")
    messages = [dict(message) for message in value]
    _check_json("the observation", messages)
    return messages


def check_step(value: object) -> Step:
    """Return what `step` has returned, a Step or (observation, reward, done, info), as a Step.

    Raises:
        ValueError: it is something else, or the reward is not finite.
    """
    if isinstance(value, tuple) and len(value) == 4:
        observation, reward, done, info = value
        value = Step(observation=observation, reward=reward, done=done, info=info or {})
    if not isinstance(value, Step):
        raise ValueError(f"step returned {type(value).__name__}: must return (observation, reward, done, info)")
    try:
        reward = float(value.reward)
    except (TypeError, ValueError):
        raise ValueError(f"the reward is of type {type(value.reward).__name__}: must be a number") from None
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}: must be finite")
    if not isinstance(value.info, Mapping):
        raise ValueError(f"info is of type {type(value.info).__name__}: must be an object")
    _check_json("info", dict(value.info))
    done = bool(value.done)
    observation = "" if done and value.observation is None else check_observation(value.observation)
    return Step(observation=observation, reward=reward, done=done, info=dict(value.info))


def _check_json(name: str, value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no JSON ({error})") from None
