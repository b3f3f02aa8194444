"""Requests of OpenAI's chat-completions interface, what of them a conversation can train, and the form of the answers.

A conversation is one history: a request repeats the messages of the request before and the model's answer, and adds
messages. All else is refused, because the model's tokens would not be those that the agent has read.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.environments.protocol import Message

IGNORED = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed"),
    *("max_tokens", "max_completion_tokens", "reasoning_effort", "verbosity"),
)
"""Settings of a request that the settings of the run take the place of."""
_NONE: tuple[object, ...] = (None,)
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((None, 1), "a conversation has one answer per turn"),
    "logprobs": ((None, False), "log-probabilities are recorded by the trainer, not sent to the agent"),
    "top_logprobs": ((None, 0), "log-probabilities are recorded by the trainer, not sent to the agent"),
    "logit_bias": ((None, {}), "the model's distribution is trained as it is"),
    "stop": ((None, []), "set rollout.stop_strings for all turns of the run"),
    "response_format": ((None, {"type": "text"}), "the model's tokens are not constrained"),
    "parallel_tool_calls": ((None, True), "the model may call several tools in a turn"),
    "functions": (_NONE, "give the functions as tools"),
    "function_call": (_NONE, "give the functions as tools"),
    "modalities": ((None, ["text"]), "the model writes text"),
    "audio": (_NONE, "the model writes text"),
    "prediction": (_NONE, "the model's tokens are not constrained"),
    "web_search_options": (_NONE, "give a search as one of the tools"),
}
"""Setting of a request that cannot be trained -> its values that change nothing, and the reason."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


class RefusedRequestError(ValueError):
    """A request that a conversation cannot train; the message is the reason, in a sentence for the user."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """What a conversation needs of a request for a chat completion."""

    messages: list[Message]
    """All messages, as `_message` writes them."""
    tools: list[dict[str, Any]] | None
    """Function schemas; None for none."""
    model: str
    """Name of the model that the agent asks for, which only the answer repeats."""
    is_streamed: bool
    """Whether the answer is sent as server-sent events."""
    ignored: tuple[str, ...]
    """Settings of IGNORED that the request gives."""

    def is_repeat_of(self, other: "ChatRequest") -> bool:
        """Return whether another request has the same messages and tools."""
        return self.messages == other.messages and self.tools == other.tools


def read_request(body: object) -> ChatRequest:
    """Return a request.

    Args:
        body: the JSON of the request.
    Raises:
        RefusedRequestError: the body is no chat-completions request, or asks for something that cannot be trained.
    """
    if not isinstance(body, Mapping):
        raise RefusedRequestError("the body of the request must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedRequestError("messages must be a list of at least one message")
    for name, (allowed, reason) in _REFUSED.items():
        if body.get(name) not in allowed:
            raise RefusedRequestError(f"{name} = {json.dumps(body[name])[:100]} is not supported: {reason}")
    tools = _read_tools(body.get("tools"))
    if body.get("tool_choice") not in (None, "auto") and (tools or body["tool_choice"] != "none"):
        choice = json.dumps(body["tool_choice"])[:100]
        raise RefusedRequestError(f"tool_choice = {choice} is not supported: the model chooses, give auto or nothing")
    return ChatRequest(
        messages=[_message(number, message) for number, message in enumerate(messages)],
        tools=tools,
        model=str(body.get("model", "")),
        is_streamed=bool(body.get("stream")),
        ignored=tuple(name for name in IGNORED if body.get(name) is not None),
    )


def _read_tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise RefusedRequestError("tools must be a list")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RefusedRequestError(f"tool {number} is not supported: tools must be functions with a name")
    return tools


def _message(number: int, message: object) -> Message:
    """Return a message with its content as text, without empty values, and `developer` written as `system`."""
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise RefusedRequestError(f"message {number} must be an object with a role of {', '.join(_ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    others = {key: value for key, value in message.items() if value not in (None, [], {}, "")}
    return {**others, "role": role, "content": _text(number, message.get("content"))}


def _text(number: int, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedRequestError(f"the content of message {number} must be text or a list of parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RefusedRequestError(f"message {number} has a part of type {kind}: only text can be trained")
        texts.append(text)
    return "".join(texts)


def added_messages(before: ChatRequest, answer: Message, request: ChatRequest) -> list[Message]:
    """Return the messages that a request adds to the conversation.

    Args:
        before: the last request of the conversation.
        answer: the assistant's message that has answered it.
        request: the next request.
    Raises:
        RefusedRequestError: the request changes or drops what the model has read or written, or adds nothing.
    """
    if request.tools != before.tools:
        raise RefusedRequestError("the tools are not the tools of the first request: they must stay the same")
    number = len(before.messages)
    for index, old in enumerate(before.messages):
        if index >= len(request.messages):
            raise _changed(index, old, "is missing")
        if request.messages[index] != old:
            raise _changed(index, old, "differs from the request before")
    if number >= len(request.messages):
        raise _changed(number, answer, "is missing")
    if not _is_same_answer(request.messages[number], answer):
        raise _changed(number, answer, "is not the model's answer")
    if len(request.messages) == number + 1:
        raise RefusedRequestError(f"the request adds no message after the model's answer, message {number}")
    return request.messages[number + 1 :]


def _changed(number: int, message: Message, event: str) -> RefusedRequestError:
    return RefusedRequestError(
        f"message {number} ({message['role']}) {event}: a request must repeat the conversation so far, with the "
        "model's answers as they were given, and may only add messages"
    )


def _is_same_answer(message: Message, answer: Message) -> bool:
    """Return whether a message is the answer, except for white space around it and in the JSON of tool arguments."""
    return (
        message["role"] == "assistant"
        and message["content"].strip() == (answer.get("content") or "").strip()
        and _calls(message) == _calls(answer)
    )


def _calls(message: Message) -> list[tuple[object, ...]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        return [("malformed",)]
    functions = [call["function"] if isinstance(call.get("function"), Mapping) else {} for call in calls]
    return [
        (call.get("id"), function.get("name"), _json(function.get("arguments")))
        for call, function in zip(calls, functions, strict=True)
    ]


def _json(text: object) -> object:
    try:
        return json.loads(text, parse_constant=str) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def completion(answer: Message, *, model: str) -> dict[str, Any]:
    """Return the response to a request, as OpenAI's interface has it, without `usage`: the trainer counts the tokens.

    Args:
        answer: the assistant's message.
        model: name that the request has given.
    """
    choice = {"index": 0, "message": _sent(answer), "finish_reason": _finish_reason(answer), "logprobs": None}
    return {**_head("chat.completion", model), "choices": [choice]}


def completion_events(answer: Message, *, model: str) -> bytes:
    """Return the response to a request with `stream`, whose events hold the whole answer in one piece.

    Args:
        answer: the assistant's message.
        model: name that the request has given.
    """
    head = _head("chat.completion.chunk", model)
    delta = _sent(answer)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    pieces: Sequence[tuple[dict[str, Any], str | None]] = ((delta, None), ({}, _finish_reason(answer)))
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}
        for delta, reason in pieces
    ]
    return b"".join(f"data: {text}\n\n".encode() for text in (*map(json.dumps, chunks), "[DONE]"))


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def _sent(answer: Message) -> dict[str, Any]:
    content, calls = answer.get("content") or "", answer.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def _finish_reason(answer: Message) -> str:
    return "tool_calls" if answer.get("tool_calls") else "stop"
