"""The chat-completions endpoint over HTTP: who may use it, its limits, and requests that come twice or together."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from hybrid_rl.environments import endpoint as endpoint_module
from hybrid_rl.environments.endpoint import Asked, ChatConversation, Endpoint, Returned, running_endpoint
from hybrid_rl.environments.protocol import ConversationError

QUESTION = [{"role": "user", "content": "1+1"}]
ANSWER = {"role": "assistant", "content": "2"}
BODY = {"model": "policy", "messages": QUESTION}
MORE = {"model": "policy", "messages": [*QUESTION, ANSWER, {"role": "user", "content": "sure?"}]}


def with_conversation(test: Callable[[httpx.AsyncClient, ChatConversation, Endpoint], Awaitable[None]]) -> None:
    """Run a test with a client of a conversation's base URL, which sends no key of its own."""

    async def run() -> None:
        endpoint = await running_endpoint()
        conversation = endpoint.open(model="policy")
        try:
            async with httpx.AsyncClient(base_url=conversation.base_url, timeout=30, trust_env=False) as client:
                await test(client, conversation, endpoint)
        finally:
            await endpoint.stop()

    asyncio.run(run())


def key(conversation: ChatConversation) -> dict[str, str]:
    return {"Authorization": f"Bearer {conversation.api_key}"}


def post(client: httpx.AsyncClient, conversation: ChatConversation, body: Any = BODY) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post("/chat/completions", json=body, headers=key(conversation)))


def sentence(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


def test_it_listens_on_loopback_and_is_one_server_per_loop():
    async def test(client, conversation, endpoint):
        assert conversation.base_url.startswith("http://127.0.0.1:")
        assert await running_endpoint() is endpoint

    with_conversation(test)


def test_a_request_without_the_key_of_an_open_conversation_gets_401():
    async def test(client, conversation, endpoint):
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": f"Basic {conversation.api_key}"}):
            for method, path in (("POST", "/chat/completions"), ("GET", "/models"), ("GET", "/nowhere")):
                assert (await client.request(method, path, headers=headers)).status_code == 401
        endpoint.close(conversation)
        assert (await client.get("/models", headers=key(conversation))).status_code == 401

    with_conversation(test)


def test_models_are_listed_and_other_addresses_name_what_there_is():
    async def test(client, conversation, endpoint):
        models = await client.get("/models", headers=key(conversation))
        assert [model["id"] for model in models.json()["data"]] == ["policy"]
        other = await client.post("/responses", json={}, headers=key(conversation))
        assert other.status_code == 404
        assert sentence(other) == "POST /v1/responses: Not Found: agents are trained by chat completions alone"
        assert (await client.get("/chat/completions", headers=key(conversation))).status_code == 405

    with_conversation(test)


def test_requests_and_answers_alternate():
    async def test(client, conversation, endpoint):
        first = post(client, conversation)
        assert await conversation.next_event() == Asked(messages=QUESTION, tools=None)
        assert not first.done()
        conversation.answer(ANSWER)
        assert (await first).json()["choices"][0]["message"] == ANSWER
        second = post(client, conversation, MORE)
        assert await conversation.next_event() == Asked(messages=MORE["messages"][2:], tools=None)
        conversation.answer({"role": "assistant", "content": "yes"})
        assert (await second).json()["choices"][0]["message"]["content"] == "yes"
        conversation.end(0.5)
        assert await conversation.next_event() == Returned(value=0.5)

    with_conversation(test)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "the body of the request is no JSON"),
        (b"[" * 100_000, "the body of the request is no JSON"),
        (b"\xff", "the body of the request is no JSON"),
        (b"[]", "the body of the request must be a JSON object"),
        (b" " * 200_001, "the body of the request has more than 200000 bytes"),
        (json.dumps({**BODY, "n": 4}).encode(), "n = 4 is not supported"),
    ],
    ids=["cut", "deep", "no text", "no object", "large", "several answers"],
)
def test_a_refused_request_gets_400_and_ends_the_conversation_with_the_same_sentence(content, message, monkeypatch):
    monkeypatch.setattr(endpoint_module, "MAX_BODY_BYTES", 200_000)

    async def test(client, conversation, endpoint):
        refused = await client.post("/chat/completions", content=content, headers=key(conversation))
        assert refused.status_code == 400 and sentence(refused).startswith(message)
        with pytest.raises(ConversationError, match=message):
            await conversation.next_event()
        again = await post(client, conversation)
        assert again.status_code == 400 and sentence(again) == sentence(refused)

    with_conversation(test)


def test_a_body_that_does_not_arrive_in_time_is_refused(monkeypatch):
    monkeypatch.setattr(endpoint_module, "READ_TIMEOUT_S", 0.2)

    async def test(client, conversation, endpoint):
        port = int(conversation.base_url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {conversation.api_key}\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        with pytest.raises(ConversationError, match=r"took longer than 0.2 s"):
            await conversation.next_event()
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()

    with_conversation(test)


def test_two_requests_at_the_same_time_end_the_conversation_and_both_are_answered():
    async def test(client, conversation, endpoint):
        first = post(client, conversation)
        await conversation.next_event()
        second = await post(client, conversation)
        assert second.status_code == 400 and sentence(second).startswith("two requests at the same time")
        assert (await first).status_code == 400
        with pytest.raises(ConversationError, match="two requests at the same time"):
            await conversation.next_event()

    with_conversation(test)


@pytest.mark.parametrize("is_answered", [False, True], ids=["before the answer", "after the answer"])
def test_a_request_repeated_after_a_lost_connection_gets_the_answer_to_the_first(is_answered):
    async def test(client, conversation, endpoint):
        lost = post(client, conversation)
        await conversation.next_event()
        lost.cancel()
        while not conversation.is_abandoned:
            await asyncio.sleep(0.01)
        if is_answered:
            conversation.answer(ANSWER)
        again = post(client, conversation)
        if not is_answered:
            while conversation.is_abandoned:
                await asyncio.sleep(0.01)
            conversation.answer(ANSWER)
        assert (await again).json()["choices"][0]["message"] == ANSWER
        post(client, conversation, MORE)
        assert await conversation.next_event() == Asked(messages=MORE["messages"][2:], tools=None)  # nothing between

    with_conversation(test)


def test_another_request_in_place_of_one_that_was_given_up_is_refused():
    async def test(client, conversation, endpoint):
        lost = post(client, conversation)
        await conversation.next_event()
        lost.cancel()
        while not conversation.is_abandoned:
            await asyncio.sleep(0.01)
        other = await post(client, conversation, {**BODY, "messages": [{"role": "user", "content": "2+2"}]})
        assert other.status_code == 400 and "gave up waiting" in sentence(other)

    with_conversation(test)


def test_a_request_that_waits_when_its_conversation_ends_is_refused():
    async def test(client, conversation, endpoint):
        waiting = post(client, conversation)
        await conversation.next_event()
        before = time.monotonic()
        endpoint.close(conversation)
        response = await waiting
        assert response.status_code == 400 and sentence(response) == "the conversation has ended"
        assert time.monotonic() - before < 10

    with_conversation(test)


def test_ignored_settings_are_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_warned", set())

    async def test(client, conversation, endpoint):
        for number, messages in enumerate((QUESTION, MORE["messages"])):
            request = post(client, conversation, {"messages": messages, "temperature": 0, "max_tokens": 5 * number})
            await conversation.next_event()
            conversation.answer(ANSWER)
            assert (await request).status_code == 200

    with_conversation(test)
    assert [record.getMessage().split(", which")[0] for record in caplog.records] == [
        "the agent's requests set temperature, max_tokens"
    ]
