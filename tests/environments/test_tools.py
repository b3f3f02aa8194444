"""Conversations with tools: schemas of Python functions, the answers to calls, and the end of a conversation."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.function_tools import load_function, make_tool
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.environments.protocol import Reset, Step
from hybrid_rl.environments.tools import ToolEnvironment, cut

FILE = '''
import asyncio
import os
import time

calls = []

def add(a: int, b: int = 1) -> int:
    """Add two whole numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    calls.append("add")
    return a + b

def count() -> int:
    """Return how many sums there have been."""
    return len(calls)

def hang() -> str:
    """Take a minute."""
    time.sleep(60)

def pid() -> int:
    """Return the number of the process."""
    return os.getpid()

async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited"
'''
PROMPT = [{"role": "user", "content": "What is 2 + 3?"}]


def add(a: int, b: int = 1) -> int:
    """Add two whole numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def order(item: Literal["tea", "cake"], note: str | None = None, sizes: list[int] | None = None) -> dict:
    """Order something.

    It is brought to the table.

    Args:
        item: What to order.
        note: For the kitchen.
        sizes: Of the parts.
    """
    return {"item": item, "note": note, "price": 2.5}


@dataclass
class Entry:
    x: int
    title: str


def file_away(title: str, model_config: date, json: Entry) -> str:
    """File something away."""
    return f"{title} {model_config.year} {json.x}"


def shout(text: str) -> str:
    """Repeat a text.

    Args:
        text: What to repeat.
    """
    return text * 3


def fail() -> None:
    """Fail."""
    raise LookupError("nothing there")


def leave() -> None:
    """Leave the program."""
    raise SystemExit(3)


def call(name: str, arguments: str | dict[str, Any], number: int = 0) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": text}}


def turn(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def started(tools: list[Any], **arguments: Any) -> ToolEnvironment:
    environment = ToolEnvironment(tools, **arguments)
    environment.reset({"prompt_messages": PROMPT})
    return environment


def answer(tools: list[Any], *calls: dict[str, Any], **arguments: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the texts that answer the calls of a first turn, and its info."""
    step = started(tools, **arguments).step(turn(*calls))
    assert isinstance(step, Step) and not step.done and step.reward == 0.0
    assert isinstance(step.observation, list) and all(message["role"] == "tool" for message in step.observation)
    return [message["content"] for message in step.observation], step.info


def test_schema_has_types_descriptions_and_defaults_of_the_function():
    assert make_tool(order, "order").schema == {
        "type": "function",
        "function": {
            "name": "order",
            "description": "Order something.\nIt is brought to the table.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "enum": ["tea", "cake"], "description": "What to order."},
                    "note": {
                        "anyOf": [{"type": "string"}, {"type": "null"}],
                        "default": None,
                        "description": "For the kitchen.",
                    },
                    "sizes": {
                        "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}],
                        "default": None,
                        "description": "Of the parts.",
                    },
                },
                "required": ["item"],
            },
        },
    }


def test_a_tool_without_parameters_has_an_empty_schema():
    assert make_tool(fail, "fail").schema["function"]["parameters"] == {"type": "object", "properties": {}}


def test_parameters_may_have_any_name_and_types_of_their_own():
    tool = make_tool(file_away, "file_away")
    properties = tool.schema["function"]["parameters"]["properties"]
    assert list(properties) == ["title", "model_config", "json"] and properties["title"] == {"type": "string"}
    text, _ = answer(
        [file_away], call("file_away", {"title": "a", "model_config": "2026-05-01", "json": {"x": 1, "title": "t"}})
    )
    assert text == ["a 2026 1"]


def test_reset_gives_the_prompt_of_the_row_and_the_schemas():
    reset = ToolEnvironment([add]).reset({"prompt_messages": PROMPT, "answer": "5"})
    assert reset == Reset(observation=PROMPT, tools=[load_function(add).schema])


def test_calls_of_a_turn_are_answered_in_their_order():
    step = started([add, shout]).step(turn(call("add", {"a": 2, "b": 3}, 1), call("shout", {"text": "ho"}, 2)))
    assert step == Step(
        observation=[
            {"role": "tool", "tool_call_id": "call1", "name": "add", "content": "5"},
            {"role": "tool", "tool_call_id": "call2", "name": "shout", "content": "hohoho"},
        ],
        info={"num_tool_calls": 2, "num_failed_tool_calls": 0},
    )


def test_results_that_are_no_text_are_json():
    (text,), _ = answer([order], call("order", {"item": "tea", "note": None}))
    assert json.loads(text) == {"item": "tea", "note": None, "price": 2.5}


@pytest.mark.parametrize(
    "made, message",
    [
        (call("subtract", {"a": 1}), "error: there is no tool subtract; the tools are: add, fail, leave, order"),
        (call("add", {"b": 1}), "error: wrong arguments: a: Field required"),
        (call("add", {"a": "1"}), "error: wrong arguments: a: Input should be a valid integer"),
        (call("add", {"a": 1.0}), "error: wrong arguments: a: Input should be a valid integer"),
        (call("add", {"a": True}), "error: wrong arguments: a: Input should be a valid integer"),
        (call("add", {"a": 1, "c": 2}), "error: wrong arguments: c: Extra inputs are not permitted"),
        (call("order", {"item": "beer"}), "error: wrong arguments: item: Input should be 'tea' or 'cake'"),
        (
            call("order", {"item": "tea", "sizes": [1, "x"]}),
            "error: wrong arguments: sizes.1: Input should be a valid integer",
        ),
        (call("add", '{"a": 1'), "error: the arguments are not JSON: Expecting ',' delimiter: line 1 column 8"),
        (call("add", "[1, 2]"), "error: the arguments must be a JSON object with the names of the parameters"),
        (call("", '{"name": "add'), "error: the arguments are not JSON: "),
        (call("", '{"tool": "add"}'), "error: the call has no name, or is written in another way than calls are"),
        (call("", "add(a=1)"), "error: the call has no name, or is written in another way than calls are"),
        (call("fail", {}), "error: LookupError: nothing there"),
        (call("leave", ""), "error: SystemExit: 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_failed_call_is_answered_with_its_reason_and_counted(made, message):
    texts, info = answer([add, fail, leave, order], made, call("add", {"a": 1}))
    assert texts[0].startswith(message) and texts[1] == "2"
    assert info == {"num_tool_calls": 2, "num_failed_tool_calls": 1}


def test_a_long_result_is_cut_where_a_mark_shows_it():
    assert cut("abcdef", 6) == "abcdef"
    (text,), _ = answer([shout], call("shout", {"text": "abcd"}), max_result_chars=5)
    assert text == "abcda\n[cut after 5 of 12 characters]"


def test_the_reason_of_a_failed_call_is_cut_too():
    (text,), _ = answer([add], call("x" * 100, {}), max_result_chars=20)
    assert text.startswith("error: there is no t\n[cut after 20 of ")


def half() -> str:
    """Return half of a surrogate pair."""
    return "a\ud83d"


def test_half_of_a_surrogate_pair_is_replaced():
    assert answer([half], call("half", {}))[0] == ["a?"]


def test_a_turn_without_a_call_ends_the_conversation_without_a_reward():
    step = started([add]).step(turn(content="It is 5."))
    assert step == Step(observation="", done=True, info={"num_tool_calls": 0, "num_failed_tool_calls": 0})


class Judged(ToolEnvironment):
    tools = (add,)

    def finish(self, messages):
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
        return float(messages[-1]["content"] == self.row["answer"])


class JudgedLater(ToolEnvironment):
    tools = (add,)

    async def finish(self, messages):
        await asyncio.sleep(0)
        return float(messages[-1]["content"] == self.row["answer"])


@pytest.mark.parametrize("text, reward", [("5", 1.0), ("6", 0.0)])
def test_a_subclass_gives_the_reward_at_the_end(text, reward):
    environment = Judged()
    environment.reset({"prompt_messages": PROMPT, "answer": "5"})
    environment.step(turn(call("add", {"a": 2, "b": 3})))
    assert environment.step(turn(content=text)) == Step(
        observation="", reward=reward, done=True, info={"num_tool_calls": 0, "num_failed_tool_calls": 0}
    )


def test_a_reward_may_be_asynchronous():
    assert JudgedLater.prepare() is True and Judged.prepare() is False
    environment = JudgedLater()
    environment.reset({"prompt_messages": PROMPT, "answer": "5"})
    assert asyncio.run(environment.step(turn(content="5"))).reward == 1.0


def no_hint(a) -> int:
    """Return it."""
    return a


def no_docstring(a: int) -> int:
    return a


def many(*numbers: int) -> int:
    """Add numbers."""
    return sum(numbers)


def of_environment(environment: ToolEnvironment) -> None:
    """Do something."""


@pytest.mark.parametrize(
    "function, reason",
    [
        (no_hint, "its parameter a has no type hint"),
        (no_docstring, "has no docstring"),
        (many, "its parameter numbers cannot be given by name"),
        (of_environment, "the types of its parameters must be types that JSON can express"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_function_that_is_no_tool_is_refused_by_name(function, reason):
    with pytest.raises(ConfigError) as error:
        ToolEnvironment.prepare([function])
    (message,) = error.value.messages
    assert message.startswith(f"environment.tools: {function.__name__}: ") and reason in message


def test_tools_of_one_name_no_tools_and_wrong_limits_are_refused(tmp_path):
    path = tmp_path / "sums.py"
    path.write_text(FILE)
    with pytest.raises(ConfigError, match="2 tools have the name add"):
        ToolEnvironment.prepare([add, f"{path}:add"])
    with pytest.raises(ConfigError, match=r"environment\.tools: is empty"):
        ToolEnvironment.prepare([])
    with pytest.raises(ConfigError, match="max_result_chars = 0: must be a whole number above 0"):
        ToolEnvironment.prepare([add], max_result_chars=0)
    with pytest.raises(ConfigError, match="call_timeout_s = -1: must be a number of seconds above 0, or null"):
        ToolEnvironment.prepare([add], call_timeout_s=-1)


def test_workers_with_functions_as_tools_import_neither_torch_nor_mcp():
    program = (
        "import sys\n"
        "from hybrid_rl.environments.tools import ToolEnvironment\n"
        "def f(a: int):\n"
        "    'Do it.'\n"
        "ToolEnvironment.prepare([f])\n"
        "assert not {'torch', 'transformers', 'mcp'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "sums.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def pool(file: Path) -> Iterator[EnvironmentPool]:
    tools = [f"{file}:{name}" for name in ("add", "count", "hang", "pid")]
    with EnvironmentPool("tools", arguments={"tools": tools}, timeout_s=2.0, num_workers=1) as pool:
        yield pool


def received(pool: EnvironmentPool, number: int = 1) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        found += pool.receive(30.0)
    return sorted(found, key=lambda answer: answer.key)


def test_tools_of_a_file_run_in_a_worker_and_share_the_module(pool):
    pool.reset(1, {"prompt_messages": PROMPT})
    (reset,) = received(pool)
    assert reset.result.observation == PROMPT
    assert [tool["function"]["name"] for tool in reset.result.tools] == ["add", "count", "hang", "pid"]
    pool.step(1, turn(call("add", {"a": 2, "b": 3}), call("count", {}), call("pid", {})))
    (step,) = received(pool)
    total, number, pid = (message["content"] for message in step.result.observation)
    assert (total, number) == ("5", "1") and int(pid) not in (0, os.getpid())
    pool.end(1)


@pytest.mark.last_in_file
def test_a_tool_that_hangs_costs_its_limit_and_the_next_conversation_goes_on(pool):
    pool.reset(2, {"prompt_messages": PROMPT})
    received(pool)
    pool.step(2, turn(call("hang", {})))
    (lost,) = received(pool)
    assert lost.failure == "took longer than environment.timeout_s = 2" and not lost.is_lost
    pool.reset(3, {"prompt_messages": PROMPT})
    assert received(pool)[0].failure is None
    pool.end(3)


def test_asynchronous_tools_of_several_conversations_run_at_the_same_time(file):
    arguments = {"tools": [f"{file}:wait", f"{file}:add"], "call_timeout_s": 1.0}
    with EnvironmentPool("tools", arguments=arguments, timeout_s=20.0, num_workers=1) as pool:
        for key in range(8):
            pool.reset(key, {"prompt_messages": PROMPT})
        received(pool, 8)
        for key in range(8):
            pool.step(key, turn(call("wait", {"seconds": 60.0 if key == 7 else 0.2}), call("add", {"a": key})))
        texts = [[m["content"] for m in answer.result.observation] for answer in received(pool, 8)]
    assert texts[:7] == [["waited", str(key + 1)] for key in range(7)]
    assert texts[7] == ["error: the call took longer than 1 s", "8"]
