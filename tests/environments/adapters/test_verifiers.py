"""Environments of verifiers, whose own loops ask the model through the endpoint, as environments of conversations."""

from pathlib import Path

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.environments.protocol import Reset, Step
from tests.environments.pools import next_answer

pytest.importorskip("verifiers")

FILE = '''
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": "1+1?", "answer": "2"}])

class Asking(vf.MultiTurnEnv):
    """Asks again until the answer is right, at most max_turns times."""

    async def setup_state(self, state):
        if state["info"].get("fails"):
            raise vf.Error("no game")

    async def env_response(self, messages, state, **kwargs):
        text = messages[-1].content
        if text == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"not {text}"}]

async def is_right(completion, answer):
    return float(any(m.role == "assistant" and m.content == answer for m in completion))

async def is_short(completion):
    return 1.0

def load_environment(max_turns=3, together=False):
    rubric = vf.Rubric(funcs=[is_right, is_short], weights=[1.0, 0.5])
    if together:
        async def best(completions, answers):
            return [1.0 for _ in completions]
        rubric = vf.Rubric(funcs=[best])
    return Asking(dataset=ROWS, max_turns=max_turns, system_prompt="Add.", rubric=rubric)

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

def load_tools():
    return vf.ToolEnv(dataset=ROWS, tools=[add], max_turns=3, rubric=vf.Rubric(funcs=[is_right]))
'''
ROW = {"prompt_messages": [{"role": "user", "content": "1+1?"}], "answer": "2"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verifiers") / "asking.py"
    path.write_text(FILE)
    return path


def test_a_loop_of_several_turns_ends_with_the_reward_of_its_rubric(file):
    arguments = {"id": f"{file}:load_environment", "kwargs": {"max_turns": 4}}
    with EnvironmentPool("verifiers", arguments=arguments, timeout_s=30, num_workers=1) as pool:
        pool.reset(1, ROW)
        assert next_answer(pool).result == Reset(
            observation=[{"role": "system", "content": "Add."}, *ROW["prompt_messages"]]
        )
        pool.step(1, "3")
        assert next_answer(pool).result == Step(observation=[{"role": "user", "content": "not 3"}])
        pool.step(1, "2")
        found = next_answer(pool).result
        assert isinstance(found, Step) and found.done and found.reward == 1.5
        assert found.info == {"is_right": 1.0, "is_short": 1.0, "num_turns": 2.0}
        pool.reset(2, {**ROW, "info": {"fails": True}})
        assert str(next_answer(pool).failure).startswith(
            "the agent raises Error: no game (asking.py, line 12: raise vf.Error("
        )


def test_a_tool_environment_gives_its_tools_and_calls_them(file):
    with EnvironmentPool("verifiers", arguments={"id": f"{file}:load_tools"}, timeout_s=30, num_workers=1) as pool:
        pool.reset(1, ROW)
        found = next_answer(pool).result
        assert isinstance(found, Reset) and found.tools is not None
        assert [tool["function"]["name"] for tool in found.tools] == ["add"]
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
        pool.step(1, {"role": "assistant", "content": "", "tool_calls": [call]})
        step = next_answer(pool).result
        assert isinstance(step, Step) and not step.done
        assert [(m["role"], m["content"], m["tool_call_id"]) for m in step.observation] == [("tool", "2", "call_1")]
        pool.step(1, {"role": "assistant", "content": "2", "tool_calls": []})
        end = next_answer(pool).result
        assert isinstance(end, Step) and end.done and end.reward == 1.0


@pytest.mark.parametrize(
    "name, kwargs, message",
    [
        ("{file}:load_environment", {"together": True}, "its rubric scores several responses together"),
        ("{file}:load_environment", {"size": 1}, "loading it fails with TypeError"),
        ("{file}:other", {}, "defines no class or function 'other'"),
        ("no-such-environment", {}, "loading it fails with"),
    ],
)
def test_an_environment_that_cannot_be_used_is_named_at_the_start(file, name, kwargs, message):
    with pytest.raises(ConfigError) as caught:
        arguments = {"id": name.format(file=file), "kwargs": kwargs}
        EnvironmentPool("verifiers", arguments=arguments, timeout_s=30, num_workers=1)
    assert "environment.arguments.id = " in str(caught.value) and message in str(caught.value)
