"""Which requests of an agent a conversation can train, and the form of the answers, by hand."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from hybrid_rl.environments.chat_completions import (
    RefusedRequestError,
    added_messages,
    completion,
    completion_events,
    read_request,
)

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
ANSWER = {"role": "assistant", "content": "2"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
MORE = {"role": "user", "content": "sure?"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": QUESTION, **fields}


def test_messages_of_a_request_are_text_with_the_roles_of_chat_templates():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
        {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "add"},
    ]
    request = read_request(body(messages=messages, tools=[ADD], stream=True, temperature=0, max_tokens=None))
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call_1", "name": "add"},
    ]
    assert request.tools == [ADD] and request.is_streamed and request.ignored == ("temperature",)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": False, "stop": None, "tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}, "logit_bias": {}, "modalities": ["text"]},
        {"tools": [ADD], "tool_choice": "auto", "parallel_tool_calls": True},
    ],
    ids=["of one answer", "of free text", "of chosen tools"],
)
def test_settings_that_change_nothing_are_taken(fields):
    assert read_request(body(**fields)).messages == QUESTION


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "1+1"}]}, "message 0 must be an object with a role"),
        ({"messages": [{"role": "robot", "content": "1+1"}]}, "message 0 must be an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "the content of message 0 must be text"),
        (
            {"messages": [*QUESTION, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "message 2 has a part of type image_url: only text can be trained",
        ),
        ({"n": 2}, "n = 2 is not supported: a conversation has one answer per turn"),
        ({"logprobs": True}, "logprobs = true is not supported: log-probabilities are recorded by the trainer"),
        ({"top_logprobs": 5}, "top_logprobs = 5 is not supported"),
        ({"stop": ["\n"]}, "set rollout.stop_strings"),
        ({"response_format": {"type": "json_object"}}, "the model's tokens are not constrained"),
        ({"tools": [ADD], "tool_choice": "required"}, 'tool_choice = "required" is not supported'),
        ({"tools": [ADD], "tool_choice": "none"}, 'tool_choice = "none" is not supported'),
        ({"tools": [{"type": "web_search"}]}, "tool 0 is not supported"),
        ({"functions": [{"name": "add"}]}, "give the functions as tools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_is_refused_with_its_name(fields, message):
    with pytest.raises(RefusedRequestError) as caught:
        read_request(body(**fields))
    assert message in str(caught.value)


def test_a_body_that_is_no_object_is_refused():
    with pytest.raises(RefusedRequestError, match="must be a JSON object"):
        read_request([])


@pytest.mark.parametrize(
    "answer, repeated",
    [
        (ANSWER, ANSWER),
        ({"role": "assistant", "content": " 2\n"}, ANSWER),
        (CALLING, {**CALLING, "content": None}),
        (CALLING, {**CALLING, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"b":1,"a":1}'}}]}),
    ],
    ids=["as it was given", "without white space around it", "with null for no text", "with other white space in JSON"],
)
def test_a_request_that_repeats_the_conversation_adds_its_last_messages(answer, repeated):
    before = read_request(body())
    assert added_messages(before, answer, read_request(body(messages=[*QUESTION, repeated, MORE, MORE]))) == [MORE] * 2


@pytest.mark.parametrize(
    "messages, message",
    [
        ([QUESTION[1], ANSWER, MORE], "message 0 (system) differs from the request before"),
        ([QUESTION[0], {"role": "user", "content": "1+2"}, ANSWER, MORE], "message 1 (user) differs"),
        (QUESTION[:1], "message 1 (user) is missing"),
        (QUESTION, "message 2 (assistant) is missing"),
        ([*QUESTION, MORE], "message 2 (assistant) is not the model's answer"),
        ([*QUESTION, {"role": "assistant", "content": "3"}, MORE], "message 2 (assistant) is not the model's answer"),
        ([*QUESTION, {**ANSWER, "tool_calls": [CALL]}, MORE], "message 2 (assistant) is not the model's answer"),
        ([*QUESTION, {**ANSWER, "tool_calls": ["add"]}, MORE], "message 2 (assistant) is not the model's answer"),
        ([*QUESTION, ANSWER], "adds no message after the model's answer, message 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_changes_the_conversation_is_refused_with_the_message_named(messages, message):
    with pytest.raises(RefusedRequestError) as caught:
        added_messages(read_request(body()), ANSWER, read_request(body(messages=messages)))
    assert message in str(caught.value)


def test_tools_stay_the_same():
    later = read_request(body(messages=[*QUESTION, ANSWER, MORE], tools=[ADD]))
    with pytest.raises(RefusedRequestError, match="the tools are not the tools of the first request"):
        added_messages(read_request(body()), ANSWER, later)


@pytest.mark.parametrize("answer, reason", [(ANSWER, "stop"), (CALLING, "tool_calls")], ids=["text", "a tool call"])
def test_answers_have_the_form_of_the_interface(answer, reason):
    sent = ChatCompletion.model_validate(completion(answer, model="policy"), strict=True)
    assert sent.model == "policy" and sent.choices[0].finish_reason == reason
    message = sent.choices[0].message
    assert (message.content or "") == answer["content"]
    assert [call.to_dict() for call in message.tool_calls or []] == answer.get("tool_calls", [])


@pytest.mark.parametrize("answer, reason", [(ANSWER, "stop"), (CALLING, "tool_calls")], ids=["text", "a tool call"])
def test_a_streamed_answer_is_one_piece_and_an_end(answer, reason):
    *events, last, rest = completion_events(answer, model="policy").split(b"\n\n")
    assert last == b"data: [DONE]" and rest == b""
    first, end = (ChatCompletionChunk.model_validate(json.loads(event.removeprefix(b"data: "))) for event in events)
    assert first.id == end.id and end.choices[0].finish_reason == reason
    delta = first.choices[0].delta
    assert (delta.role, delta.content or "") == ("assistant", answer["content"])
    calls = [(call.index, call.id, call.function and call.function.arguments) for call in delta.tool_calls or []]
    assert calls == ([] if answer is ANSWER else [(0, "call_1", CALL["function"]["arguments"])])
