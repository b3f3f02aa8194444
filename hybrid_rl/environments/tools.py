"""The environment of a conversation with tools: it runs the calls of a turn and answers each with a message.

The conversation ends with the first turn that calls no tool. A subclass can have its own tools, and give a reward:

    class Shop(ToolEnvironment):
        tools = [search, buy]

        def finish(self, messages):
            return float(self.row["item"] in messages[-1]["content"])
"""

import asyncio
import contextlib
import functools
import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hybrid_rl.config import check
from hybrid_rl.environments.function_tools import FIELD, FunctionTool, ToolError, load_function
from hybrid_rl.environments.mcp import McpSessions, McpTool, is_url, list_tools
from hybrid_rl.environments.protocol import Message, Reset, Step

MAX_RESULT_CHARS = 4000
"""Default of the longest result of a call, in characters."""

ToolSource = str | Callable[..., Any]
"""`path.py:function`, the URL of an MCP server, or a function."""


@dataclass(frozen=True, kw_only=True)
class ToolSet:
    """The tools of a conversation, which all conversations of a process share."""

    tools: Mapping[str, FunctionTool | McpTool]
    """Name -> tool."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI's schemas of the functions."""
        return [tool.schema for tool in self.tools.values()]

    @property
    def is_async(self) -> bool:
        """Whether calls of some tools must be awaited."""
        return any(tool.is_async for tool in self.tools.values())


@functools.cache
def load_tools(sources: tuple[ToolSource, ...]) -> ToolSet:
    """Return the tools of functions and servers; a process imports each file, and asks each server, once.

    Raises:
        ConfigError: there are none, two have the same name, or one of them cannot be loaded.
    """
    check(bool(sources), f"{FIELD}: is empty: give Python functions as path.py:function, or URLs of MCP servers")
    tools = list[FunctionTool | McpTool]()
    for source in sources:
        tools += list_tools(source) if isinstance(source, str) and is_url(source) else [load_function(source)]
    name, number = Counter(tool.name for tool in tools).most_common(1)[0]
    check(number == 1, f"{FIELD}: {number} tools have the name {name}: rename all but one")
    return ToolSet(tools={tool.name: tool for tool in tools})


class ToolEnvironment:
    """A conversation whose model calls tools until a turn calls none, and then gets the reward of `finish`.

    A call that fails is answered with a message that begins with "error:"; the conversation goes on.
    """

    tools: ClassVar[Sequence[ToolSource]] = ()
    """Tools of a subclass, in addition to environment.tools."""

    def __init__(
        self,
        tools: Sequence[ToolSource] = (),
        *,
        max_result_chars: int = MAX_RESULT_CHARS,
        call_timeout_s: float | None = None,
    ) -> None:
        """Start a conversation.

        Args:
            tools: Python functions as `path.py:function`, and URLs of MCP servers on loopback.
            max_result_chars: longest result of a call; the rest is cut, and a mark shows it.
            call_timeout_s: time limit of a call of an asynchronous function or an MCP server, after which the call has
                failed; None is limited by environment.timeout_s alone, after which the conversation has failed.
        """
        self._tools = load_tools(self._sources(tools))
        self._max_result_chars = max_result_chars
        self._call_timeout_s = call_timeout_s
        self._sessions = McpSessions()
        self._is_async = self._tools.is_async or inspect.iscoroutinefunction(self.finish)
        self.row: dict[str, Any] = {}
        """Row of the data, with its columns."""
        self.messages: list[Message] = []
        """The conversation up to here."""

    @classmethod
    def prepare(cls, tools: Sequence[ToolSource] = (), **arguments: Any) -> bool:
        """Load the tools in this process, and return whether calls are asynchronous.

        Raises:
            ConfigError: see load_tools, or an argument has a value that it cannot have.
        """
        limit = arguments.get("max_result_chars", MAX_RESULT_CHARS)
        check(
            type(limit) is int and limit > 0,
            f"environment.arguments: max_result_chars = {limit!r}: must be a whole number above 0",
        )
        seconds = arguments.get("call_timeout_s")
        check(
            seconds is None or (type(seconds) in (int, float) and seconds > 0),
            f"environment.arguments: call_timeout_s = {seconds!r}: must be a number of seconds above 0, or null",
        )
        return load_tools(cls._sources(tools)).is_async or inspect.iscoroutinefunction(cls.finish)

    @classmethod
    def _sources(cls, tools: Sequence[ToolSource]) -> tuple[ToolSource, ...]:
        return tuple(dict.fromkeys([*cls.tools, *tools]))

    def reset(self, row: dict[str, Any]) -> Reset:
        """Return the messages of the row's prompt and the schemas of the tools."""
        self.row = row
        self.messages = list(row["prompt_messages"])
        return Reset(observation=list(self.messages), tools=self._tools.schemas)

    def step(self, response: str | Message) -> Step | Awaitable[Step]:
        """Return the answers to the calls of a turn; a turn without a call ends the conversation.

        Args:
            response: the assistant's message, or a text without calls.
        """
        message = {"role": "assistant", "content": response} if isinstance(response, str) else dict(response)
        answers = self._answer_turn(message)
        # Functions that are not asynchronous run on the main thread, where the pool can end a call that hangs.
        return answers if self._is_async else _run_at_once(answers)

    def finish(self, messages: list[Message]) -> float | Awaitable[float]:
        """Return the reward of a conversation, which has ended with a turn that calls no tool. It may be asynchronous.

        Args:
            messages: all messages of the conversation, the last of which is the answer.
        """
        return 0.0

    async def close(self) -> None:
        """End the connections to servers."""
        await self._sessions.close()

    async def _answer_turn(self, message: Message) -> Step:
        self.messages.append(message)
        calls = message.get("tool_calls") or []
        answers, num_failed = [], 0
        for call in calls:  # in their order, since a call may build on the one before
            text, has_failed = await self._answer(call)
            num_failed += has_failed
            name = call["function"]["name"]
            answers.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": text})
        self.messages += answers
        info = {"num_tool_calls": len(calls), "num_failed_tool_calls": num_failed}
        if calls:
            return Step(observation=answers, info=info)
        reward = self.finish(list(self.messages))
        reward = await reward if inspect.isawaitable(reward) else reward
        return Step(observation="", reward=reward, done=True, info=info)

    async def _answer(self, call: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the text that answers a call, and whether the call failed."""
        try:
            tool = self._find(call["function"]["name"], call["function"]["arguments"])
            result = await self._call(tool, call["function"]["arguments"])
        except ToolError as error:
            return cut(f"error: {error}", self._max_result_chars), True
        return cut(to_text(result), self._max_result_chars), False

    def _find(self, name: str, arguments: str) -> FunctionTool | McpTool:
        names = ", ".join(self._tools.tools)
        if name in self._tools.tools:
            return self._tools.tools[name]
        if name:
            raise ToolError(f"there is no tool {name}; the tools are: {names}")
        if arguments.startswith(("{", "[{")):
            read_arguments(arguments)  # broken JSON has a reason that says more
        raise ToolError(f"the call has no name, or is written in another way than calls are; the tools are: {names}")

    async def _call(self, tool: FunctionTool | McpTool, arguments: str) -> object:
        values = read_arguments(arguments)
        limit = asyncio.timeout(self._call_timeout_s) if tool.is_async else contextlib.nullcontext()
        try:
            async with limit:
                if isinstance(tool, McpTool):
                    return await self._sessions.call(tool, values)
                return await tool.call(json.dumps(values))
        except TimeoutError:
            if isinstance(limit, asyncio.Timeout) and limit.expired():
                raise ToolError(f"the call took longer than {self._call_timeout_s:g} s") from None
            raise


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call.

    Raises:
        ToolError: the text is no JSON object.
    """
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError("the arguments must be a JSON object with the names of the parameters")
    return arguments


def to_text(result: object) -> str:
    """Return a result as text: text as it is, other values as JSON, and what JSON has not as Python shows it."""
    try:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = str(result)
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair is in no tokenizer


def cut(text: str, max_chars: int) -> str:
    """Return a text of at most max_chars characters, followed by a mark if it was longer."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut after {max_chars} of {len(text)} characters]"


def _run_at_once(coroutine: Coroutine[Any, Any, Step]) -> Step:
    """Return what a coroutine returns that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise TypeError("a tool waits although it is not declared with `async def`")
