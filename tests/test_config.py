"""Settings in code and on the command line of launch/colocated.py, and the errors that a user sees."""

import ast
import dataclasses
import importlib.util
import inspect
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from hybrid_rl.config import Config, ConfigError, Findings, as_dict, check
from tests.conftest import VALID_CONFIG, change
from tests.programs import ProgramResult

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "launch" / "colocated.py"


def test_derived_settings():
    sizes = {"rollout.rollout_batch_size": 6, "rollout.group_size": 4}
    config = change(VALID_CONFIG, {**sizes, "run.name": "x", "run.dir": "d"})
    assert config.responses_per_step == 24
    assert config.run_dir == Path("d/x")
    assert config.has_critic and not config.has_reference
    assert change(config, {"advantage.kl_coef": 0.1}).has_reference
    assert not change(config, {"advantage.estimator": "rloo"}).has_critic
    assert not config.needs_greedy and change(config, {"advantage.estimator": "remax"}).needs_greedy


# The command line


@pytest.fixture(scope="module")
def colocated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("colocated", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documented_fields(cls: type) -> dict[str, str]:
    """Return field -> docstring below it, from the source of the dataclass."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    texts = [*definition.body[1:], None]
    return {
        statement.target.id: ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
        for statement, after in zip(definition.body, texts, strict=True)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def test_help_documents_every_field(colocated, capsys):
    with pytest.raises(SystemExit) as end:
        colocated.parse(["--help"])
    assert end.value.code == 0
    words = capsys.readouterr().out.split()
    spaced, text = " ".join(words), "".join(words)  # --help breaks lines at hyphens too, by the terminal's width
    num_fields = 0

    def walk(cls: type, prefix: str) -> None:
        nonlocal num_fields
        for field in dataclasses.fields(cls):
            name = f"{prefix}{field.name}"
            assert f"--{name} " in spaced
            if dataclasses.is_dataclass(field.type):
                walk(field.type, f"{name}.")
                continue
            meaning = documented_fields(cls)[field.name]
            assert meaning, f"{name} has no text"
            assert "".join(meaning.split()) in text, f"{name}: {meaning}"
            num_fields += 1

    walk(Config, "")
    assert num_fields > 70


def test_print_config_gives_yaml_that_loads_equal(colocated, capsys, tmp_path):
    arguments = ["--rollout.group_size", "3", "--update.actor.betas", "[0.8, 0.9]", "--num_processes", "1"]
    config, num_processes = colocated.parse(arguments)
    assert (config.rollout.group_size, config.update.actor.betas, num_processes) == (3, (0.8, 0.9), 1)
    with pytest.raises(SystemExit) as end:
        colocated.parse([*arguments, "--print_config"])
    assert end.value.code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert colocated.parse(["--config", str(path)]) == (config, 1)


def test_resolved_config_of_a_run_loads_equal(colocated, tmp_path):
    changes = {"reward.weights": [0.5], "rollout.stop_token_ids": [3], "prompts.task_options": {"a": 1}}
    config = change(VALID_CONFIG, changes)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(as_dict(config), sort_keys=False))
    assert colocated.parse([f"--config={path}"])[0] == config


def test_arguments_override_the_file(colocated, tmp_path):
    (tmp_path / "c.yaml").write_text("run: {seed: 4, name: file}\n")
    config, _ = colocated.parse(["--config", str(tmp_path / "c.yaml"), "--run.seed", "5"])
    assert (config.run.seed, config.run.name) == (5, "file")
    assert config == change(Config(), {"run.seed": 5, "run.name": "file"})  # and nothing of the demo


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny models and their data."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(tiny, root, dirs_exist_ok=True)
    return root


@pytest.fixture
def settings(models: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings that would run on the CPU."""
    return {
        "run": {"dir": str(tmp_path / "runs")},
        "models": {"actor": str(models / "policy"), "reward": str(models / "reward")},
        "prompts": {"path": str(models / "prompts.jsonl"), "max_prompt_tokens": 8},
        "rollout": {"engine": "hf", "rollout_batch_size": 4, "max_response_tokens": 8},
        "update": {"mini_batch_size": 4},
    }


@pytest.fixture
def start(fork_servers, settings, tmp_path):
    """Run the script with the settings and further arguments in a new process."""

    def run(*arguments: str) -> ProgramResult:
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(settings))
        fork_servers[0].start(str(SCRIPT), "--config", str(config), *arguments, environment=environment())
        ended = fork_servers[0].wait()
        written = [path.name for path in (tmp_path / "runs").rglob("*") if path.is_file()]
        assert set(written) <= {"lock"}  # a rejected run writes no other file
        return ended

    return run


def test_a_folder_without_weights_is_refused(start, models, tmp_path):
    shutil.copytree(models / "policy", tmp_path / "policy", ignore=shutil.ignore_patterns("*.safetensors"))
    ended = start("--models.actor", str(tmp_path / "policy"))
    sentence = "the folder holds no weights, no model.safetensors"
    assert ended.error_sentence() == f"models.actor = {tmp_path / 'policy'}: {sentence}"


def test_script_prints_the_stages_of_its_start_and_an_error(settings, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--config", str(tmp_path / "config.yaml"), "--prompts.path", "/nowhere.jsonl"],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=tmp_path,
    )
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    ended = ProgramResult(code=done.returncode, output=done.stderr, cpu_s=seconds)
    assert ended.error_sentence() == "prompts.path = /nowhere.jsonl: no such file or folder"
    assert all(line.startswith("start: ") for line in done.stdout.splitlines()) and ended.cpu_s < 20


@pytest.mark.parametrize("form", ["argument", "file"])
def test_unknown_field(start, settings, form):
    if form == "file":
        settings["rollout"]["group_sise"] = 3
        ended = start()
    else:
        ended = start("--rollout.group_sise", "3")
    assert "group_sise" in ended.error_sentence() and ended.cpu_s < 15


@pytest.mark.parametrize(
    "argument, value", [("--rollout.engine", "sglang"), ("--run.seed", "x"), ("--update.zero_stage", "4")]
)
def test_value_of_the_wrong_kind(start, argument, value):
    ended = start(argument, value)
    sentence = ended.error_sentence()
    assert argument.removeprefix("--") in sentence and value in sentence and ended.cpu_s < 15


def test_config_file_that_is_not_there(start):
    assert "/nowhere.yaml" in start("--config", "/nowhere.yaml").error_sentence()


def test_missing_prompts_file(start):
    ended = start("--prompts.path", "/nowhere.jsonl")
    assert ended.error_sentence() == "prompts.path = /nowhere.jsonl: no such file or folder"
    assert ended.cpu_s < 15


def test_missing_column_lists_the_columns(start, models):
    ended = start("--prompts.prompt_column", "question")
    path = models / "prompts.jsonl"
    assert ended.error_sentence() == (
        f"prompts.path = {path}: row 0 has no column 'question'; set prompts.prompt_column to one of: prompt, answer"
    )
    assert ended.cpu_s < 15


def test_empty_data_set(start, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    ended = start("--prompts.path", str(tmp_path / "empty.jsonl"))
    assert ended.error_sentence() == f"prompts.path = {tmp_path / 'empty.jsonl'}: holds no rows"
    assert ended.cpu_s < 15


def test_sequence_longer_than_the_model_shows_the_sum(start, models):
    ended = start("--prompts.max_prompt_tokens", "40", "--rollout.max_response_tokens", "25")
    assert ended.error_sentences()[0] == (
        "prompts.max_prompt_tokens 40 + rollout.max_response_tokens 25 = 65: "
        f"models.actor = {models / 'policy'} takes at most 64 tokens; lower one of the two"
    )
    assert ended.cpu_s < 15


@pytest.mark.parametrize("field", ["actor", "reward", "critic"])
@pytest.mark.parametrize("kind", ["absent", "empty"])
def test_model_folder_that_holds_no_model(start, tmp_path, field, kind):
    path = tmp_path / "not_a_model"
    if kind == "empty":
        path.mkdir()
    ended = start(f"--models.{field}", str(path))
    sentence = ended.error_sentences()[0]  # the folder of a reward model has no tokenizer either
    assert sentence.startswith(f"models.{field} = {path}: ") and "no " in sentence
    assert ended.cpu_s < 15


def test_reward_model_with_another_tokenizer(start, models, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models / "reward", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    ended = start("--models.reward", str(other))
    assert ended.error_sentence() == (
        f"models.critic is null and would start as models.reward = {other}, whose tokenizer is not the actor's: "
        "give a critic, such as the actor's folder"
    )
    assert ended.cpu_s < 15


def test_group_estimator_without_groups(start):
    ended = start("--advantage.estimator", "grpo")
    assert ended.error_sentence() == "rollout.group_size = 1: advantage.estimator = grpo needs 2 or more"
    assert ended.cpu_s < 15


def test_prompt_that_is_too_long(start):
    sentence = start("--prompts.max_prompt_tokens", "3").error_sentence()
    assert "10 of 10 prompts are longer than prompts.max_prompt_tokens = 3, first row 0 with 4 tokens" in sentence


def test_resume_without_a_checkpoint(start, tmp_path):
    sentence = start("--run.resume", "must").error_sentence()
    assert sentence == f"run.resume = must: {tmp_path / 'runs' / 'demo'} has no checkpoint; use auto"


def test_findings_are_reported_together_and_each_once() -> None:
    findings = Findings()
    assert findings.run(lambda: 3) == 3
    for ok, message in (
        (False, "a.b = 1: wrong"),
        (True, "never"),
        (False, "c.d = 2: wrong"),
        (False, "a.b = 1: wrong"),
    ):
        assert findings.run(lambda ok=ok, message=message: check(ok, message)) is None
    with pytest.raises(ConfigError) as error:
        findings.raise_any()
    assert error.value.messages == ("a.b = 1: wrong", "c.d = 2: wrong")
    assert str(error.value) == "a.b = 1: wrong\nc.d = 2: wrong"
    assert pickle.loads(pickle.dumps(error.value)).messages == error.value.messages  # Ray sends it between processes
