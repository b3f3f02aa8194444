"""The text protocol for chat templates without tools.

A system message describes the tools, the model writes
`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, and the user answers
`<tool_response>result</tool_response>`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybrid_rl.data.files import Message
from hybrid_rl.data.tool_turns import ParsedTurn, Schema, ToolCall, split_thought, unreadable, with_ids

START = "<tool_call>"
"""Beginning of a call."""


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """The text protocol for chat templates without tools."""

    has_system: bool
    """Whether the chat template writes system messages; else the first message of the user begins with the tools."""

    def prompt(self, messages: list[Message], tools: list[Schema]) -> tuple[list[Message], list[Schema] | None]:
        """Return messages the first of which describes the tools, and None."""
        first, *rest = self.observation(messages)
        description = describe_tools(tools)
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{description}"}, *rest], None
        if self.has_system:
            return [{"role": "system", "content": description}, first, *rest], None
        return [{**first, "content": f"{description}\n\n{first['content']}"}, *rest], None

    def observation(self, messages: list[Message]) -> list[Message]:
        """Return messages without tools: results of tools, and what follows them, are one message of the user."""
        written = list[Message]()
        follows_result = False
        for message in messages:
            is_result = message["role"] == "tool"
            text = _as_text(message)
            if follows_result and (is_result or message["role"] == "user"):
                written[-1] = {"role": "user", "content": f"{written[-1]['content']}\n{text}"}
                continue
            follows_result = is_result
            plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id", "name")}
            written.append({**plain, "role": "user" if is_result else message["role"], "content": text})
        return written

    def parse(self, text: str, tools: list[Schema]) -> ParsedTurn:
        """Return the content and the tool calls of a turn; see ToolFormat."""
        thought, answer = split_thought(text)
        calls = list(_text_calls(answer))
        content = answer[: answer.index(START)] if calls else answer
        return ParsedTurn(content=thought + content, tool_calls=with_ids(calls, text))


def describe_tools(tools: list[Schema]) -> str:
    """Return the text by which the text protocol describes tools to the model."""
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions:\n{schemas}\n"
        "To call a function, write its name and its arguments:\n"
        '<tool_call>{"name": "...", "arguments": {...}}</tool_call>\n'
        "You then get the result: <tool_response>...</tool_response>"
    )


def _as_text(message: Message) -> str:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return f"<tool_response>{content}</tool_response>"
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    written = [f'{{"name": {json.dumps(c["name"])}, "arguments": {_arguments_text(c["arguments"])}}}' for c in calls]
    return "\n".join([*([content] if content or not calls else []), *(f"<tool_call>{w}</tool_call>" for w in written)])


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _text_calls(text: str) -> Iterator[ToolCall]:
    """Yield the calls of a turn in the text protocol."""
    start = text.find(START)
    while start >= 0:
        body = start + len(START)
        body += len(text[body:]) - len(text[body:].lstrip())
        try:
            value, end = json.JSONDecoder().raw_decode(text, body)
        except (ValueError, RecursionError):
            value, end = None, body
        following = text.find(START, end)
        function = _function_of(value)
        if function is None:
            yield unreadable(text[start : following if following >= 0 else len(text)])
        else:
            yield {"type": "function", "function": function}
        start = following


def _function_of(value: Any) -> dict[str, str] | None:
    """Return name and arguments of a call that is JSON; None if it has no name."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return {"name": value["name"], "arguments": _arguments_text(value.get("arguments", {}))}
