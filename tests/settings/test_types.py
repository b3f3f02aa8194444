"""The type of every setting, for settings made in code: what it takes, what is refused, and the sentence about it."""

import dataclasses
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest

from hybrid_rl.config import Config, ConfigError, OptimizerConfig, RunConfig
from hybrid_rl.settings.types import describe, section_types, setting_types, show, with_settings, without_null
from hybrid_rl.validate import validate
from tests.conftest import VALID_CONFIG, change

WRONG: dict[Any, list[Any]] = {
    str: [3, True, ["x"], Path("x"), b"x"],
    int: [True, "3", 3.0, [3], np.int64(3)],
    float: [True, "1.5", [1.5], Decimal("1.5"), np.float64(1.5)],
    bool: [0, 1, "true", "no"],
    dict: ["x", [1], {1: 2}, {"a": {1, 2}}, {"a": (1, 2)}, {"a": Path("x")}],
    str | list: [3, True, ("x",), {"x": 1}, [Path("x")], Path("x")],
    str | dict: [3, True, ["x"], {1: "x"}, {"x": Path("x")}, b"x"],
    list[str]: ["x", ("x",), [3], ["x", None], {"x": 1}],
    list[int]: [3, (3,), ["3"], [True], [3.0]],
    list[float]: [1.5, (1.5,), ["1.5"], [None]],
    tuple[int, int]: [[1, 2], (1,), (1, 2, 3), (1, 2.0), (True, 2), 1],
    tuple[float, float]: [[0.1, 0.2], (0.1,), (0.1, 0.2, 0.3), (0.1, "0.2"), 0.1],
}
"""Type -> values of other types."""


def wrong_values(annotation: Any) -> list[Any]:
    inner = without_null(annotation)
    of_choices = get_origin(inner) is list and get_origin(get_args(inner)[0]) is Literal
    values = (
        ["no such choice", True, 17]
        if get_origin(inner) is Literal
        else ["x", ["no such choice"], [3], {"x": 1}]
        if of_choices
        else WRONG[inner]
    )
    return values if inner != annotation else [*values, object()]


CASES = [
    (name, value)
    for name, annotation in setting_types().items()
    for value in [*wrong_values(annotation), *([] if "None" in str(annotation) else [None])]
]


def test_every_setting_of_every_section_is_found():
    assert list(setting_types())[:2] == ["run.name", "run.dir"]
    assert {"models.lora.rank", "update.critic.betas", "checkpoint.export"} <= setting_types().keys()
    assert list(section_types())[:3] == ["run", "models", "models.lora"]
    num_fields = sum(len(dataclasses.fields(section)) for section in section_types().values())
    assert len(setting_types()) == num_fields - 3  # lora, actor and critic are sections


@pytest.mark.parametrize(
    "name, value", CASES, ids=[f"{name}-{number}-{type(value).__name__}" for number, (name, value) in enumerate(CASES)]
)
def test_value_of_another_type_is_refused_in_one_sentence(name, value):
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, {name: value}))
    (sentence,) = error.value.messages
    assert sentence.startswith(f"{name} = ") and ": must be " in sentence and "\n" not in sentence
    assert not any(word in sentence for word in ("class '", "typing", "object at"))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"run.seed": "3"}, "run.seed = '3': must be a whole number"),
        ({"run.seed": True}, "run.seed = true: must be a whole number"),
        ({"advantage.whiten": None}, "advantage.whiten = null: must be true or false"),
        ({"run.name": Path("x")}, "run.name = a Python object of type PosixPath: must be text"),
        ({"update.zero_stage": 4}, "update.zero_stage = 4: must be one of 0, 1, 2, 3"),
        ({"update.zero_stage": "2"}, "update.zero_stage = 2: must be one of 0, 1, 2, 3"),
        (
            {"update.actor.betas": [0.9, 0.95]},
            "update.actor.betas = [0.9, 0.95]: must be a list of 2 values (in Python a tuple), each a number",
        ),
        ({"reward.functions": ("math",)}, "reward.functions = ('math',): must be a list, each item text"),
        ({"reward.clip": "1"}, "reward.clip = '1': must be null or a number"),
        ({"run": None}, "run = null: must be of the class RunConfig"),
        (
            {"update.critic": RunConfig()},
            "update.critic = a Python object of type RunConfig: must be of the class OptimizerConfig",
        ),
        (
            {"update": OptimizerConfig()},
            "update = a Python object of type OptimizerConfig: must be of the class UpdateConfig",
        ),
    ],
    ids=str,
)
def test_sentence_about_a_type(changes, sentence):
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, changes))
    assert error.value.messages == (sentence,)


def test_whole_numbers_are_numbers():
    assert validate(change(VALID_CONFIG, {"rollout.temperature": 1})).rollout.temperature == 1


def test_other_objects_than_a_config_are_refused():
    with pytest.raises(ConfigError, match=r"^the settings are of type dict: must be a Config$"):
        validate({})  # type: ignore[arg-type]


def test_all_findings_are_reported_in_the_order_of_the_settings():
    changes = {
        "run.seed": "3",
        "models.critic": "",
        "rollout.group_size": 0,
        "advantage.kl_unbiased": True,
        "update.mini_batch_size": 48,
        "checkpoint.keep_last": None,
    }
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, changes))
    assert error.value.messages == (
        "run.seed = '3': must be a whole number",
        "models.critic is empty: give a value, or null",
        "rollout.group_size = 0: must be greater than 0",
        "checkpoint.keep_last = null: must be a whole number",
        "advantage.kl_unbiased = true: needs advantage.kl_in = loss; a KL in the reward has no gradient of its own",
    )  # whether 48 divides the responses of a step cannot be said without the group size


def test_settings_are_replaced_by_dotted_names():
    changed = with_settings(Config(), {"run.seed": 3, "update.actor.lr": 0.5, "models.lora.rank": 2})
    assert (changed.run.seed, changed.update.actor.lr, changed.models.lora.rank) == (3, 0.5, 2)
    assert changed == change(Config(), {"run.seed": 3, "update.actor.lr": 0.5, "models.lora.rank": 2})
    config = Config()
    assert with_settings(config, {}) is config


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "null"),
        (True, "true"),
        ((1, 2.5), "[1, 2.5]"),
        (["a", None], "[a, null]"),
        ("a\nb", "a b"),
        (set(), "a Python object of type set"),
    ],
)
def test_values_are_shown_as_a_settings_file_has_them(value, text):
    assert show(value) == text


def test_long_values_are_cut():
    assert show("x" * 100) == "x" * 77 + "..."


def test_types_are_described_in_words():
    assert describe(int | None) == "null or a whole number"
    assert describe(tuple[float, float]) == "a list of 2 values (in Python a tuple), each a number"
    assert describe(list[str]) == "a list, each item text"
