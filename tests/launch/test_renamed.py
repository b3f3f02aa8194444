"""Former names of settings: accepted wherever a name may stand, each with a warning that names the setting."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_rl.config import Config, ConfigError, as_dict
from launch import colocated
from launch.renamed import RENAMED
from launch.settings import make_parser, read_settings

VALUES: dict[str, Any] = {
    "checkpoint.overlap": False,
    "models.reference_alpha": 0.25,
    "models.reference_every_steps": 3,
    "prompts.num_eval": 7,
    "prompts.overlong": "drop",
    "rollout.keep_scores": (0.25, 0.75),
    "rollout.max_refills": 2,
}
"""Former name -> a value that is not the default."""


def read(*arguments: str) -> Config:
    return read_settings(make_parser("test", None), list(arguments))[0]


def value_of(config: Config, name: str) -> Any:
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


def written(value: Any) -> str:
    return yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True).split("\n")[0]


def warning(name: str) -> str:
    return f"warning: {name} is now {RENAMED[name]}\n"


def test_every_former_name_leads_to_a_setting():
    names = {f"{section}.{field}" for section, fields in as_dict(Config()).items() for field in fields}
    assert set(RENAMED.values()) <= names
    assert not names & RENAMED.keys()
    assert RENAMED.keys() == VALUES.keys()


@pytest.mark.parametrize("name", RENAMED)
@pytest.mark.parametrize("form", ["flag", "flag=value", "section", "file", "file with a dotted key"])
def test_former_name_sets_the_setting_and_warns_once(name, form, tmp_path, capsys):
    section, field = name.split(".")
    value, path = written(VALUES[name]), tmp_path / "old.yaml"
    path.write_text(f"{name}: {value}\n" if "dotted" in form else f"{section}:\n  {field}: {value}\n")
    arguments = {
        "flag": [f"--{name}", value],
        "flag=value": [f"--{name}={value}"],
        "section": [f"--{section}", f"{{{field}: {value}}}"],
    }.get(form, ["--config", str(path)])
    assert value_of(read(*arguments), RENAMED[name]) == VALUES[name]
    assert capsys.readouterr().err == warning(name)


def test_file_keeps_its_other_values(tmp_path, capsys):
    (tmp_path / "old.yaml").write_text(
        "run: {name: old, profile_steps: [1, 2]}\nprompts: {num_eval: 7, task_options: {a: two}}\n"
        "update: {actor: {lr: 1e-5}}\nmodels: {actor: '12'}\n"
    )
    config = read(f"--config={tmp_path / 'old.yaml'}")
    assert (config.run.name, config.run.profile_steps, config.prompts.max_eval_samples) == ("old", (1, 2), 7)
    assert (config.prompts.task_options, config.update.actor.lr, config.models.actor) == ({"a": "two"}, 1e-5, "12")
    assert capsys.readouterr().err == warning("prompts.num_eval")


def test_resolved_config_of_an_older_run_loads_equal(tmp_path, capsys):
    former = {current: name for name, current in RENAMED.items()}
    tree = {
        section: {former.get(f"{section}.{field}", f".{field}").split(".")[1]: value for field, value in fields.items()}
        for section, fields in as_dict(Config()).items()
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    assert read("--config", str(tmp_path / "config.yaml")) == Config()
    assert sorted(capsys.readouterr().err.splitlines(keepends=True)) == sorted(map(warning, RENAMED))


@pytest.mark.parametrize("form", ["flags", "file"])
def test_both_names_at_once_are_an_error(form, tmp_path, capsys):
    path = tmp_path / "both.yaml"
    path.write_text("prompts: {num_eval: 7, max_eval_samples: 8}\n")
    flags = ["--prompts.num_eval=7", "--prompts.max_eval_samples", "8"]
    with pytest.raises(SystemExit) as end:
        read(*(flags if form == "flags" else ["--config", str(path)]))
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: prompts.num_eval and prompts.max_eval_samples are one setting, which has two values: "
        "remove prompts.num_eval, its former name\n"
    )


def test_former_name_on_the_command_line_overrides_the_file(tmp_path):
    (tmp_path / "new.yaml").write_text("prompts: {max_eval_samples: 8}\n")
    assert read("--config", str(tmp_path / "new.yaml"), "--prompts.num_eval=7").prompts.max_eval_samples == 7
    assert read("--prompts.num_eval=7").prompts.max_eval_samples == 7  # the demo's file gives it, too


def test_plan_accepts_former_names(capsys):
    with pytest.raises(ConfigError, match=r"^prompts\.max_eval_samples = 0: must be"):
        colocated.plan(["--prompts.num_eval", "0"])
    assert capsys.readouterr().err == warning("prompts.num_eval")


def test_both_launchers_accept_former_names(capsys):
    from launch import ray_cluster  # imports Ray, which takes seconds

    for parse in (colocated.parse, ray_cluster.parse):
        assert parse(["--rollout.max_refills", "2"])[0].rollout.dynamic_filtering_max_retries == 2
        assert capsys.readouterr().err == warning("rollout.max_refills")


def test_command_line_of_another_system_is_left_alone(capsys):
    with pytest.raises(SystemExit) as end:
        colocated.parse(["--from-openrlhf", "--prompts.num_eval", "7"])
    assert end.value.code == 2
    assert "OpenRLHF's train_ppo_ray has no --prompts.num_eval" in capsys.readouterr().err


def test_text_of_every_field_has_the_current_names():
    text = (Path(colocated.ROOT) / "hybrid_rl" / "config.py").read_text()
    fields = {field.name for section in dataclasses.fields(Config) for field in dataclasses.fields(section.type)}
    former = {name.split(".")[1] for name in RENAMED}
    assert not former & fields
    assert not [name for name in RENAMED if f"`{name}`" in text or f"`{name.split('.')[1]}`" in text]
