"""What a run passes on to vLLM and DeepSpeed contradicts no setting."""

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.settings.passed_on import DEEPSPEED, VLLM
from hybrid_rl.settings.types import section_types, setting_types
from hybrid_rl.validate import validate
from tests.conftest import VALID_CONFIG, change


@pytest.mark.parametrize("key", list(VLLM))
def test_an_engine_argument_that_a_setting_decides_is_refused(key):
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, {"rollout.vllm": {key: 1, "block_size": 32}}))
    assert error.value.messages == (f"rollout.vllm.{key} = 1: cannot be given here; {VLLM[key]}",)


@pytest.mark.parametrize("key", list(DEEPSPEED))
def test_a_key_of_deepspeed_that_a_setting_decides_is_refused_at_its_depth(key):
    outer, _, inner = key.partition(".")
    given = {outer: {inner: 1, "overlap_comm": False}} if inner else {outer: 1}
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, {"update.deepspeed": given}))
    assert error.value.messages == (f"update.deepspeed.{key} = 1: cannot be given here; {DEEPSPEED[key]}",)


def test_several_keys_are_reported_together_and_a_value_that_is_no_section_is_left_to_deepspeed():
    both = {"rollout.vllm": {"seed": 1, "dtype": "half"}, "update.deepspeed": {"bf16": {"enabled": False}}}
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, both))
    assert [message.split(" = ")[0] for message in error.value.messages] == [
        "rollout.vllm.dtype",
        "rollout.vllm.seed",
        "update.deepspeed.bf16",
    ]
    config = change(VALID_CONFIG, {"update.deepspeed": {"zero_optimization": True}})
    assert validate(config) is config


def test_other_keys_are_allowed():
    config = change(VALID_CONFIG, {"rollout.vllm": {"block_size": 32}, "update.deepspeed": {"aio": {}}})
    assert validate(config) is config


@pytest.mark.parametrize("reason", [*VLLM.values(), *DEEPSPEED.values()])
def test_every_setting_that_a_reason_names_exists(reason):
    first = reason.split(";")[0].split(",")[0]
    words = first.removeprefix("set ").removeprefix("the section ").split(" and ") if first.startswith("set ") else []
    sections = {name.split(".")[0] for name in setting_types()}
    assert all(word in setting_types() or word in section_types() or word in sections for word in words), words
