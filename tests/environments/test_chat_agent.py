"""Agents written against the OpenAI client as environments: the test plays the trainer, and the agents are real."""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.adapters.chat_agent import ChatAgent, load_agent, read_result
from hybrid_rl.environments.endpoint import running_endpoint
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.environments.process import Answer
from hybrid_rl.environments.protocol import ConversationError, Message, Reset, Step

FILE = """
import asyncio
import json
import os
import subprocess
import sys
import time

import openai

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def ask(row):
    return [{"role": "user", "content": row["question"]}]


async def by_client(client, model, row):
    assert [listed.id async for listed in client.models.list()] == [model]
    messages = ask(row)
    for _ in range(2):
        answer = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
        messages += [answer, {"role": "user", "content": "sure?"}]
    return {"reward": float(answer.content == row["answer"]), "info": {"text": answer.content}}


def by_synchronous_client(client, model, row):
    assert [listed.id for listed in client.models.list()] == [model]
    messages = ask(row)
    for _ in range(2):
        answer = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "sure?"}]
    return {"reward": float(answer == row["answer"]), "info": {"text": answer}}


async def by_address(base_url, api_key, row):
    return await by_client(openai.AsyncOpenAI(base_url=base_url, api_key=api_key), "policy", row)


def by_everything(**given):
    with openai.OpenAI(base_url=given["base_url"], api_key=given["api_key"]) as client:
        return by_synchronous_client(client, given["model"], given["row"])


def by_streams(client, model, row):
    messages = ask(row)
    for _ in range(2):
        chunks = client.chat.completions.create(model=model, messages=messages, stream=True)
        answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "sure?"}]
    return {"reward": float(answer == row["answer"]), "info": {"text": answer}}


def by_program(base_url, api_key, row):
    own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    program = [sys.executable, "-c", PROGRAM, row["question"]]
    done = subprocess.run(program, env={**os.environ, **own}, capture_output=True, text=True, check=True)
    return float(done.stdout.strip() == row["answer"])


PROGRAM = (
    "import sys; from openai import OpenAI; messages = [dict(role='user', content=sys.argv[1])]; "
    "print(OpenAI().chat.completions.create(model='gpt', messages=messages).choices[0].message.content)"
)


def with_tools(client, model, row):
    messages = ask(row)
    while True:
        choice = client.chat.completions.create(model=model, messages=messages, tools=[ADD]).choices[0]
        messages.append(choice.message.model_dump())
        if choice.finish_reason != "tool_calls":
            return float(choice.message.content == row["answer"])
        for call in choice.message.tool_calls:
            found = str(sum(json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


def with_arguments(client, model, row, greeting, *, times=1):
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": greeting * times}])


def never_asks(client, row):
    return 1.0


def raises(client, row):
    raise LookupError(row["question"])


async def exits(client, row):
    sys.exit(3)


def raises_later(client, model, row):
    client.chat.completions.create(model=model, messages=ask(row))
    return {}["nothing"]


def returns_text(client, model, row):
    return client.chat.completions.create(model=model, messages=ask(row)).choices[0].message.content


async def asks_twice_at_once(client, model, row):
    requests = [client.chat.completions.create(model=model, messages=ask(row)) for _ in range(2)]
    return len(await asyncio.gather(*requests, return_exceptions=True))


def forgets(client, model, row):
    client.chat.completions.create(model=model, messages=ask(row))
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "another question"}])
    except openai.BadRequestError as error:
        ended.append(str(error))
    return 1.0


async def blocks(client, model, row):
    await client.chat.completions.create(model=model, messages=ask(row))
    time.sleep(60 if row["question"] == "hang" else 0.1)
    return 1.0


ended = []


async def says_when_cancelled(client, model, row):
    try:
        await client.chat.completions.create(model=model, messages=ask(row))
    except asyncio.CancelledError:
        ended.append("cancelled")
        raise


def says_when_refused(client, model, row):
    try:
        client.chat.completions.create(model=model, messages=ask(row))
    except openai.APIStatusError as error:
        ended.append(error.body["message"])


async def modules(client, model, row):
    await client.chat.completions.create(model=model, messages=ask(row))
    return {"info": {name: name in sys.modules for name in ("torch", "vllm", "transformers", "openai")}}


async def by_row(client, model, row):
    return await globals()[row["agent"]](client, model, row)


async def raises_at_once(client, model, row):
    raise LookupError(row["question"])


def blind(row):
    return 1.0


def strange(client, task):
    return 1.0
"""
ROW = {"question": "1+1", "answer": "2"}
SURE = [{"role": "user", "content": "sure?"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents") / "agents_of_test_chat_agent.py"
    path.write_text(FILE)
    return path


def play(agent: str, answers: Sequence[str | Message], row: dict[str, Any] = ROW, **arguments: Any) -> list[Any]:
    """Return what the environment of an agent returns for a row and the model's answers."""

    async def run() -> list[Any]:
        environment = ChatAgent(agent, **arguments)
        try:
            return [await environment.reset(row), *[await environment.step(answer) for answer in answers]]
        finally:
            await environment.close()
            await (await running_endpoint()).stop()

    return asyncio.run(asyncio.wait_for(run(), 60))


def ended_agents(file: Path, agent: str) -> list[str]:
    return load_agent(f"{file}:{agent}", ()).function.__globals__["ended"]


@pytest.mark.parametrize("agent", ["by_client", "by_synchronous_client", "by_address", "by_everything", "by_streams"])
def test_an_agent_is_a_conversation_whose_return_value_is_the_reward(file, agent):
    opening, first, last = play(f"{file}:{agent}", ["3", " 2"], row={**ROW, "answer": " 2"})
    assert opening == {"messages": [{"role": "user", "content": "1+1"}], "tools": None}
    assert first == Step(observation=SURE)
    assert last == Step(observation="", reward=1.0, done=True, info={"text": " 2"})


def test_the_agent_of_the_page_on_agents_is_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / "agent_of_the_page.py").write_text(source)
    opening, first, last = play(f"{tmp_path}/agent_of_the_page.py:solve", ["3", "2"])
    assert opening["messages"] == [{"role": "user", "content": "1+1"}]
    assert first == Step(observation=[{"role": "user", "content": "That is wrong. Try again."}])
    assert last == Step(observation="", reward=1.0, done=True)


def test_an_agent_may_start_a_program_that_reads_the_variables_of_the_client(file):
    opening, last = play(f"{file}:by_program", ["2"])
    assert opening["messages"] == [{"role": "user", "content": "1+1"}]
    assert last == Step(observation="", reward=1.0, done=True)


def test_an_agent_calls_its_own_tools(file):
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "add", "arguments": f"[1, {n}]"}} for n in (1, 2)
    ]
    opening, first, last = play(
        f"{file}:with_tools",
        [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "assistant", "content": "2"}],
    )
    assert opening["tools"][0]["function"]["name"] == "add"
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "name": "add", "content": str(1 + n)} for n in (1, 2)]
    assert first == Step(observation=results, info={"num_tool_calls": 2, "num_failed_tool_calls": 0})
    assert last == Step(observation="", reward=1.0, done=True, info={"num_tool_calls": 0, "num_failed_tool_calls": 0})


def test_a_call_that_cannot_be_read_is_text_for_the_agent_and_counted(file):
    unread = {"id": "call_1", "type": "function", "function": {"name": "", "arguments": "{add 1"}}
    _, last = play(
        f"{file}:with_tools",
        [{"role": "assistant", "content": "So:", "tool_calls": [unread]}],
        {**ROW, "answer": "So:\n{add 1"},
    )
    assert last == Step(observation="", reward=1.0, done=True, info={"num_tool_calls": 1, "num_failed_tool_calls": 1})


def test_an_agent_gets_the_further_arguments_and_may_give_no_reward(file):
    arguments = {"greeting": "hello", "times": 2}
    opening, last = play(f"{file}:with_arguments", ["hi"], arguments=arguments)
    assert opening["messages"][0]["content"] == "hellohello"
    assert last == Step(observation="", done=True)


@pytest.mark.parametrize(
    "agent, answers, message",
    [
        ("never_asks", [], "the agent returned before its first request to the model"),
        ("raises", [], "the agent raises LookupError: 1+1 (agents_of_test_chat_agent.py, line "),
        ("exits", [], "the agent raises SystemExit: 3"),
        ("raises_later", ["2"], "the agent raises KeyError: 'nothing'"),
        ("returns_text", ["2"], "the agent returned str: must return a number, None, or an object"),
        ("forgets", ["2"], "message 0 (user) differs from the request before"),
    ],
)
def test_an_agent_that_fails_ends_its_conversation_with_the_reason(file, agent, answers, message):
    with pytest.raises(ConversationError) as caught:
        play(f"{file}:{agent}", answers)
    assert str(caught.value).startswith(message)


def test_an_agent_that_asks_twice_at_once_fails(file):
    # The second request may arrive after the first one has its answer.
    with pytest.raises(ConversationError, match=r"two requests at the same time|message 1 \(assistant\) is missing"):
        play(f"{file}:asks_twice_at_once", ["2"])


def test_an_agent_cannot_go_on_after_a_refused_request(file):
    with pytest.raises(ConversationError, match="message 0"):
        play(f"{file}:forgets", ["2"])
    assert "Error code: 400" in ended_agents(file, "forgets")[-1]


@pytest.mark.parametrize(
    "agent, event", [("says_when_cancelled", "cancelled"), ("says_when_refused", "the conversation has ended")]
)
def test_the_agent_of_a_conversation_that_is_closed_ends(file, agent, event):
    ended = ended_agents(file, agent)
    ended.clear()
    play(f"{file}:{agent}", [])
    end = time.monotonic() + 30
    while not ended and time.monotonic() < end:
        time.sleep(0.01)
    assert ended == [event]


def test_an_agent_that_blocks_its_thread_delays_no_other(file):
    async def run() -> None:
        names = [f"{file}:blocks", *[f"{file}:returns_text"] * 8]
        environments = [ChatAgent(name) for name in names]
        await asyncio.gather(*(environment.reset({"question": "hang"}) for environment in environments))
        blocked = asyncio.create_task(environments[0].step("2"))
        await asyncio.sleep(0.2)
        others = [environment.step("text") for environment in environments[1:]]
        ends = await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 30)
        assert all("returned str" in str(end) for end in ends)
        assert not blocked.done()
        blocked.cancel()
        await asyncio.gather(*(environment.close() for environment in environments))
        await (await running_endpoint()).stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    "agent, arguments, message",
    [
        ("blind", {}, "it takes neither client nor base_url, without which it cannot reach the model"),
        (
            "strange",
            {},
            "nothing is given for its parameter task: an agent takes base_url, api_key, model, row, client",
        ),
        ("with_arguments", {}, "nothing is given for its parameter greeting"),
        ("with_arguments", {"greeting": "", "name": ""}, "the agent does not take name from there"),
        ("by_client", {"model": "other"}, "the agent does not take model from there"),
        ("nothing", {}, "defines no class or function 'nothing'"),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused_at_the_start(file, agent, arguments, message):
    with pytest.raises(ConfigError) as caught:
        ChatAgent.prepare(f"{file}:{agent}", arguments=arguments)
    assert message in str(caught.value) and str(caught.value).startswith("environment.arguments.")


@pytest.mark.parametrize(
    "value, result",
    [
        (None, (0.0, {})),
        (True, (1.0, {})),
        (-2, (-2.0, {})),
        ({"reward": 0.5, "info": {"steps": 3}}, (0.5, {"steps": 3})),
        ({"info": None}, (0.0, {})),
    ],
)
def test_an_agent_returns_a_reward_with_further_values_or_nothing(value, result):
    assert read_result(value) == result


@pytest.mark.parametrize(
    "value, shown",
    [
        ("1.0", "str"),
        ([1.0], "list"),
        ({"score": 1.0}, "an object with score"),
        ({"reward": "1"}, "an object with reward"),
    ],
    ids=["text", "a list", "another key", "text as the reward"],
)
def test_other_values_are_no_reward(value, shown):
    with pytest.raises(ConversationError, match=f"the agent returned {shown}: must return a number"):
        read_result(value)


def answers_of(pool: EnvironmentPool, number: int) -> dict[int, Answer]:
    found, end = list[Answer](), time.monotonic() + 60
    while len(found) < number:
        assert time.monotonic() < end, found
        found += pool.receive(1.0)
    return {answer.key: answer for answer in found}


@pytest.fixture(scope="module")
def pool(file: Path) -> Iterator[EnvironmentPool]:
    arguments = {"agent": f"{file}:by_row"}
    with EnvironmentPool("chat_agent", arguments=arguments, timeout_s=30, num_workers=1) as started:
        yield started


def test_agents_of_many_conversations_share_a_process(pool):
    for key in range(16):
        answer = "even" if key % 2 == 0 else "odd"
        pool.reset(key, {"agent": "by_client", "question": str(key), "answer": answer})
    openings = answers_of(pool, 16)
    assert {key: answer.result for key, answer in openings.items()} == {
        key: Reset(observation=[{"role": "user", "content": str(key)}]) for key in range(16)
    }
    for key in range(16):
        pool.step(key, "?")
    assert all(answer.result == Step(observation=SURE) for answer in answers_of(pool, 16).values())
    for key in range(16):
        pool.step(key, "even")
    ends = answers_of(pool, 16)
    assert {key: answer.result for key, answer in ends.items()} == {
        key: Step(observation="", reward=float(key % 2 == 0), done=True, info={"text": "even"}) for key in range(16)
    }
    assert len(pool.process_ids) == 1


def test_an_agent_that_hangs_costs_its_limit_and_no_other_conversation(file):
    arguments = {"agent": f"{file}:blocks"}
    with EnvironmentPool("chat_agent", arguments=arguments, timeout_s=3, num_workers=1) as pool:
        pool.reset(0, {"question": "hang"})
        pool.reset(1, {"question": "1+1"})
        answers_of(pool, 2)
        pool.step(0, "2")
        pool.step(1, "2")
        assert answers_of(pool, 1)[1].result == Step(observation="", reward=1.0, done=True)
        hanging = answers_of(pool, 1)[0]
        assert hanging.failure == "took longer than environment.timeout_s = 3" and not hanging.is_lost
        assert pool.num_lost_processes == 0


def test_a_process_of_agents_imports_no_library_of_the_trainer(pool):
    pool.reset(0, {"agent": "modules", "question": "1+1"})
    assert answers_of(pool, 1)[0].failure is None
    pool.step(0, "2")
    imported = answers_of(pool, 1)[0].result.info
    assert imported == {"torch": False, "vllm": False, "transformers": False, "openai": True}


def test_a_failing_agent_is_an_answer_with_the_line_of_the_user(pool):
    pool.reset(0, {"agent": "raises_at_once", "question": "1+1"})
    failure = str(answers_of(pool, 1)[0].failure)
    assert failure.startswith("the agent raises LookupError: 1+1 (agents_of_test_chat_agent.py, line ")
    assert failure.endswith('raise LookupError(row["question"]))')
