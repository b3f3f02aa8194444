"""Environments, tools and agents that a program gives as objects: their way into worker processes."""

import pytest

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.rewards.given import GIVEN, giving
from launch.from_python import with_environment, with_tools
from tests.conftest import change
from tests.environments.pools import next_answer

PROMPT = [{"role": "user", "content": "What is 2 + 3?"}]
ROW = {"prompt": "", "prompt_messages": PROMPT, "answer": "5"}


def make_pool(name, **arguments):
    return EnvironmentPool(name, arguments=arguments, timeout_s=30, num_workers=1)


def test_a_class_of_a_program_answers_in_another_process():
    bonus = 0.5

    class Guess:
        def __init__(self, first):
            self.first = first

        def reset(self, row):
            self.answer = row["answer"]
            return self.first

        def step(self, response):
            return "again", bonus + (response == self.answer), response == self.answer, {}

    with giving({"environment": [Guess]}) as names, make_pool(names["environment"][0], first="guess") as pool:
        assert names == {"environment": ["given:Guess"]}
        pool.reset(0, ROW)
        assert next_answer(pool).result.observation == "guess"
        pool.step(0, "4")
        assert (first := next_answer(pool).result).reward == 0.5 and not first.done
        pool.step(0, "5")
        assert (second := next_answer(pool).result).reward == 1.5 and second.done
    assert not GIVEN


def test_a_function_of_a_program_is_a_tool():
    def add(a: int, b: int) -> int:
        """Add two whole numbers."""
        return a + b

    with giving({"tools": [add]}) as names, make_pool("tools", tools=names["tools"]) as pool:
        pool.reset(0, ROW)
        (schema,) = next_answer(pool).result.tools
        assert schema["function"]["name"] == "add"
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
        pool.step(0, {"role": "assistant", "content": "", "tool_calls": [call]})
        (message,) = next_answer(pool).result.observation
        assert message["content"] == "5"


def test_a_function_of_a_program_is_an_agent():
    async def solve(client, model, row):
        messages = [{"role": "user", "content": "2 + 3?"}]
        answer = await client.chat.completions.create(model=model, messages=messages)
        return float(answer.choices[0].message.content == row["answer"])

    with giving({"environment": [solve]}) as names:
        config = with_environment(Config(), names["environment"][0], is_agent=True)
        assert config.environment.name == "chat_agent"
        with make_pool(config.environment.name, **config.environment.arguments) as pool:
            pool.reset(0, ROW)
            assert next_answer(pool).result.observation == [{"role": "user", "content": "2 + 3?"}]
            pool.step(0, "5")
            assert next_answer(pool).result.reward == 1


def test_what_a_program_gives_is_added_to_the_settings():
    config = change(Config(), {"environment.tools": ["tools.py:add"], "environment.max_turns": 3})
    assert with_tools(config, ["given:multiply"]).environment.tools == ["tools.py:add", "given:multiply"]
    found = with_environment(config, "given:Guess", is_agent=False).environment
    assert (found.name, found.max_turns) == ("given:Guess", 3)
    with pytest.raises(ConfigError, match=r"environment\.name and environment both give an environment"):
        with_environment(change(config, {"environment.name": "a.py:A"}), "given:Guess", is_agent=False)


def test_objects_that_cannot_be_used_are_refused():
    class Guess:
        def reset(self, row):
            return ""

    with giving({"environment": [Guess]}) as names, pytest.raises(ConfigError, match="'Guess' has no method step"):
        make_pool(names["environment"][0])
    with pytest.raises(ConfigError, match=r"environment\.name: 'given:Guess' is a function or class that hybrid_rl"):
        make_pool("given:Guess")
    twice = pytest.raises(ConfigError, match="tools and environment: two are called Guess; give each a __name__")
    with twice, giving({"tools": [Guess], "environment": [Guess]}):
        pass
    with pytest.raises(ConfigError, match=r"tools: 3 is not a function or class$"), giving({"tools": [3]}):
        pass
