"""The tool calls of a turn: where they begin in its text, and what becomes of one that cannot be read."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.data.chat import THINK_TAGS

Schema = dict[str, Any]
"""OpenAI's schema of a function."""
ToolCall = dict[str, Any]
"""A call in OpenAI's form."""

DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
"""Beginning of a call of DeepSeek's models."""
CALL_STARTS = re.compile(
    "|".join(
        (
            r"<tool_call>\s*(?:<function=)?",
            r"<function=",
            r"<\|tool_call(?:_begin|_start)?\|?>",
            re.escape(DEEPSEEK_CALL),
            r"<(?:seed|minimax):tool_call>",
            r"<start_function_call>",
            r"\[TOOL_CALLS\]",
            r"<\|python_tag\|>",
        )
    )
)
"""Texts with which calls begin in the formats of models."""


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """A turn of the model, read."""

    content: str
    """Text before the first call; the whole text if there is none."""
    tool_calls: list[ToolCall]
    """Calls as `{"id": text, "type": "function", "function": {"name": text, "arguments": text}}`. A call that cannot be
    read has an empty name, and what the model wrote as arguments."""


def unreadable(text: str) -> ToolCall:
    """Return the entry of a call that cannot be read.

    Args:
        text: what the model wrote, from the beginning of the call on.
    """
    start = CALL_STARTS.match(text)
    body = text[start.end() if start else 0 :].partition("</tool_call>")[0]
    return {"type": "function", "function": {"name": "", "arguments": body.strip()}}


def with_ids(calls: Sequence[ToolCall], text: str) -> list[ToolCall]:
    """Return calls with ids that depend on the text of their turn alone, so that a run can be repeated.

    Ids have nine letters and digits, which is the rule of Mistral's templates. Ids of Kimi K2, such as
    functions.add:0, are part of what the model has written, and stay.
    """
    named = []
    for number, call in enumerate(calls):
        function, given = call["function"], call.get("id") or ""
        digest = hashlib.sha256(f"{number} {text}".encode("utf-8", "replace")).hexdigest()[:9]
        is_meant = given.startswith(f"functions.{function['name']}:")
        named.append({"id": given if is_meant else digest, "type": "function", "function": dict(function)})
    return named


def split_thought(text: str) -> tuple[str, str]:
    """Return the thinking of a turn and the rest, which alone has calls; unfinished thinking is all there is."""
    begin, end = THINK_TAGS
    thought, tag, rest = text.rpartition(end)
    if tag:
        return thought + tag, rest
    return (text, "") if begin in text else ("", text)
