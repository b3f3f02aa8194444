"""`~` in every setting that holds a path is the home folder, for settings made in code and read by the launchers."""

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.settings.paths import PATHS, expand_home
from hybrid_rl.settings.types import get_setting, setting_types, without_null
from hybrid_rl.validate import validate
from tests.conftest import VALID_CONFIG, change

NAMES_WITH_PATH = ("actor", "critic", "reference", "reward", "dir", "path", "functions", "eval_function")
WITH_FUNCTIONS = {"reward.by_source", "reward.gates", "environment.name", "environment.tools"}
"""Settings besides that hold names of functions or classes."""


def holding(name, path):
    """Return a value of a setting that holds a path."""
    kind = without_null(setting_types()[name])
    return [path] if kind == list[str] else {"a": path, "b": ["math"]} if kind is dict else path


def test_every_setting_with_a_path_is_known():
    named = {
        name
        for name, kind in setting_types().items()
        if without_null(kind) in (str, list[str], str | list, str | dict)
        and (name.rpartition(".")[2] in NAMES_WITH_PATH or name.endswith("_path"))
    }
    assert named == set(PATHS) - WITH_FUNCTIONS


@pytest.mark.parametrize("name", PATHS)
def test_home_folder_is_written_out(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = expand_home(change(VALID_CONFIG, {name: holding(name, "~/x.py:f")}))
    assert get_setting(config, name) == holding(name, "/home/me/x.py:f")


def test_home_folder_is_written_out_in_every_data_set(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    sets = ["~/a", {"path": "~/b", "split": "~"}]
    changes = {"prompts.path": sets, "prompts.eval_path": dict(zip("xy", sets, strict=True)), "ptx.path": "~/c"}
    config = expand_home(change(VALID_CONFIG, changes))
    expanded = ["/home/me/a", {"path": "/home/me/b", "split": "~"}]
    assert config.prompts.path == expanded and config.ptx.path == "/home/me/c"
    assert config.prompts.eval_path == dict(zip("xy", expanded, strict=True))


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
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, {name: holding(name, "~no_such_user/x")}))
    assert (
        f"{name} = ~no_such_user/x: no such home folder; write the whole path, or ./~no_such_user/x for that name"
        in error.value.messages
    )
