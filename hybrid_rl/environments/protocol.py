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

A conversation has tools where `reset` returns `{"messages": [...], "tools": [schemas]}`: `step` then gets the turn as a
message of the assistant, `{"role": "assistant", "content": text, "tool_calls": [calls]}`.
"""

import json
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

Message = dict[str, Any]
"""A chat message, with at least a role and a content."""
Observation = str | list[Message]
"""Text, or chat messages."""


class ConversationError(Exception):
    """A conversation cannot go on; the message says why in a whole sentence for the user, without the type's name."""


@runtime_checkable
class Environment(Protocol):
    """The environment of one conversation. A method `close()`, if there is one, is called at the end.

    A class method `prepare(**arguments)`, if there is one, is called once in each process before objects are created;
    it may return whether reset and step return awaitables, which otherwise counts by `async def`.
    """

    def reset(self, row: dict[str, Any]) -> "Opening | Awaitable[Opening]":
        """Start the conversation on a row of the data, and return what the model reads first.

        None leaves the prompt of the row as it is. A mapping has the `tools` of the conversation, as OpenAI's function
        schemas, and `messages` with the observation, which may be None or missing.
        """
        ...

    def step(self, response: str | Message) -> "tuple[Any, ...] | Step | Awaitable[tuple[Any, ...] | Step]":
        """Return (observation, reward, done, info) for a sampled turn.

        Args:
            response: text of the turn; the message of the assistant where the conversation has tools. Each of its
                `tool_calls` is `{"id": text, "type": "function", "function": {"name": text, "arguments": text}}`, with
                the arguments as the model wrote them, which need not be JSON.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Reset:
    """The answer of an environment to a row of the data."""

    observation: Observation | None = None
    """What the model reads first; None is the prompt of the row."""
    tools: list[dict[str, Any]] | None = None
    """OpenAI's function schemas of the tools that the model may call; None is a conversation without tools."""
    is_verbatim: bool = False
    """Whether the observation is the whole text that the model reads, which no chat template changes."""


Opening = Observation | Mapping[str, Any] | Reset | None
"""What `reset` may return."""


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
    is_verbatim: bool = False
    """Whether the observation is all the text between two turns, with the marks of the chat template in it."""


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


def check_reset(value: object) -> Reset:
    """Return what `reset` has returned as a Reset.

    Raises:
        ValueError: it is neither an observation, nor None, nor a mapping with messages and tools.
    """
    if isinstance(value, Reset):
        found = check_reset({"messages": value.observation, "tools": value.tools})
        _check_verbatim(value.is_verbatim, value.observation)
        return replace(found, is_verbatim=value.is_verbatim)
    if not isinstance(value, Mapping):
        return Reset(observation=None if value is None else check_observation(value))
    unknown = [key for key in value if key not in ("messages", "tools")]
    if unknown or not value:
        raise ValueError(f"reset returned an object with the keys {list(value)}: must have messages and tools alone")
    messages = value.get("messages")
    return Reset(
        observation=None if messages is None else check_observation(messages), tools=_check_tools(value.get("tools"))
    )


def _check_tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise ValueError(f"tools are of type {type(tools).__name__}: must be a list of function schemas")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f'tool {number} must be {{"type": "function", "function": {{"name": ...}}}}')
    _check_json("tools", list(tools))
    return [dict(tool) for tool in tools] or None


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
    _check_verbatim(value.is_verbatim, observation)
    return replace(value, observation=observation, reward=reward, done=done, info=dict(value.info))


def _check_verbatim(is_verbatim: bool, observation: Observation | None) -> None:
    if is_verbatim and not isinstance(observation, str):
        raise ValueError(f"a verbatim observation is of type {type(observation).__name__}: must be text")


def _check_json(name: str, value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is no JSON ({error})") from None
