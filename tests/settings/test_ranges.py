"""The range of every number and the rules of every text; tests/test_validate.py has the sentences one by one."""

import math
from typing import Any, get_args, get_origin

import pytest

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.settings.ranges import RANGES, Range, broken_values
from hybrid_rl.settings.types import get_setting, setting_types, without_null
from hybrid_rl.validate import validate
from tests.conftest import VALID_CONFIG, change


def kinds(annotation: Any) -> set[type]:
    """Return the type of a setting's values, or of the items of its list."""
    inner = without_null(annotation)
    return set(get_args(inner)) if get_origin(inner) in (list, tuple) else {inner}


NUMBERS = {name: kind for name, kind in setting_types().items() if kinds(kind) & {int, float}}
TEXTS = {name: kind for name, kind in setting_types().items() if str in kinds(kind)}


def as_value(name: str, item: Any) -> Any:
    """Return a value of a setting that holds the item: the item, or a list of it, or a pair with it at its end."""
    inner = without_null(setting_types()[name])
    if get_origin(inner) is tuple:
        return (0 if int in kinds(inner) else 0.0, item)
    return [item] if get_origin(inner) is list else item


def outside(name: str) -> list[float]:
    """Return numbers of the setting's type next to its range, and those that are not finite."""
    bounds, is_whole = RANGES[name], int in kinds(setting_types()[name])
    found = [] if is_whole else [math.nan, math.inf, -math.inf]
    if math.isfinite(bounds.low):
        found.append(bounds.low if bounds.is_low_open else bounds.low - 1)
    if math.isfinite(bounds.high):
        found.append(bounds.high if bounds.is_high_open else bounds.high + 1)
    return [int(number) if is_whole else number for number in found]


OUTSIDE = [(name, number) for name in NUMBERS for number in outside(name)]


def test_every_number_has_a_range():
    assert NUMBERS.keys() == RANGES.keys()


def test_defaults_break_no_rule_but_that_a_model_and_prompts_are_needed():
    assert dict(broken_values(Config())).keys() == {"models.actor", "prompts.path"}


@pytest.mark.parametrize("name, number", OUTSIDE)
def test_number_out_of_range_is_refused(name, number):
    value = as_value(name, number)
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, {name: value}))
    assert len(error.value.messages) == 1
    assert error.value.messages[0].startswith(f"{name} = ") and ": must " in error.value.messages[0]


@pytest.mark.parametrize("name", [name for name, kind in NUMBERS.items() if float in kinds(kind)])
def test_whole_number_that_no_float_holds_is_refused(name):
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, {name: as_value(name, 10**400)}))
    assert error.value.messages[0].startswith(f"{name} = ") and ": must " in error.value.messages[0]


@pytest.mark.parametrize(
    "bounds, value, rule",
    [
        (Range(0, is_low_open=True), 0, "must be greater than 0"),
        (Range(0, is_low_open=True), 1e-300, None),
        (Range(0), -1, "must not be negative"),
        (Range(0), 0, None),
        (Range(2), 1, "must be at least 2"),
        (Range(0, 5), 6, "must be at most 5"),
        (Range(0, 5), 5, None),
        (Range(0, 1), 1.5, "must lie in [0, 1]"),
        (Range(0, 1, is_low_open=True, is_high_open=True), 1, "must lie in (0, 1)"),
        (Range(0, 1, is_high_open=True), 1, "must lie in [0, 1)"),
        (Range(0, 1, is_low_open=True), 1, None),
        (Range(), math.inf, "must be finite"),
        (Range(), math.nan, "must be finite"),
        (Range(), -1e300, None),
    ],
)
def test_rule_of_a_range(bounds, value, rule):
    assert bounds.broken_rule(value) == rule


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "prompts.system_message"])
def test_empty_text_is_refused(name):
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, {name: as_value(name, "")}))
    assert any(message.startswith(name) for message in error.value.messages)


@pytest.mark.parametrize(
    "name", [name for name in TEXTS if name not in ("prompts.system_message", "rollout.stop_strings")]
)
@pytest.mark.parametrize("text", ["a\0b", "a\n"], ids=["NUL", "line end"])
def test_control_characters_are_refused(name, text):
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, {name: as_value(name, text)}))
    assert any(message.startswith(name) for message in error.value.messages)


def test_texts_in_which_blanks_are_a_meaning_are_accepted():
    changes = {"prompts.system_message": "", "rollout.stop_strings": ["\n\n", " "]}
    assert validate(change(VALID_CONFIG, changes)).rollout.stop_strings == ["\n\n", " "]


def test_weights_may_be_equal():
    changes = {"reward.functions": ["math", "gsm8k"], "reward.weights": [0.5, 0.5]}
    assert get_setting(validate(change(VALID_CONFIG, changes)), "reward.weights") == [0.5, 0.5]
