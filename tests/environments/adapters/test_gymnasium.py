"""Gymnasium environments, registered and of the user, as environments of conversations."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.environments.protocol import Reset, Step
from tests.environments.pools import next_answer

FILE = '''
import gymnasium
from gymnasium.spaces import Text

class Echo(gymnasium.Env):
    """Text in, text out: it ends with a turn of three letters, and fails at "raise"."""
    observation_space = Text(100)
    action_space = Text(5)

    def __init__(self, prefix="seen "):
        self.prefix = prefix

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"{self.prefix}{seed} {options}", {}

    def step(self, action):
        if action == "raise":
            raise LookupError("no such action")
        return self.prefix + action, len(action), len(action) == 3, False, {"length": len(action), "text": action}

NAMES = ["left", "down", "right", "up"]

def to_text(observation):
    return f"You are in field {observation}."

def to_action(response):
    return NAMES.index(response.strip())  # ValueError for another word
'''
ROW = {"seed": 3, "prompt_messages": [{"role": "user", "content": "Walk."}]}
LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "opening": "{prompt} {observation}"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gymnasium") / "world.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def lake(file: Path) -> Iterator[EnvironmentPool]:
    functions = {"to_text": f"{file}:to_text", "to_action": f"{file}:to_action"}
    arguments = {**LAKE, **functions, "invalid": "Which way?", "invalid_reward": -0.5}
    with EnvironmentPool("gymnasium", arguments=arguments, timeout_s=30, num_workers=1) as pool:
        yield pool


def steps(pool: EnvironmentPool, *turns: str) -> list[Step]:
    """Return the answers to the turns of one conversation."""
    found = []
    for turn in turns:
        pool.step(1, turn)
        result = next_answer(pool).result
        assert isinstance(result, Step)
        found.append(result)
    return found


def test_a_registered_environment_is_walked_in_words(lake):
    lake.reset(1, ROW)
    assert next_answer(lake).result == Reset(observation="Walk. You are in field 0.")
    found = steps(lake, "down", "down", "right", "right", "down", "right")
    assert [step.observation for step in found] == [f"You are in field {n}." for n in (4, 8, 9, 10, 14, 15)]
    assert [step.reward for step in found] == [0, 0, 0, 0, 0, 1] and [step.done for step in found] == [False] * 5 + [
        True
    ]


def test_a_turn_without_an_action_does_not_reach_the_environment(lake):
    lake.reset(1, ROW)
    next_answer(lake)
    (invalid, valid) = steps(lake, "I think", "down")
    assert invalid == Step(observation="Which way?", reward=-0.5, info={"invalid_actions": 1})
    assert valid.observation == "You are in field 4." and valid.info == {"invalid_actions": 0, "prob": 1.0}


def test_a_class_of_a_file_with_text_gets_turns_as_they_are(file):
    arguments = {"id": f"{file}:Echo", "kwargs": {"prefix": "heard "}}
    with EnvironmentPool("gymnasium", arguments=arguments, timeout_s=30, num_workers=1) as pool:
        pool.reset(1, {**ROW, "options": {"size": 2}})
        assert next_answer(pool).result == Reset(observation="heard 3 {'size': 2}")
        found = steps(pool, "ab", "abcdef", "abc")  # the second is longer than the space allows
        assert [step.observation for step in found] == ["heard ab", "That is not a valid action.", "heard abc"]
        assert [step.reward for step in found] == [2, 0, 3] and [step.done for step in found] == [False, False, True]
        assert found[0].info == {"invalid_actions": 0, "length": 2}
        pool.step(1, "raise")
        failure = 'step of the environment raises LookupError: no such action (world.py, line 19: raise LookupError("no'
        assert str(next_answer(pool).failure).startswith(failure)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"id": "FrozenLake-v1"}, "environment.arguments.to_text is missing: FrozenLake-v1 has Discrete(16)"),
        (
            {"id": "NoLake-v1"},
            "environment.arguments.id = NoLake-v1: making the environment NoLake-v1 raises NameNotFound",
        ),
        ({"id": "{file}:Echo", "to_text": "{file}:words"}, "environment.arguments.to_text = {file}:words"),
        ({"id": "{file}:Echo", "opening": "{{rules}}"}, "environment.arguments.opening = {{rules}}: must be text with"),
        ({"id": "{file}:Echo", "size": 3}, "'GymnasiumEnvironment' takes others"),
    ],
    ids=["no text", "no name", "no function", "opening", "argument"],
)
def test_an_environment_that_cannot_be_used_is_named_at_the_start(file, arguments, message):
    named = {key: value.format(file=file) if isinstance(value, str) else value for key, value in arguments.items()}
    with pytest.raises(ConfigError) as caught:
        EnvironmentPool("gymnasium", arguments=named, timeout_s=30, num_workers=1)
    assert message.format(file=file) in str(caught.value)
