"""`~` in every setting that holds a path is the home folder, for settings made in code and read by the launchers."""

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.settings.paths import PATHS
from hybrid_rl.settings.types import get_setting, setting_types, without_null
from hybrid_rl.validate import validate
from tests.conftest import VALID_CONFIG, change

NAMES_WITH_PATH = ("actor", "critic", "reference", "reward", "dir", "path", "functions", "eval_function")


def test_every_setting_with_a_path_is_known():
    named = {
        name
        for name, kind in setting_types().items()
        if without_null(kind) in (str, list[str])
        and (name.rpartition(".")[2] in NAMES_WITH_PATH or name.endswith("_path"))
    }
    assert named == set(PATHS)


@pytest.mark.parametrize("name", PATHS)
def test_home_folder_is_written_out(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    is_list = name == "reward.functions"
    config = validate(change(VALID_CONFIG, {name: ["math", "~/x.py:f"] if is_list else "~/x"}))
    assert get_setting(config, name) == (["math", "/home/me/x.py:f"] if is_list else "/home/me/x")


def test_run_folder_lies_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = validate(change(VALID_CONFIG, {"run.dir": "~", "run.name": "a"}))
    assert str(config.run_dir) == "/home/me/a"


def test_tilde_within_a_path_or_a_name_stays():
    changes = {"run.dir": "a/~/b", "models.actor": "./~x", "run.name": "~a"}
    config = change(VALID_CONFIG, changes)
    assert validate(config) is config


@pytest.mark.parametrize("name", PATHS)
def test_home_folder_of_an_unknown_user_is_refused(name):
    value = "~no_such_user/x"
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, {name: [value] if name == "reward.functions" else value}))
    assert error.value.messages == (
        f"{name} = ~no_such_user/x: no such home folder; write the whole path, or ./~no_such_user/x for that name",
    )
