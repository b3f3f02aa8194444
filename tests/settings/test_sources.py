"""What the data sets of a setting may hold, and the sentence about each that cannot work."""

import pytest

from hybrid_rl.config import ConfigError, DataSource
from hybrid_rl.validate import validate
from tests.conftest import VALID_CONFIG, change

GOOD = [
    ("prompts.path", ["a.jsonl"]),
    ("prompts.path", ["a.jsonl", "b.jsonl"]),
    ("prompts.path", [{"path": "a", "weight": 1}, {"path": "a", "weight": 0.5, "split": "test"}]),
    ("prompts.path", [{"path": "a", "format": "gsm8k", "answer_column": "x", "data_source": "openai/gsm8k"}]),
    ("prompts.eval_path", {"path": "a", "max_samples": 3}),
    ("prompts.eval_path", {"gsm8k": "a", "aime-24": {"path": "b", "split": "train"}}),
    ("ptx.path", ["a", {"path": "b", "column": "text"}]),
]


@pytest.mark.parametrize("name, value", GOOD, ids=range(len(GOOD)))
def test_these_data_sets_are_accepted(name, value):
    assert validate(change(VALID_CONFIG, {name: value}))


@pytest.mark.parametrize(
    "name, value, sentence",
    [
        ("prompts.path", [], "prompts.path is an empty list: give at least one data set"),
        ("prompts.path", ["a", 3], "prompts.path: 3: must be a path, or a mapping with the keys path, weight, split,"),
        ("prompts.path", [""], "must have a path"),
        ("prompts.path", [{"weight": 1}], "must have a path"),
        ("prompts.path", [{"path": "a", "wieght": 1}], "there is no key 'wieght'; there are: path, weight,"),
        ("prompts.path", [{"path": "a", "weight": 0}], "a: weight = 0: must be greater than 0 and finite"),
        ("prompts.path", [{"path": "a", "weight": -0.5}], "weight = -0.5: must be greater than 0 and finite"),
        ("prompts.path", [{"path": "a", "weight": float("inf")}], "weight = inf: must be greater than 0 and finite"),
        ("prompts.path", [{"path": "a", "weight": float("nan")}], "weight = nan: must be greater than 0 and finite"),
        ("prompts.path", [{"path": "a", "weight": "2"}], "a: weight = '2': must be null or a number"),
        ("prompts.path", [{"path": "a", "max_samples": 0}], "a: max_samples = 0: must be greater than 0"),
        ("prompts.path", [{"path": "a", "format": "gsm"}], "a: format = 'gsm': must be null or one of auto, plain"),
        ("prompts.path", [{"path": "a", "weight": 2}, "b"], "prompts.path: b has no weight, and others have one"),
        ("prompts.path", ["a", "a"], "prompts.path: holds a twice: keep one, and give it a larger weight"),
        ("prompts.eval_path", {}, "prompts.eval_path is an empty mapping"),
        ("prompts.eval_path", {"a b": "x"}, "the name 'a b' is part of metrics such as eval/<name>/accuracy"),
        ("prompts.eval_path", {"a": {"path": "x", "weight": 1}}, "prompts.eval_path.a: .*there is no key 'weight'"),
        ("prompts.eval_path", {"a": ["x"]}, "prompts.eval_path.a: .*: must be a path, or a mapping"),
        ("ptx.path", [{"path": "a", "format": "gsm8k"}], "ptx.path: .*there is no key 'format'"),
    ],
)
def test_a_data_set_that_cannot_work_is_named(name, value, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        validate(change(VALID_CONFIG, {name: value}))
    assert len(error.value.messages) == 1


def test_what_a_data_set_does_not_set_is_as_for_all():
    sets = ["a", {"path": "b", "split": "s", "format": "math", "prompt_column": "q", "task_options": {"x": 1}}]
    config = change(VALID_CONFIG, {"prompts.path": sets, "prompts.answer_column": "gold"}).prompts
    first, second = (config.of_source(source) for source in config.training_sources)
    assert first == config
    assert (second.split, second.eval_split, second.format, second.prompt_column) == ("s", "s", "math", "q")
    assert (second.answer_column, second.task_options) == ("gold", {"x": 1})


def test_one_held_out_set_has_no_name():
    for value in ("a", {"path": "a"}):
        assert change(VALID_CONFIG, {"prompts.eval_path": value}).prompts.evaluation_sources == {
            "": DataSource(path="a")
        }
    named = change(VALID_CONFIG, {"prompts.eval_path": {"x": "a", "y": {"path": "b"}}}).prompts.evaluation_sources
    assert named == {"x": DataSource(path="a"), "y": DataSource(path="b")}
    assert VALID_CONFIG.prompts.evaluation_sources == {}
