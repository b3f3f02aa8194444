"""Agents that are written against the OpenAI client, each in a thread of its own, as environments.

    async def solve(client, model, row):
        messages = [{"role": "user", "content": row["question"]}]
        answer = await client.chat.completions.create(model=model, messages=messages)
        return float(answer.choices[0].message.content == row["answer"])

The agent's requests go to an endpoint of this process. Its first request is what `reset` returns, the messages that a
further one adds are an observation of `step`, and what the agent returns is the reward of its last turn.
"""

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.config import ConfigError, check
from hybrid_rl.environments.endpoint import ChatConversation, Endpoint, Returned, running_endpoint
from hybrid_rl.environments.loading import load_object
from hybrid_rl.environments.protocol import ConversationError, Message, Step
from hybrid_rl.rewards.loading import describe

FIELD = "environment.arguments.agent"
"""Setting that names the agent, for messages."""
GIVEN = ("base_url", "api_key", "model", "row", "client")
"""Parameters of an agent that it gets by their names."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A function of the user that is ready in this process."""

    function: Callable[..., Any]
    path: Path | None
    """Its file; None for a function without one."""
    given: frozenset[str]
    """Its parameters among GIVEN."""
    is_async: bool


class ChatAgent:
    """The environment of one conversation of an agent."""

    def __init__(
        self, agent: str | Agent, *, model: str = "policy", arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Make a conversation that `reset` starts.

        Args:
            agent: `path.py:function`, asynchronous or not, or such a function that is ready.
            model: name of the model for the agent and in the endpoint's list of models.
            arguments: further keyword arguments of the agent.
        Raises:
            ConfigError: the agent cannot be loaded, or has a parameter that it does not get.
        """
        self._agent = agent if isinstance(agent, Agent) else load_agent(agent, tuple(arguments or ()))
        self._model, self._arguments = model, dict(arguments or {})
        self._endpoint: Endpoint | None = None
        self._conversation: ChatConversation | None = None
        self._thread: AgentThread | None = None

    @classmethod
    def prepare(cls, agent: str, *, model: str = "policy", arguments: Mapping[str, Any] | None = None) -> None:
        """Import what the conversations need, which must not count against the time limit of the first one."""
        cls(agent, model=model, arguments=arguments)

    async def reset(self, row: dict[str, Any]) -> dict[str, Any]:
        """Start the agent and return the messages and tools of its first request.

        Raises:
            ConversationError: the agent raises an error, or returns without a request.
        """
        self._endpoint = await running_endpoint()
        self._conversation = self._endpoint.open(model=self._model)
        self._thread = AgentThread(self._agent, self._conversation, {**self._arguments, "row": row})
        event = await self._conversation.next_event()
        if isinstance(event, Returned):
            raise ConversationError("the agent returned before its first request to the model")
        return {"messages": event.messages, "tools": event.tools}

    async def step(self, response: str | Message) -> Step:
        """Answer the agent's request, and return the messages that its next request adds, or its reward.

        Raises:
            ConversationError: the agent raises an error, sends a request that cannot be trained, or returns something
                that is no reward.
        """
        assert self._conversation is not None
        answer, info = read_turn(response)
        self._conversation.answer(answer)
        event = await self._conversation.next_event()
        if not isinstance(event, Returned):
            return Step(observation=with_names(event.messages, answer), info=info)
        reward, own = read_result(event.value)
        return Step(observation="", reward=reward, done=True, info={**info, **own})

    async def close(self) -> None:
        """End the conversation; the agent's request fails, and an asynchronous agent is cancelled."""
        if self._endpoint is not None and self._conversation is not None:
            self._endpoint.close(self._conversation)
        if self._thread is not None:
            self._thread.cancel()


class AgentThread:
    """The thread of an agent, so that one that blocks delays no other; an asynchronous one has its own event loop."""

    def __init__(self, agent: Agent, conversation: ChatConversation, arguments: Mapping[str, Any]) -> None:
        """Start the thread, which tells the conversation how the agent ends.

        Args:
            agent: function to call.
            conversation: of the running event loop.
            arguments: row of the data and further keyword arguments.
        """
        self._agent, self._conversation = agent, conversation
        about = {"base_url": conversation.base_url, "api_key": conversation.api_key, "model": conversation.model}
        known = {**about, **arguments}
        self._arguments = {name: known[name] for name in known if name in agent.given or name not in GIVEN}
        self._loop = asyncio.get_running_loop()
        self._cancel: Callable[[], object] = lambda: None
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    def cancel(self) -> None:
        """Cancel an asynchronous agent; another one ends with the error of its next request."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._cancel()

    def _run(self) -> None:
        try:
            value = asyncio.run(self._await()) if self._agent.is_async else self._call()
        except BaseException as error:  # includes SystemExit and a cancellation
            report = functools.partial(self._conversation.fail, f"the agent raises {describe(error, self._agent.path)}")
        else:
            report = functools.partial(self._conversation.end, value)
        with contextlib.suppress(RuntimeError):  # the loop of the endpoint has ended
            self._loop.call_soon_threadsafe(report)

    def _call(self) -> object:
        if "client" not in self._agent.given:
            return self._agent.function(**self._arguments)
        import openai

        transport = openai.DefaultHttpxClient(**_LOOPBACK)
        with openai.OpenAI(http_client=transport, **self._client_arguments()) as client:
            return self._agent.function(client=client, **self._arguments)

    async def _await(self) -> object:
        task = asyncio.current_task()
        assert task is not None
        self._cancel = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if "client" not in self._agent.given:
            return await self._agent.function(**self._arguments)
        import openai

        transport = openai.DefaultAsyncHttpxClient(**_LOOPBACK)
        async with openai.AsyncOpenAI(http_client=transport, **self._client_arguments()) as client:
            return await self._agent.function(client=client, **self._arguments)

    def _client_arguments(self) -> dict[str, Any]:
        """Return what a client needs; the limits of the conversation bound the time of a request."""
        return {"base_url": self._conversation.base_url, "api_key": self._conversation.api_key, "timeout": None}


_LOOPBACK: dict[str, Any] = {"trust_env": False, "verify": False}
"""Arguments of an HTTP client on loopback, which needs no proxy and reads no certificates."""


@functools.cache
def load_agent(name: str, further: tuple[str, ...]) -> Agent:
    """Import an agent, and the OpenAI client if it takes one.

    Args:
        name: `path.py:function`.
        further: names of further keyword arguments.
    Raises:
        ConfigError: the import fails, or the function cannot be called with what an agent gets.
    """
    function, path, _ = load_object(name, field=FIELD)
    parameters = inspect.signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [
        p.name
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.default is p.empty
        and (p.kind is p.POSITIONAL_ONLY or p.name not in {*GIVEN, *further})
    ]
    check(
        not unknown,
        f"{FIELD} = {name}: nothing is given for its parameter {' and '.join(unknown)}: an agent takes "
        f"{', '.join(GIVEN)}, and the names in environment.arguments.arguments",
    )
    untaken = [key for key in further if key in GIVEN or not (takes_any or key in named)]
    check(not untaken, f"environment.arguments.arguments: the agent does not take {' and '.join(untaken)} from there")
    given = frozenset(key for key in GIVEN if key in named or (takes_any and key != "client"))
    check(
        bool(given & {"base_url", "client"}),
        f"{FIELD} = {name}: it takes neither client nor base_url, without which it cannot reach the model",
    )
    if "client" in given and importlib.util.find_spec("openai") is None:
        raise ConfigError(f"{FIELD} = {name}: it takes a client, and the package openai is not installed")
    if "client" in given:
        importlib.import_module("openai")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)
    return Agent(function=function, path=path, given=given, is_async=is_async)


def read_turn(response: str | Message) -> tuple[Message, dict[str, int]]:
    """Return a sampled turn as the agent gets it, and the numbers of its tool calls.

    A call that cannot be read is text of the message, as servers of this interface have it.

    Args:
        response: see Environment.step; the name of a call that cannot be read is empty.
    """
    if isinstance(response, str):
        return {"role": "assistant", "content": response}, {}
    calls = response.get("tool_calls") or []
    unread = [call["function"]["arguments"] for call in calls if not call["function"]["name"]]
    content = "\n".join(text for text in (response.get("content") or "", *unread) if text)
    answer = {**response, "content": content, "tool_calls": [call for call in calls if call["function"]["name"]]}
    return answer, {"num_tool_calls": len(calls), "num_failed_tool_calls": len(unread)}


def with_names(messages: Sequence[Message], answer: Message) -> list[Message]:
    """Return messages in which results of tools have the name of the tool, which some chat templates need.

    Args:
        messages: added by the agent.
        answer: the message of the assistant before them, with its calls.
    """
    names = {call["id"]: call["function"]["name"] for call in answer.get("tool_calls") or []}
    called = [names.get(str(message.get("tool_call_id"))) for message in messages]
    return [{"name": name, **message} if name else message for name, message in zip(called, messages, strict=True)]


def read_result(value: object) -> tuple[float, dict[str, Any]]:
    """Return the reward and further values that an agent has returned.

    Args:
        value: a number, an object with `reward` and `info`, or None, which is a reward of 0.
    Raises:
        ConversationError: it is something else.
    """
    fields: Mapping[str, Any] = value if isinstance(value, Mapping) else {"reward": value}
    reward, info = fields.get("reward"), fields.get("info")
    is_known = set(fields) <= {"reward", "info"} and isinstance(info or {}, Mapping)
    try:
        if not is_known or isinstance(reward, str | bytes):
            raise TypeError
        return 0.0 if reward is None else float(reward), dict(info or {})
    except (TypeError, ValueError):
        shown = f"an object with {', '.join(map(str, fields))}" if isinstance(value, Mapping) else type(value).__name__
        raise ConversationError(
            f"the agent returned {shown}: must return a number, None, or an object with reward and info alone"
        ) from None
