"""The command `hybrid-rl`: its subcommands, their help texts, and the configurations of the package."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from launch import colocated, commands, configurations, main

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def call(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Run `hybrid-rl` in this process, and return its exit code and what it prints to stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["hybrid-rl", *words])
    monkeypatch.setattr(colocated, "handle_signals", lambda: None)  # the handlers of pytest stay
    monkeypatch.setattr(colocated, "escape_messages", lambda: None)
    code: object = 0
    try:
        main.main()
    except SystemExit as end:
        code = end.code or 0
    captured = capsys.readouterr()
    assert isinstance(code, int)
    return code, captured.out, captured.err


def test_the_command_of_the_package_is_a_function():
    module, _, function = PROJECT["project"]["scripts"]["hybrid-rl"].partition(":")
    assert module == "hybrid_rl.launch.main" and callable(getattr(main, function))
    assert Path(importlib.import_module("launch.main").__file__).parent == ROOT / "launch"


def test_the_wheel_has_no_package_of_a_general_name():
    folders = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    assert {target.partition("/")[0] for target in folders} == {"hybrid_rl", "hybrid_rl_kernels"}
    assert folders["hybrid_rl/launch"] == "launch"
    assert all((ROOT / source / "__init__.py").is_file() for source in folders.values())


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_the_help_lists_every_command_with_its_sentence(word, monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, word)
    assert (code, err) == (0, "")
    assert {*main.COMMANDS_HERE, "ray"} == {*commands.COMMANDS}
    for name, command in commands.COMMANDS.items():
        assert f"\n  {name:9}  {command.title}\n" in out


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "ray" else name for name in commands.COMMANDS]
)
def test_the_help_of_a_command_begins_with_its_sentence_and_its_calls(name, monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, name, "--help")
    assert (code, err) == (0, "")
    usage, empty, title, *rest = out.splitlines()
    assert usage.startswith(f"usage: hybrid-rl {name} ") and not empty and title == commands.COMMANDS[name].title
    calls = [f"hybrid-rl {name} {arguments}".rstrip() for arguments in commands.COMMANDS[name].examples]
    assert all(any(line.startswith(call) for line in rest) for call in calls)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ([], "error: the first word must be one of run, check, plan, data, rollouts, ray, translate, configs\n"),
        (["zzz"], "error: hybrid-rl zzz: there is no such command\n"),
        (["rum", "--config", "x"], "error: hybrid-rl rum: there is no such command; did you mean run?\n"),
        (["configs", "grpoo"], "error: hybrid-rl configs grpoo: there is no such configuration; did you mean grpo?\n"),
        (["translate"], "error: hybrid-rl translate : the first word must be one of openrlhf, coati, verl, trl\n"),
        (["run", "--config", "no-such"], "error: --config no-such: no such file\n"),
    ],
    ids=lambda value: "_".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_a_wrong_word_ends_with_one_sentence(words, sentence, monkeypatch, capsys):
    assert call(monkeypatch, capsys, *words) == (2, "", sentence)


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert call(monkeypatch, capsys, "--version") == (0, f"hybrid_rl {PROJECT['project']['version']}\n", "")


def test_every_configuration_is_listed_and_printed(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "configs")
    names = [line.split()[0] for line in out.splitlines()]
    assert code == 0 and {"demo", "grpo", "recipes/grpo_1.5b_1gpu"} <= {*names}
    assert len(names) == len(list((ROOT / "launch" / "configs").rglob("*.yaml")))
    text = (ROOT / "launch" / "configs" / "recipes" / "grpo_1.5b_1gpu.yaml").read_text()
    assert call(monkeypatch, capsys, "configs", "recipes/grpo_1.5b_1gpu") == (0, text, "")


def test_a_configuration_is_found_by_its_name_and_a_file_of_the_user_counts_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    by_path = colocated.parse(["--config", str(configurations.FOLDER / "rloo.yaml")])
    assert colocated.parse(["--config", "rloo"]) == by_path
    Path("rloo").write_text("run: {name: mine}")
    assert colocated.parse(["--config", "rloo"])[0].run.name == "mine"


def test_translate_prints_settings(monkeypatch, capsys):
    words = ["translate", "trl", "--learning_rate", "3e-6", "--num_generations", "4"]
    code, out, err = call(monkeypatch, capsys, *words)
    assert code == 2 and "error: prompts.path is empty" in err  # the arguments name neither data nor a reward
    assert yaml.safe_load(out)["update"]["actor"]["lr"] == 3e-6


def test_the_script_of_a_node_has_the_same_help(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        colocated.parse(["--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: python launch/colocated.py ") and "\npython launch/colocated.py check --config" in out
    with pytest.raises(SystemExit):
        colocated.data(["--help"])
    assert commands.COMMANDS["data"].title in capsys.readouterr().out
