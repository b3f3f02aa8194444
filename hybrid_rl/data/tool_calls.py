"""How a chat template and a model write tools, their calls and their results.

Most chat templates describe tools to the model in a format of their own, in which one of vLLM's tool parsers reads the
calls. For a template without tools there is a text protocol: a system message describes the tools, the model writes
`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, and the user answers
`<tool_response>result</tool_response>`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import check
from hybrid_rl.data.chat import NEXT_TURN, SENTINEL, THINK_TAGS
from hybrid_rl.data.files import Message

FIELD = "environment.tool_parser"
"""Setting that names the format, for messages."""
TEXT = "text"
"""Name of the text protocol."""

Schema = dict[str, Any]
"""OpenAI's schema of a function."""
ToolCall = dict[str, Any]
"""A call in OpenAI's form."""
ReadCalls = Callable[[str, list[Schema]], tuple[str, list[ToolCall]]]
"""(text of a turn, tools) -> text without the calls, and the calls."""
LoadParser = Callable[[str, PreTrainedTokenizerBase], ReadCalls]
"""(name of a parser, tokenizer) -> the parser."""

_DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
PARSERS = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2"),
    ((_DEEPSEEK_CALL, "```json"), "deepseek_v3"),
    ((_DEEPSEEK_CALL,), "deepseek_v31"),
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

CALL_STARTS = re.compile(
    "|".join(
        (
            r"<tool_call>\s*(?:<function=)?",
            r"<function=",
            r"<\|tool_call(?:_begin|_start)?\|?>",
            re.escape(_DEEPSEEK_CALL),
            r"<(?:seed|minimax):tool_call>",
            r"<start_function_call>",
            r"\[TOOL_CALLS\]",
            r"<\|python_tag\|>",
        )
    )
)
"""Texts with which calls begin in the formats of PARSERS."""
_JSON_CALL = re.compile(r'\A\s*\{\s*"(?:name|function)"')
_PYTHON_CALL = re.compile(r"\A\s*\[\s*[A-Za-z_]\w*\(")
BARE_CALLS = {
    **dict.fromkeys(("llama3_json", "llama4_json"), _JSON_CALL),
    **dict.fromkeys(("pythonic", "llama4_pythonic", "olmo3"), _PYTHON_CALL),
}
"""Parser -> the beginning of a turn that is a call although no special text announces it."""


@dataclass(frozen=True, kw_only=True)
class ParsedTurn:
    """A turn of the model, read."""

    content: str
    """Text before the first call; the whole text if there is none."""
    tool_calls: list[ToolCall]
    """Calls as `{"id": text, "type": "function", "function": {"name": text, "arguments": text}}`. A call that cannot be
    read has an empty name, and what the model wrote as arguments."""


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
        ConfigError: there is no such parser; the chat template has no place for tools, but a parser is named; or it has
            tools in a format that is not known.
    """
    if name == TEXT or (name is None and not has_tools(tokenizer, chat_template)):
        return TextFormat(has_system=_takes_system_message(tokenizer, chat_template))
    if name is None:
        name = next((parser for texts, parser in PARSERS if all(text in chat_template for text in texts)), None)
        check(
            name is not None,
            f"{FIELD} = null: the chat template writes tool calls in a format that is not recognised: name the parser "
            f"of vLLM that reads it, or {TEXT}, which writes tools and calls without the template",
        )
        assert name is not None
        return TemplateFormat(name=name, read=load_parser(name, tokenizer))
    read = load_parser(name, tokenizer)
    check(
        has_tools(tokenizer, chat_template),
        f"{FIELD} = {name}: the chat template has no place for tools, so that the model would not know them: set "
        f"{FIELD} = {TEXT}, or give another template with prompts.template_path",
    )
    return TemplateFormat(name=name, read=read)


def has_tools(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> bool:
    """Return whether a chat template describes tools to the model."""
    empty = {"type": "object", "properties": {}}
    probe = {"type": "function", "function": {"name": SENTINEL, "description": "none", "parameters": empty}}
    system = {"role": "system", "content": "none"}
    return any(
        SENTINEL in _render(tokenizer, chat_template, messages, [probe])
        for messages in ([NEXT_TURN], [system, NEXT_TURN])
    )


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
        content = answer[: answer.index("<tool_call>")] if calls else answer
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
    start = text.find("<tool_call>")
    while start >= 0:
        body = start + len("<tool_call>")
        body += len(text[body:]) - len(text[body:].lstrip())
        try:
            value, end = json.JSONDecoder().raw_decode(text, body)
        except (ValueError, RecursionError):
            value, end = None, body
        following = text.find("<tool_call>", end)
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

    Ids have nine letters and digits, which is the rule of Mistral's templates; an id that names the function stays.
    """
    named = []
    for number, call in enumerate(calls):
        function, given = call["function"], call.get("id") or ""
        digest = hashlib.sha256(f"{number} {text}".encode("utf-8", "replace")).hexdigest()[:9]
        is_meant = bool(function["name"]) and function["name"] in given
        named.append({"id": given if is_meant else digest, "type": "function", "function": dict(function)})
    return named


def split_thought(text: str) -> tuple[str, str]:
    """Return the thinking of a turn and the rest, which alone has calls; unfinished thinking is all there is."""
    begin, end = THINK_TAGS
    thought, tag, rest = text.rpartition(end)
    if tag:
        return thought + tag, rest
    return (text, "") if begin in text else ("", text)


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
