"""Environments of the package verifiers, whose own loops run as agents that ask the chat-completions endpoint."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import verifiers

from hybrid_rl.config import ConfigError, check
from hybrid_rl.environments.adapters.chat_agent import Agent, ChatAgent
from hybrid_rl.environments.adapters.user_code import file_of, finite_numbers
from hybrid_rl.environments.loading import load_object
from hybrid_rl.rewards.loading import describe

FIELD = "environment.arguments.id"
"""Setting that names the environment, for messages."""


class VerifiersEnvironment(ChatAgent):
    """The environment of one conversation."""

    def __init__(self, id: str, *, kwargs: Mapping[str, Any] | None = None) -> None:
        """Take the environment, which all conversations of a process share.

        Args:
            id: name of an installed environment, or `path.py:load_environment`.
            kwargs: keyword arguments of its function load_environment.
        Raises:
            ConfigError: it cannot be loaded, or scores several responses together.
        """
        environment, path = _loaded(id, dict(kwargs or {}))
        run = functools.partial(run_conversation, environment)
        super().__init__(
            Agent(function=run, path=path, given=frozenset({"base_url", "api_key", "model", "row"}), is_async=True)
        )

    @classmethod
    def prepare(cls, id: str, *, kwargs: Mapping[str, Any] | None = None) -> None:  # type: ignore[override]
        """Load the environment.

        Raises:
            ConfigError: see the constructor.
        """
        cls(id, kwargs=kwargs)


async def run_conversation(
    environment: Any, *, base_url: str, api_key: str, model: str, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Run the loop of an environment on a row of the data, and return its reward and its metrics.

    Args:
        environment: of verifiers.
        base_url: of the endpoint.
        api_key: of the conversation.
        model: name of the model at the endpoint.
        row: the columns that the environment reads are answer and info.
    Raises:
        verifiers.Error: the environment has ended with an error.
    """
    transport = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)  # on loopback
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, http_client=transport) as client:
        chat = verifiers.clients.OpenAIChatCompletionsClient(client)
        state = await environment.rollout(_input(environment, row), chat, model, {})
        if state.get("error") is not None:
            raise state["error"]
        await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)
    return {"reward": state["reward"], "info": finite_numbers(state["metrics"] or {})}


def _input(environment: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    messages = list(row["prompt_messages"])
    if environment.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": environment.system_prompt})
    info = row.get("info") or {}
    return {"prompt": messages, "answer": row.get("answer") or "", "info": info, "example_id": 0}


_CACHE: dict[tuple[str, str], tuple[Any, Path | None]] = {}  # name and arguments -> environment and its file


def _loaded(id: str, kwargs: dict[str, Any]) -> tuple[Any, Path | None]:
    """Return the environment of this process, and the user's file."""
    key = (id, repr(kwargs))
    if key not in _CACHE:
        _CACHE[key] = _load(id, kwargs)
    return _CACHE[key]


def _load(id: str, kwargs: dict[str, Any]) -> tuple[Any, Path | None]:
    path = file_of(id)
    own = None if path is None else load_object(id, field=FIELD)[0]
    try:
        environment = verifiers.load_environment(id, **kwargs) if own is None else own(**kwargs)
    except Exception as error:
        raise ConfigError(f"{FIELD} = {id}: loading it fails with {describe(error, path)}") from error
    check(
        not environment.requires_group_rollouts,
        f"{FIELD} = {id}: its rubric scores several responses together, and here each conversation is scored alone",
    )
    return environment, path
