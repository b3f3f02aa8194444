"""Settings and rows that a Python program gives to hybrid_rl.train."""

import json
import subprocess
import sys

import datasets
import pytest

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.data.files import read_rows
from launch.from_python import read_config, with_rows
from tests.conftest import VALID_CONFIG, change
from tests.programs import PATHS, ROOT

ROWS = [{"prompt": "1+1=", "answer": "2", "level": 1}, {"prompt": "1+2=", "answer": "3", "level": 2}]


@pytest.fixture
def config(tmp_path):
    return change(VALID_CONFIG, {"prompts.path": "", "run.dir": str(tmp_path), "run.name": "run"})


def test_settings_are_an_object_a_dictionary_or_a_file(tmp_path):
    (tmp_path / "x.yaml").write_text("run: {num_steps: 3}\nreward.functions: [math]\n")
    expected = change(Config(), {"run.num_steps": 3, "reward.functions": ["math"]})
    assert read_config(expected) is expected
    assert read_config(tmp_path / "x.yaml") == read_config(str(tmp_path / "x.yaml")) == expected
    assert read_config({"run": {"num_steps": 3}, "reward.functions": ["math"]}) == expected
    with pytest.raises(ConfigError, match=r"run\.num_stepz: there is no such setting; did you mean run.num_steps"):
        read_config({"run": {"num_stepz": 3}})


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
def test_rows_become_a_file_next_to_the_folder_of_the_run(config, tmp_path, make):
    found = with_rows(config, make(ROWS), setting="prompts.path", name="dataset")
    (path,) = tmp_path.iterdir()
    assert found.prompts.path == str(path) and path.name.startswith("run.dataset.")
    assert read_rows(path, source="x", text_column="prompt") == ROWS
    assert found.prompts.answer_column == "answer"


@pytest.mark.parametrize(
    "row, answer_column",
    [
        ({"prompt": "1+1=", "gold": "2"}, None),
        ({"prompt": "1+1=", "solution": "2"}, "answer"),
        ({"question": "1+1=", "answer": "#### 2"}, "answer"),
    ],
)
def test_rows_without_answers_need_none(config, row, answer_column):
    found = with_rows(config, [row], setting="prompts.path", name="dataset")
    assert found.prompts.answer_column == answer_column


@pytest.mark.parametrize(
    "rows, message",
    [
        ("a.jsonl", "dataset is a builtins.str: give a list of dictionaries or a datasets.Dataset"),
        ([], "dataset holds no rows"),
        ([{"prompt": "a"}, "b"], "dataset: row 1 is a str: give a dictionary of columns"),
        ([{"prompt": {1, 2}}], "dataset: row 0 cannot be written as JSON"),
        ([{"prompt": float("nan")}], "dataset: row 0 cannot be written as JSON"),
    ],
)
def test_other_rows_are_refused(config, rows, message):
    with pytest.raises(ConfigError, match=message):
        with_rows(config, rows, setting="prompts.path", name="dataset")


def test_data_are_given_once(config):
    with pytest.raises(ConfigError, match=r"prompts\.path and dataset both give data: remove one of them"):
        with_rows(change(config, {"prompts.path": "a.jsonl"}), ROWS, setting="prompts.path", name="dataset")
    assert with_rows(config, None, setting="prompts.path", name="dataset") is config


def test_the_package_alone_imports_nothing_heavy():
    program = "import sys, json, hybrid_rl; print(json.dumps(sorted({n.partition('.')[0] for n in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=PATHS, cwd=ROOT, check=True
    )
    assert not {"torch", "transformers", "numpy", "yaml", "launch", "cloudpickle"} & set(json.loads(done.stdout))
