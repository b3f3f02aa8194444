"""Settings in YAML files and on the command line: the value that was meant, or one sentence and exit code 2."""

import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_rl.config import Config, ConfigError, as_dict
from hybrid_rl.settings.ranges import RANGES
from hybrid_rl.settings.types import (
    alternatives,
    describe,
    get_setting,
    is_optional,
    setting_types,
    with_settings,
    without_null,
)
from hybrid_rl.settings.yaml_format import dump
from hybrid_rl.validate import validate
from launch import colocated
from launch.command_line import Given, read_command_line
from launch.settings import make_parser, read_settings
from tests.conftest import VALID_CONFIG, change

WRONG: dict[Any, str] = {
    str: "{a: 1}",
    int: "1.5",
    float: "fast",
    bool: "2",
    dict: "[1]",
    str | list: "{a: 1}",
    str | dict: "[1]",
    list[str]: "{a: 1}",
    list[int]: "[1, x]",
    list[float]: "[x]",
    tuple[int, int]: "[1, 2, 3]",
    tuple[float, float]: "[0.5]",
}
"""Type -> YAML that is of another type."""
FLAGS = ("print_config",)
ROOT = Path(__file__).parents[2]


def wrong(annotation: Any) -> str:
    inner = without_null(annotation)
    if get_origin(inner) is list and get_origin(get_args(inner)[0]) is Literal:
        return "[no_such_choice]"
    return "no_such_choice" if get_origin(inner) is Literal else WRONG[inner]


def read(*arguments: str, **options: Any) -> Given:
    return read_command_line(arguments, options=options, flags=FLAGS)


def read_text(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text, encoding="utf-8")
    return read("--config", str(path)).settings


def sentences(*arguments: str, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        read(*arguments, **options)
    return error.value.messages


def file_sentences(path: Path, content: str | bytes) -> list[str]:
    """Return the sentences about a file, in which `f` is its path."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [sentence.replace(str(path), "f") for sentence in sentences("--config", str(path))]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("environment: guess.py:Guess", {"environment.name": "guess.py:Guess"}),
        ("environment: {max_turns: 3}", {"environment.max_turns": 3}),
        ("environment.name: tools", {"environment.name": "tools"}),
    ],
)
def test_an_environment_is_a_name_or_a_section(tmp_path, text, expected):
    assert read_text(tmp_path / "f.yaml", text) == expected


def test_an_environment_on_the_command_line_is_a_name_a_text_or_a_file(tmp_path):
    (tmp_path / "f.yaml").write_text("max_turns: 5")
    assert read("--environment", "guess.py:Guess").settings == {"environment.name": "guess.py:Guess"}
    assert read("--environment", "{max_turns: 4}").settings == {"environment.max_turns": 4}
    assert read("--environment", str(tmp_path / "f.yaml")).settings == {"environment.max_turns": 5}
    assert sentences("--config", "{environment: null}") == (
        "--config: environment is empty: give settings below it, or remove it",
    )


# Every setting


@pytest.mark.parametrize("name", setting_types())
def test_null_is_accepted_only_where_the_type_says_so(name, tmp_path):
    annotation = setting_types()[name]
    if is_optional(annotation):
        for text in ("", "null", "~"):
            assert read_text(tmp_path / "c.yaml", f"{name}: {text}") == {name: None}
        assert read(f"--{name}", "null").settings == {name: None}
        return
    sentence = f"{name} = null: must be {describe(annotation)}"
    assert file_sentences(tmp_path / "c.yaml", f"# comment\n{name}:\n") == [f"f, line 2: {sentence}"]
    assert sentences(f"--{name}", "null") == sentences(f"--{name}=null") == (sentence,)


@pytest.mark.parametrize("name", setting_types())
def test_value_of_another_type_is_refused_in_a_file_and_on_the_command_line(name, tmp_path):
    annotation = setting_types()[name]
    text = wrong(annotation)
    sentence = f"{name} = {text}: must be {describe(annotation)}"
    assert file_sentences(tmp_path / "c.yaml", f"{name}: {text}\n") == [f"f, line 1: {sentence}"]
    if str not in alternatives(annotation):  # on the command line everything is text
        assert sentences(f"--{name}={text}") == (sentence,)


@pytest.mark.parametrize("name", RANGES)
def test_number_out_of_range_has_one_sentence_in_code_in_a_file_and_on_the_command_line(name, tmp_path):
    annotation = without_null(setting_types()[name])
    number = "-.inf" if float in (annotation, *get_args(annotation)) else "-5"
    origin = get_origin(annotation)
    text = {tuple: f"[{number}, {number}]", list: f"[{number}]"}.get(origin, number)
    found = []
    for found_settings in (read_text(tmp_path / "c.yaml", f"{name}: {text}"), read(f"--{name}={text}").settings):
        with pytest.raises(ConfigError) as error:
            validate(with_settings(VALID_CONFIG, found_settings))
        found.append(error.value.messages)
    assert found[0] == found[1] and found[0][0].startswith(f"{name} = ") and ": must " in found[0][0]


# Values


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("memory.swap", "off", "off"),
        ("memory.swap", '"off"', "off"),
        ("models.fused_layers", "off", "off"),
        ("run.name", "off", "off"),
        ("run.name", "yes", "yes"),
        ("run.name", "007", "007"),
        ("run.name", "1.10", "1.10"),
        ("run.name", "1e5", "1e5"),
        ("run.name", "2026-01-01", "2026-01-01"),
        ("run.name", "12:30:45", "12:30:45"),
        ("run.num_steps", "010", 10),
        ("run.num_steps", "10_000", 10000),
        ("run.seed", "0x10", 16),
        ("update.actor.lr", "1e-6", 1e-6),
        ("update.actor.lr", "5E-7", 5e-7),
        ("update.actor.lr", ".1", 0.1),
        ("update.actor.lr", "0", 0.0),
        ("update.actor.lr", "1e400", math.inf),
        ("advantage.kl_coef", "-1e-3", -1e-3),
        *[("advantage.whiten", word, True) for word in ("true", "True", "yes", "on", "y", "ON")],
        *[("advantage.whiten", word, False) for word in ("false", "no", "off", "n", "FALSE")],
        ("update.zero_stage", "3", 3),
        ("run.profile_steps", "[1, 2]", (1, 2)),
        ("update.actor.betas", "[0.9, 1e-1]", (0.9, 0.1)),
        ("reward.weights", "[1, 2e0]", [1.0, 2.0]),
        ("rollout.stop_token_ids", "[2, 4]", [2, 4]),
        ("rollout.stop_strings", '["\\n", off, 3]', ["\n", "off", "3"]),
        ("prompts.task_options", "{a: off, b: 1e-3, c: 1:30}", {"a": False, "b": 1e-3, "c": "1:30"}),
    ],
)
def test_value_is_what_the_user_wrote(name, text, value, tmp_path):
    assert read_text(tmp_path / "c.yaml", f"{name}: {text}") == {name: value}
    read_back = read(f"--{name}", text).settings[name]
    assert read_back == value and type(read_back) is type(value)


@pytest.mark.parametrize(
    "name, text, rule",
    [
        ("run.num_steps", "1:30", "a whole number"),
        ("run.num_steps", "1e3", "a whole number"),
        ("run.num_steps", "3.0", "a whole number"),
        ("run.num_steps", "true", "a whole number"),
        ("run.num_steps", '"3"', "a whole number"),
        ("run.num_steps", "2026-01-01", "a whole number"),
        ("update.actor.lr", "1:30", "a number"),
        ("update.actor.lr", "'1e-6'", "a number"),
        ("advantage.whiten", "1", "true or false"),
        ("advantage.whiten", "'off'", "true or false"),
        ("memory.swap", "false", "one of auto, vmm, deepspeed, off"),
        ("reward.functions", "math", "a list, each item text"),
        ("reward.functions", "[math, ]", None),
        ("reward.functions", "[math, null]", "a list, each item text"),
        ("prompts.task_options", "{1: 2}", "a mapping from names to values"),
    ],
)
def test_value_that_means_something_else_is_refused(name, text, rule, tmp_path):
    if rule is None:
        assert read_text(tmp_path / "c.yaml", f"{name}: {text}") == {name: ["math"]}
    else:
        assert file_sentences(tmp_path / "c.yaml", f"{name}: {text}") == [f"f, line 1: {name} = {text}: must be {rule}"]


@pytest.mark.parametrize("text", ["a: b # c", "'x'", "[x]", "-1e-3", "", " "])
def test_text_on_the_command_line_needs_no_quotes(text):
    assert read("--run.name", text).settings == {"run.name": text}


# Files


FILES: dict[str, tuple[str | bytes, list[str]]] = {
    "section twice": (
        "update: {num_epochs: 2}\nrun:\n  seed: 1\nupdate: {}\n",
        ["f: update is given twice, in lines 1 and 4; keep one"],
    ),
    "key twice": ("run:\n  seed: 1\n  seed: 2\n", ["f: run.seed is given twice, in lines 2 and 3; keep one"]),
    "key twice three levels down": (
        "update:\n  actor:\n    lr: 1\n    eps: 1\n    lr: 1\n",
        ["f: update.actor.lr is given twice, in lines 3 and 5; keep one"],
    ),
    "dotted key beside its section": (
        "update.actor.lr: 0.1\nupdate:\n  actor: {lr: 0.2}\n",
        ["f: update.actor.lr is given twice, in lines 1 and 3; keep one"],
    ),
    "dotted section beside its section": (
        "update.actor: {lr: 0.1}\nupdate: {actor.lr: 0.2}\n",
        ["f: update.actor.lr is given twice, in lines 1 and 2; keep one"],
    ),
    "key twice in a free mapping": (
        "prompts:\n  task_options:\n    a: 1\n    a: 2\n",
        ["f: prompts.task_options.a is given twice, in lines 3 and 4; keep one"],
    ),
    "both names of a setting": (
        "prompts: {num_eval: 7}\nprompts.max_eval_samples: 8\n",
        [
            "prompts.num_eval and prompts.max_eval_samples are one setting, which has two values: remove "
            "prompts.num_eval, its former name"
        ],
    ),
    "several mistakes": (
        "advantage:\n  whiten:\n  gama: 1\nrun: {seed: x}\n",
        [
            "f, line 2: advantage.whiten = null: must be true or false",
            "f, line 3: advantage.gama: there is no such setting; did you mean advantage.gamma?",
            "f, line 4: run.seed = x: must be a whole number",
        ],
    ),
    "unknown section": ("rolout: {x: 1}", ["f, line 1: rolout: there is no such setting; did you mean rollout?"]),
    "setting without its section": (
        "lr: 1",
        ["f, line 1: lr: there is no such setting; did you mean update.actor.lr or update.critic.lr?"],
    ),
    "setting below a setting": (
        "run: {seed.x: 1}",
        ["f, line 1: run.seed.x: there is no such setting; did you mean run.seed?"],
    ),
    "section with nothing": (
        "update:\nrun: {seed: 1}\n",
        ["f, line 1: update is empty: give settings below it, or remove it"],
    ),
    "section that is a number": ("update: 3", ["f, line 1: update = 3: must hold settings in the form `name: value`"]),
    "empty": ("", ["f: holds no settings"]),
    "only a comment": ("# run:\n", ["f: holds no settings"]),
    "list": ("- run\n", ["f, line 1: must hold settings in the form `name: value`, not a list or a text"]),
    "text": ("run\n", ["f, line 1: must hold settings in the form `name: value`, not a list or a text"]),
    "Latin-1": (
        "# a\nrun: {name: \xe9}".encode("latin-1"),
        ["f, line 2: is not UTF-8; save the file in this encoding"],
    ),
    "UTF-16": ("run: {}".encode("utf-16"), ["f, line 1: is not UTF-8; save the file in this encoding"]),
    "tab": ("run:\n\tname: x", ["f, line 2: is not YAML: a tab cannot indent; use spaces"]),
    "open bracket": ("run: {name: x\n", ["f, line 2: is not YAML: expected ',' or '}', but got '<stream end>'"]),
    "two documents": ("run: {}\n---\nrun: {}\n", ["f, line 2: is not YAML: but found another document"]),
    "NUL": ("run:\n  name: a\0b\n", ["f, line 2: holds the control character 0x0: remove it"]),
    "own tag": ("run: {seed: !x 3}", ["f, line 1: run.seed = !x 3: must be a whole number"]),
    "Python tag": (
        "prompts: {task_options: {a: !!python/object:os.x {}}}",
        [
            "f, line 1: prompts.task_options cannot be read: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.x'"
        ],
    ),
    "unknown alias": ("run: *x", ["f, line 1: is not YAML: found undefined alias 'x'"]),
    "mapping that holds itself": (
        "prompts: {task_options: &a {x: *a}}",
        ["f, line 1: prompts.task_options cannot be read: found unconstructable recursive node"],
    ),
    "merge of a text": ("run: {<<: x}", ["f, line 1: << = x: must be an alias of a section, such as *name"]),
    "list as a key": ("? [1]\n: 2", ["f, line 1: the key [1] must be a name"]),
    "deep nesting": ("[" * 5000, ["f, line 1: is nested too deeply"]),
    "number with very many digits": (
        f"run: {{seed: {'9' * 5000}}}",
        [f"f, line 1: run.seed = {'9' * 77}...: must be a whole number"],
    ),
}


@pytest.mark.parametrize("content, expected", FILES.values(), ids=FILES)
def test_file_that_cannot_be_read_has_a_sentence_with_its_line(content, expected, tmp_path):
    assert file_sentences(tmp_path / "c.yaml", content) == expected


def test_aliases_and_merge_keys_are_followed(tmp_path):
    text = "update:\n  actor: &a {lr: 0.5, eps: 1e-3}\n  critic:\n    <<: *a\n    lr: 0.25\nrun: {}\n"
    assert read_text(tmp_path / "c.yaml", text) == {
        "update.actor.lr": 0.5,
        "update.actor.eps": 1e-3,
        "update.critic.eps": 1e-3,
        "update.critic.lr": 0.25,
    }


def test_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    assert read_text(tmp_path / "c.yaml", "\ufeffrun: {seed: 3}") == {"run.seed": 3}


@pytest.mark.parametrize("name", ["/nowhere.yaml", "~no_such_user/x.yaml", "x" * 5000, "a\0b"])
def test_file_that_is_not_there(name):
    (sentence,) = sentences("--config", name)
    assert sentence.startswith("--config ") and sentence.endswith(": no such file")


def test_folder_is_no_file(tmp_path):
    assert sentences("--config", str(tmp_path)) == (f"--config {tmp_path}: is a folder, not a file",)


def test_settings_file_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("run: {seed: 3}")
    assert read("--config=~/c.yaml").settings == {"run.seed": 3}


# The command line


def test_later_files_count_and_the_command_line_counts_most(tmp_path):
    (tmp_path / "a.yaml").write_text("run: {seed: 1, name: a}\nupdate: {actor: {lr: 0.1, eps: 0.1}}\n")
    (tmp_path / "b.yaml").write_text("run: {seed: 2}\nupdate: {actor: {lr: 0.2}}\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    expected = {"run.seed": 2, "run.name": "a", "update.actor.lr": 0.2, "update.actor.eps": 0.1}
    assert read(*files).settings == expected
    assert read("--run.seed", "3", *files).settings == read(*files, "--run", "{seed: 3}").settings
    assert read("--run.seed", "3", *files).settings == expected | {"run.seed": 3}
    assert read("--run.seed", "3", "--run.seed", "4").settings == {"run.seed": 4}


def test_sections_lists_and_mappings_on_the_command_line(tmp_path):
    (tmp_path / "r.yaml").write_text("group_size: 3\n")
    assert read("--rollout", str(tmp_path / "r.yaml"), "--run={seed: 3}").settings == {
        "rollout.group_size": 3,
        "run.seed": 3,
    }
    assert read("--update.actor", "{lr: 1e-3}").settings == {"update.actor.lr": 1e-3}
    assert read("--reward.functions", "[math]", "--reward.functions+", "off").settings["reward.functions"] == [
        "math",
        "off",
    ]
    assert read("--reward.functions+=[a, b]", "--reward.functions+=c").settings == {"reward.functions": ["a", "b", "c"]}
    options = ["--prompts.task_options", "{a: 1}", "--prompts.task_options.b", "off", "--prompts.task_options.c=1e-3"]
    assert read(*options).settings == {"prompts.task_options": {"a": 1, "b": False, "c": 1e-3}}


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            ["--rollout.group_sise", "3"],
            ["--rollout.group_sise: there is no such option; did you mean --rollout.group_size?"],
        ),
        (["--run.see", "4"], ["--run.see: there is no such option; did you mean --run.seed?"]),
        (["--lr=1"], ["--lr: there is no such option; did you mean --update.actor.lr or --update.critic.lr?"]),
        (["--run.seed"], ["--run.seed: needs a value"]),
        (["--run.seed", "--run.name", "x"], ["--run.seed: needs a value"]),
        (["--run.seed", "1", "2"], ["2: belongs to no option; put a value with spaces in quotes"]),
        (["--run.seed+", "1"], ["--run.seed+: only a list takes further items; use --run.seed"]),
        (["--rollout", "{group_size: 3, group_size: 4}"], ["--rollout: rollout.group_size is given twice; keep one"]),
        (["--rollout", "{group_size: }"], ["--rollout: rollout.group_size = null: must be a whole number"]),
        (
            ["--reward.functions", "[a"],
            ["--reward.functions: is not YAML: expected ',' or ']', but got '<stream end>'"],
        ),
        (["--num_ranks", "x"], ["--num_ranks = x: must be null or a whole number"]),
        (["--num-ranks", "x"], ["--num-ranks = x: must be null or a whole number"]),
        (
            ["--run.seed=x", "--run.sed=1"],
            ["run.seed = x: must be a whole number", "--run.sed: there is no such option; did you mean --run.seed?"],
        ),
    ],
    ids=str,
)
def test_argument_that_cannot_be_read(arguments, expected):
    assert list(sentences(*arguments, num_ranks=int | None)) == expected


def test_options_of_the_launcher_may_stand_in_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text("num_ranks: 2\nrun: {seed: 1}\n")
    given = read("--config", str(tmp_path / "c.yaml"), "--print_config", "--from-x", "--run.sed", num_ranks=int | None)
    assert (given.settings, given.options) == ({"run.seed": 1}, {"num_ranks": 2})
    assert given.flags == ["--print_config", "--from-x", "--run.sed"]


# The launchers


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["--num_processes", "-2"], "--num_processes = -2: must be greater than 0"),
        (["--num_processes", "1.5"], "--num_processes = 1.5: must be null or a whole number"),
        (["--run.seed", "x"], "run.seed = x: must be a whole number"),
        (["--print_config=x"], 'Invalid option "x" for --print_config'),
    ],
)
def test_launcher_ends_with_code_2_after_one_sentence(arguments, error, capsys):
    with pytest.raises(SystemExit) as end:
        colocated.parse(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize("option, value", [("--gpus", "0"), ("--gpus", "x"), ("--nodes", "-1"), ("--gpu-memory", "")])
def test_plan_ends_with_a_sentence_about_its_options(option, value, capsys):
    with pytest.raises((SystemExit, ConfigError)) as end:
        colocated.plan([option, value])
    error = capsys.readouterr().err if isinstance(end.value, SystemExit) else f"error: {end.value}\n"
    assert error.startswith(f"error: {option} = {value}: must be ") and error.count("\n") == 1


@pytest.mark.parametrize("path", sorted((ROOT / "launch" / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_settings_files_of_the_project_are_valid(path):
    assert validate(with_settings(Config(), read("--config", str(path)).settings))


def test_printed_settings_are_read_again(tmp_path, capsys):
    changes = {
        "run.name": "1e5",
        "run.dir": "off",
        "prompts.system_message": "a: b\n# \u00e9\n",
        "prompts.task_options": {"a": "1e5", "b": "1:30", "c": "010", "d": None, "e": [1.5, "y"]},
        "models.critic": "2026-01-01",
        "rollout.stop_strings": ["\t", "null", "\u0085", "\U0001f600"],
        "update.actor.lr": 1e-7,
        "run.profile_steps": (1, 2),
    }
    config = change(VALID_CONFIG, changes)
    (tmp_path / "c.yaml").write_text(dump(as_dict(config)))
    with pytest.raises(SystemExit) as end:
        read_settings(make_parser("test", None), ["--config", str(tmp_path / "c.yaml"), "--print_config"])
    assert end.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    for name in ("c.yaml", "printed.yaml"):
        assert read_settings(make_parser("test", None), [f"--config={tmp_path / name}"])[0] == config


# A file that a run writes


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def values(name: str) -> st.SearchStrategy[Any]:
    """Return values of the type, and in the range, of a setting."""
    low, high = _bounds(name)
    numbers = {int: st.integers(int(low), int(high)), float: st.floats(low, high)}
    kinds = [_values_of(kind, numbers) for kind in alternatives(setting_types()[name])]
    return st.one_of(*([st.none()] if is_optional(setting_types()[name]) else []), *kinds)


def _values_of(kind: Any, numbers: dict[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    items = get_args(kind)
    match get_origin(kind) or kind:
        case origin if origin is Literal:
            return st.sampled_from(items)
        case origin if origin is list:
            return st.lists(_values_of(items[0], numbers) if items else PLAIN, max_size=3)
        case origin if origin is tuple:
            return st.tuples(*(_values_of(item, numbers) for item in items))
    plain = {str: st.text(), bool: st.booleans(), dict: st.dictionaries(st.text(), PLAIN, max_size=3)}
    return (numbers | plain)[kind]


def _bounds(name: str) -> tuple[float, float]:
    bounds = RANGES.get(name)
    return (max(bounds.low, -1e300), min(bounds.high, 1e300)) if bounds else (0, 1)


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_settings_file_of_a_run_is_read_to_the_same_settings(tmp_path_factory, data):
    names = data.draw(st.sets(st.sampled_from(list(setting_types())), max_size=12))
    config = with_settings(VALID_CONFIG, {name: data.draw(values(name), label=name) for name in sorted(names)})
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    for text in (dump(as_dict(config)), yaml.safe_dump(as_dict(config), default_flow_style=True)):
        if text.startswith("{") and get_setting(config, "prompts.task_options"):
            continue  # another writer leaves text such as 1e5 without quotes
        path.write_text(text, encoding="utf-8")
        assert with_settings(Config(), read("--config", str(path)).settings) == config
