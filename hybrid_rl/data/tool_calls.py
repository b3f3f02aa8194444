"""How a chat template and a model write tools, their calls and their results.

Most chat templates describe tools to the model in a format of their own, in which one of vLLM's tool parsers reads the
calls. For a template without tools there is the text protocol of `tool_texts`.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import check
from hybrid_rl.data.chat import NEXT_TURN, SENTINEL
from hybrid_rl.data.files import Message
from hybrid_rl.data.tool_texts import TextFormat
from hybrid_rl.data.tool_turns import (
    CALL_STARTS,
    DEEPSEEK_CALL,
    ParsedTurn,
    Schema,
    ToolCall,
    split_thought,
    unreadable,
    with_ids,
)

FIELD = "environment.tool_parser"
"""Setting that names the format, for messages."""
TEXT = "text"
"""Name of the text protocol."""

ReadCalls = Callable[[str, list[Schema]], tuple[str, list[ToolCall]]]
"""(text of a turn, tools) -> text without the calls, and the calls."""
LoadParser = Callable[[str, PreTrainedTokenizerBase], ReadCalls]
"""(name of a parser, tokenizer) -> the parser."""

PARSERS = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2"),
    ((DEEPSEEK_CALL, "```json"), "deepseek_v3"),
    ((DEEPSEEK_CALL,), "deepseek_v31"),
    (("<|tool_call_begin|>",), "kimi_k2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>", '"arguments"'), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters": '), "llama3_json"),
)
"""Texts that a chat template contains -> vLLM's parser of its calls; the first whose texts are all there is taken."""

_JSON_CALL = re.compile(r'\A\s*\{\s*"(?:name|function)"')
_PYTHON_CALL = re.compile(r"\A\s*\[\s*[A-Za-z_]\w*\(")
BARE_CALLS = {
    **dict.fromkeys(("llama3_json", "llama4_json"), _JSON_CALL),
    **dict.fromkeys(("pythonic", "llama4_pythonic", "olmo3"), _PYTHON_CALL),
}
"""Parser -> the beginning of a turn that is a call although no special text announces it."""


class ToolFormat(Protocol):
    """How tools, their calls and their results are written."""

    def prompt(self, messages: list[Message], tools: list[Schema]) -> tuple[list[Message], list[Schema] | None]:
        """Return the messages of a prompt and the tools for the chat template, None where the messages have them."""
        ...

    def observation(self, messages: list[Message]) -> list[Message]:
        """Return messages of tools and of the assistant as the chat template takes them."""
        ...

    def parse(self, text: str, tools: list[Schema]) -> ParsedTurn:
        """Return the content and the tool calls of a turn, whose text has its special tokens."""
        ...


def make_tool_format(
    name: str | None, tokenizer: PreTrainedTokenizerBase, chat_template: str, *, load_parser: LoadParser
) -> ToolFormat:
    """Return how tools are written.

    Args:
        name: of a tool parser of vLLM, or text; None chooses by the chat template.
        tokenizer: the actor's.
        chat_template: Jinja template of the chats.
        load_parser: makes a tool parser of vLLM.
    Raises:
        ConfigError: there is no such parser; the chat template has no place for tools, but a parser is named; it has
            tools in a format that is not known; or it does not write the results of calls that were sampled.
    """
    if name == TEXT or (name is None and not has_tools(tokenizer, chat_template)):
        return TextFormat(has_system=_takes_system_message(tokenizer, chat_template))
    name = recognise(chat_template) if name is None else name
    read = load_parser(name, tokenizer)
    check(
        has_tools(tokenizer, chat_template),
        f"{FIELD} = {name}: the chat template has no place for tools, so that the model would not know them: set "
        f"{FIELD} = {TEXT}, or give another template with prompts.template_path",
    )
    check(
        _writes_results(tokenizer, chat_template),
        f"{FIELD} = {name}: the chat template writes the result of a tool only after a call that it has written "
        f"itself, but turns of the model stay as they were sampled: set {FIELD} = {TEXT}, or give another template "
        "with prompts.template_path",
    )
    return TemplateFormat(name=name, read=read)


def recognise(chat_template: str) -> str:
    """Return the name of vLLM's parser of the calls in a chat template's format.

    Raises:
        ConfigError: the format is not known.
    """
    source = chat_template.replace('\\"', '"')  # quotes within quotes
    name = next((parser for texts, parser in PARSERS if all(text in source for text in texts)), None)
    check(
        name is not None,
        f"{FIELD} = null: the chat template writes tool calls in a format that is not recognised: name the parser of "
        f"vLLM that reads it, or {TEXT}, which writes tools and calls without the template",
    )
    assert name is not None
    return name


def has_tools(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> bool:
    """Return whether a chat template describes tools to the model."""
    empty = {"type": "object", "properties": {}}
    probe = {"type": "function", "function": {"name": SENTINEL, "description": "none", "parameters": empty}}
    system = {"role": "system", "content": "none"}
    return any(
        SENTINEL in _render(tokenizer, chat_template, messages, [probe])
        for messages in ([NEXT_TURN], [system, NEXT_TURN])
    )


def _writes_results(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> bool:
    """Return whether a chat template writes the result of a tool after a turn that it does not know to be a call."""
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "none", "content": SENTINEL}
    history = [NEXT_TURN, {"role": "assistant", "content": "none"}, result]
    return SENTINEL in _render(tokenizer, chat_template, history, None)


def _takes_system_message(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> bool:
    return SENTINEL in _render(tokenizer, chat_template, [{"role": "system", "content": SENTINEL}, NEXT_TURN], None)


def _render(
    tokenizer: PreTrainedTokenizerBase, chat_template: str, messages: Sequence[Message], tools: list[Schema] | None
) -> str:
    """Return a rendered chat; no text if the template refuses it."""
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, chat_template=chat_template, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a template is a program of its own, which can raise anything
        return ""


@dataclass(frozen=True, kw_only=True)
class TemplateFormat:
    """The format of a chat template with tools, whose calls a parser of vLLM reads."""

    name: str
    """Of the parser."""
    read: ReadCalls

    def prompt(self, messages: list[Message], tools: list[Schema]) -> tuple[list[Message], list[Schema] | None]:
        """Return messages and tools for the chat template."""
        return self.observation(messages), tools

    def observation(self, messages: list[Message]) -> list[Message]:
        """Return messages whose calls have their arguments as objects, which chat templates expect."""
        return [_with_objects(message) for message in messages]

    def parse(self, text: str, tools: list[Schema]) -> ParsedTurn:
        """Return the content and the tool calls of a turn; see ToolFormat."""
        thought, answer = split_thought(text)
        content, calls = self.read(answer, tools)
        starts = self._starts(answer, calls)
        if len(starts) > len(calls):
            content, calls = answer[: starts[0]], self._read_each(answer, starts, calls, tools)
        return ParsedTurn(content=thought + content, tool_calls=with_ids(calls, text))

    def _starts(self, text: str, calls: list[ToolCall]) -> list[int]:
        """Return where calls begin, without such texts in arguments."""
        found = [match.start() for match in CALL_STARTS.finditer(text)]
        bare = BARE_CALLS.get(self.name)
        if not found and bare is not None and bare.match(text):
            return [0]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        return found[: len(found) - len(CALL_STARTS.findall(arguments))]

    def _read_each(self, text: str, starts: list[int], calls: list[ToolCall], tools: list[Schema]) -> list[ToolCall]:
        """Return all calls of a turn of which the parser has read some: each alone, since one can make it drop all."""
        pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
        alone = [self.read(piece, tools)[1] for piece in pieces]
        if sum(map(len, alone)) >= len(calls):
            return [c for piece, found in zip(pieces, alone, strict=True) for c in found or [unreadable(piece)]]
        return [*calls, *(unreadable(text) for _ in range(len(starts) - len(calls)))]


def _with_objects(message: Message) -> Message:
    """Return a message whose calls have their arguments as objects where these are JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = [{**call, "function": {**call["function"], "arguments": _object(call["function"])}} for call in calls]
    return {**message, "tool_calls": changed}


def _object(function: dict[str, Any]) -> Any:
    arguments = function["arguments"]
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
