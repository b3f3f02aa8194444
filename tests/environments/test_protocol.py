"""What an environment may return, by hand."""

import math
from typing import Any

import pytest

from hybrid_rl.environments.protocol import Reset, Step, check_observation, check_reset, check_step

TOLD = [{"role": "tool", "content": "4"}]


@pytest.mark.parametrize("value", ["", "text", [], TOLD, (TOLD[0],)])
def test_an_observation_is_text_or_messages(value):
    assert check_observation(value) == (value if isinstance(value, str) else list(value))


@pytest.mark.parametrize(
    "value, message",
    [
        (None, "the observation is of type NoneType"),
        ({"role": "user", "content": ""}, "the observation is of type dict"),
        ([TOLD[0], "text"], "message 1 of the observation must be an object with role and content"),
        ([{"role": "user"}], "message 0 of the observation must be an object with role and content"),
        ([{"role": "user", "content": {1, 2}}], "the observation is no JSON"),
    ],
)
def test_another_observation_is_named(value, message):
    with pytest.raises(ValueError, match=message):
        check_observation(value)


TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    "value, reset",
    [
        (None, Reset()),
        ("text", Reset(observation="text")),
        (TOLD, Reset(observation=TOLD)),
        ({"messages": "text", "tools": (TOOL,)}, Reset(observation="text", tools=[TOOL])),
        ({"tools": [TOOL]}, Reset(tools=[TOOL])),
        ({"messages": TOLD, "tools": []}, Reset(observation=TOLD)),
        (Reset(observation="text", tools=[TOOL]), Reset(observation="text", tools=[TOOL])),
        (Reset(observation="text", is_verbatim=True), Reset(observation="text", is_verbatim=True)),
    ],
)
def test_a_reset_is_an_observation_or_messages_with_tools(value, reset):
    assert check_reset(value) == reset


@pytest.mark.parametrize(
    "value, message",
    [
        (3, "the observation is of type int"),
        ({}, r"an object with the keys \[\]: must have messages and tools alone"),
        ({"messages": "", "tool": []}, r"the keys \['messages', 'tool'\]"),
        (Reset(is_verbatim=True), "a verbatim observation is of type NoneType"),
        ({"tools": TOOL}, "tools are of type dict"),
        ({"tools": [TOOL, {"name": "add"}]}, "tool 1 must be"),
        ({"tools": [TOOL | {"strict": {1}}]}, "tools is no JSON"),
    ],
)
def test_another_reset_is_named(value: Any, message: str):
    with pytest.raises(ValueError, match=message):
        check_reset(value)


def test_a_step_is_a_tuple_or_a_step():
    step = Step(observation=TOLD, reward=0.5, done=True, info={"a": 1})
    assert check_step((TOLD, 0.5, 1, {"a": 1})) == step == check_step(step)
    assert check_step(("", 1, False, None)) == Step(observation="", reward=1.0)
    verbatim = Step(observation="<user>", is_verbatim=True)
    assert check_step(verbatim) == verbatim
    assert check_step((None, 1.0, True, {})) == Step(observation="", reward=1.0, done=True)


@pytest.mark.parametrize(
    "value, message",
    [
        ("text", r"step returned str: must return \(observation, reward, done, info\)"),
        (("", 0.0, False), "step returned tuple"),
        (("", "good", False, {}), "the reward is of type str: must be a number"),
        (("", math.inf, False, {}), "the reward is inf: must be finite"),
        ((None, 0.0, False, {}), "the observation is of type NoneType"),
        (("", 0.0, False, [1]), "info is of type list"),
        (("", 0.0, False, {"a": math.nan}), "info is no JSON"),
        (Step(observation=TOLD, is_verbatim=True), "a verbatim observation is of type list"),
    ],
)
def test_another_step_is_named(value: Any, message: str):
    with pytest.raises(ValueError, match=message):
        check_step(value)
