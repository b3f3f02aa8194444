"""Agent files of OpenRLHF in worker processes in which OpenRLHF is not installed."""

from pathlib import Path

import pytest
import torch

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.adapters.openrlhf import read_info, read_number
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.environments.protocol import ConversationError, Reset, Step
from tests.environments.pools import next_answer

AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils.logging_utils import init_logger

from limits import MOST_TURNS

logger = init_logger(__name__)

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.num_turns = 0

    async def reset(self, states, **kwargs):
        self.first = states["observation"]
        return {"observation": states["observation"] + states["label"].get("hint", "")}

    async def step(self, states, **kwargs):
        self.num_turns += 1
        if states["action_text"] == "raise":
            raise LookupError("no such guess")
        if states["action_text"] == "look":
            return {"environment_feedback": "", "rewards": 0, "done": False, "environment_images": [b"image"]}
        if states["action_text"] == "nothing":
            return {"rewards": 0.0, "done": False}
        is_right = states["action_text"] == states["label"]["answer"]
        return {
            "rewards": float(is_right),
            "scores": float(is_right) / self.num_turns,
            "environment_feedback": "<user>wrong<model>" if not is_right else states["observation_text"],
            "done": is_right or self.num_turns == MOST_TURNS,
            "extra_logs": {"num_turns": self.num_turns},
            "sampling_params": states.get("sampling_params"),
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
OWN_LOOP = """
import a_package_for_generation
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        return await llm_engine.generate(prompt, sampling_params)
"""
INHERITED_LOOP = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Parent(MultiTurnAgentExecutor):
    async def execute(self, *args, **kwargs): return {}

class AgentInstance(AgentInstanceBase):
    def __init__(self): pass
    async def step(self, states): return {}

class AgentExecutor(Parent):
    def __init__(self): super().__init__(AgentInstance)
"""
BROKEN_INSTANCE = AGENT.replace("    def __init__(self, *args", "    async def __init__(self, *args")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents") / "agent_func.py"
    path.write_text(AGENT)
    (path.parent / "limits.py").write_text("MOST_TURNS = 3\n")
    return path


def test_an_agent_file_runs_as_it_is(file):
    with EnvironmentPool("openrlhf", arguments={"path": str(file)}, timeout_s=30, num_workers=1) as pool:
        pool.reset(1, {"prompt_text": "<user>2+2?<model>", "answer": {"answer": "4"}})
        assert next_answer(pool).result == Reset()  # the agent leaves the prompt as it is
        pool.step(1, "5")
        assert next_answer(pool).result == Step(
            observation="<user>wrong<model>", info={"num_turns": 1.0, "scores": 0.0}, is_verbatim=True
        )
        pool.step(1, "4")
        history = "<user>2+2?<model>5<user>wrong<model>"
        assert next_answer(pool).result == Step(
            observation=history, reward=1.0, done=True, info={"num_turns": 2.0, "scores": 0.5}, is_verbatim=True
        )


def test_an_agent_may_write_the_prompt_and_take_another_label(file):
    arguments = {"path": str(file), "label": "about"}
    with EnvironmentPool("openrlhf", arguments=arguments, timeout_s=30, num_workers=1) as pool:
        pool.reset(1, {"prompt_text": "<user>2+2?", "about": {"answer": "4", "hint": " Think."}})
        assert next_answer(pool).result == Reset(observation="<user>2+2? Think.", is_verbatim=True)
        pool.reset(2, {"prompt_text": "", "answer": ""})
        assert next_answer(pool).failure == "environment.arguments.label = about: no column of the row"


@pytest.mark.parametrize(
    "turn, failure",
    [
        ("raise", "the agent's step raises LookupError: no such guess (agent_func.py, line 20: raise LookupError("),
        ("look", "the agent's step returned environment_images: models read text only"),
        ("nothing", "the agent's step returned no text as environment_feedback"),
    ],
)
def test_a_step_that_cannot_be_used_is_named(file, turn, failure):
    with EnvironmentPool("openrlhf", arguments={"path": str(file)}, timeout_s=30, num_workers=1) as pool:
        pool.reset(1, {"prompt_text": "2+2?", "answer": {"answer": "4"}})
        assert next_answer(pool).failure is None
        pool.step(1, turn)
        assert str(next_answer(pool).failure).startswith(failure)


@pytest.mark.parametrize(
    "source, message",
    [
        (OWN_LOOP, "has an AgentExecutor that generates by itself (execute or run_agent), and here only the trainer"),
        (INHERITED_LOOP, "has an AgentExecutor that generates by itself"),
        (BROKEN_INSTANCE, "the agent raises TypeError: __init__() should return None, not 'coroutine'"),
        ("import gem\n", "fails with ModuleNotFoundError: No module named 'gem' (agent.py, line 1: import gem)"),
        ("AgentInstance = object\n", "defines no class or function 'AgentExecutor'"),
        (AGENT.replace("async def step", "def step"), "AgentInstance has no asynchronous method step"),
        (AGENT.replace("__init__(self):", "__init__(self, queue):"), "AgentExecutor() raises TypeError"),
    ],
    ids=["own loop", "inherited loop", "broken class", "missing package", "no executor", "synchronous", "arguments"],
)
def test_an_agent_file_that_cannot_run_ends_with_one_sentence_at_the_start(tmp_path, source, message):
    path = tmp_path / "agent.py"
    path.write_text(source)
    (tmp_path / "limits.py").write_text("MOST_TURNS = 3\n")
    with pytest.raises(ConfigError) as caught:
        EnvironmentPool("openrlhf", arguments={"path": str(path)}, timeout_s=30, num_workers=1)
    (sentence,) = caught.value.messages
    assert sentence.startswith("environment.arguments.path = ") and message in sentence


def test_tensors_of_one_element_are_numbers():
    logs = {"turns": torch.tensor(2), "score": torch.tensor([0.5])}
    assert read_info({"extra_logs": logs, "scores": torch.tensor([1.0])}) == {"turns": 2.0, "score": 0.5, "scores": 1.0}
    assert read_number(torch.tensor(0), "rewards") == 0.0
    for value in (torch.zeros(2), None, "one"):
        with pytest.raises(ConversationError, match="the agent's step returned no number as rewards"):
            read_number(value, "rewards")
