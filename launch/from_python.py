"""Training from a Python program: settings, functions, environments and rows as objects, see hybrid_rl.train."""

import inspect
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_rl.atomic import writing
from hybrid_rl.config import Config, ConfigError, Findings, check
from hybrid_rl.data.formats import recognise
from hybrid_rl.machine.environment import check_environment
from hybrid_rl.rewards.given import giving
from hybrid_rl.settings.types import with_settings
from hybrid_rl.settings.yaml_format import dump
from hybrid_rl.validate import validate

from .colocated import choose_accelerator, num_visible_gpus
from .command_line import read_command_line
from .ranks import run_rank
from .settings import prepare

logger = logging.getLogger(__name__)


def train(
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    *,
    reward_functions: Sequence[Callable[..., object]] = (),
    environment: Callable[..., object] | None = None,
    tools: Sequence[Callable[..., object]] = (),
    dataset: Any = None,
    eval_dataset: Any = None,
) -> dict[str, float]:
    """Train as hybrid_rl.train says; every rank calls it.

    Raises:
        ConfigError: a setting, a function or a row cannot work.
        RunError: the run cannot go on.
    """
    if callable(reward_functions):
        reward_functions = [reward_functions]
    environments = [] if environment is None else [environment]
    objects = {"reward_functions": reward_functions, "environment": environments, "tools": tools}
    with giving(objects) as names:
        settings = read_config(config)
        reward = replace(settings.reward, functions=[*settings.reward.functions, *names["reward_functions"]])
        settings = with_tools(replace(settings, reward=reward), names["tools"])
        if environment is not None:
            settings = with_environment(settings, names["environment"][0], is_agent=not inspect.isclass(environment))
        settings = with_rows(settings, dataset, setting="prompts.path", name="dataset")
        settings = with_rows(settings, eval_dataset, setting="prompts.eval_path", name="eval_dataset")
        return run(settings)


def read_config(config: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Config:
    """Return settings from an object, a dictionary of settings or of sections, or a YAML file.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or of another type.
    """
    if isinstance(config, Config):
        return config
    given = dump(dict(config), default_flow_style=True) if isinstance(config, Mapping) else os.fspath(config)
    return with_settings(Config(), read_command_line([f"--config={given}"], options={}, flags=()).settings)


def with_tools(config: Config, names: Sequence[str]) -> Config:
    """Return the settings with further tools."""
    tools = [*config.environment.tools, *names]
    return replace(config, environment=replace(config.environment, tools=tools))


def with_environment(config: Config, name: str, *, is_agent: bool) -> Config:
    """Return the settings with an environment.

    Args:
        name: of the class, or of the function of an agent.
        is_agent: whether it is a function.
    Raises:
        ConfigError: the settings name an environment of their own.
    """
    section = config.environment
    check(section.name is None, "environment.name and environment both give an environment: remove one of them")
    if not is_agent:
        return replace(config, environment=replace(section, name=name))
    arguments = {**section.arguments, "agent": name}
    return replace(config, environment=replace(section, name="chat_agent", arguments=arguments))


def with_rows(config: Config, rows: Any, *, setting: str, name: str) -> Config:
    """Return the settings with a file of the rows, which lies next to the run's folder, as their data.

    A column `answer`, which is the default, is not asked for where the first row has none in any known format.

    Args:
        rows: list of dictionaries, or a datasets.Dataset; None leaves the settings as they are.
        setting: setting that gets the file's path.
        name: argument that has given the rows, for messages and the file.
    Raises:
        ConfigError: the rows are something else, or the settings name data of their own.
    """
    if rows is None:
        return config
    prompts, field = config.prompts, setting.partition(".")[2]
    check(not getattr(prompts, field), f"{setting} and {name} both give data: remove one of them")
    path = write_rows(rows, Path(config.run.dir).expanduser() / f"{config.run.name}.{name}", name)
    name_of_format = recognise(dict(rows[0]), prompt_column=prompts.prompt_column, answer_column=prompts.answer_column)
    is_plain = "plain" in (prompts.format, name_of_format if prompts.format == "auto" else None)
    has_answers = not is_plain or "answer" in rows[0] or prompts.answer_column != "answer"
    answer_column = prompts.answer_column if has_answers else None
    return with_settings(config, {setting: str(path), "prompts.answer_column": answer_column})


def write_rows(rows: Any, stem: Path, name: str) -> Path:
    """Write rows to a file, and return its path.

    Args:
        rows: list of dictionaries, or a datasets.Dataset.
        stem: path without the ending.
        name: argument that has given the rows, for messages.
    Raises:
        ConfigError: the rows are something else, there are none, or a value cannot be written.
    """
    is_table = hasattr(rows, "to_parquet") and hasattr(rows, "column_names")
    is_list = isinstance(rows, Sequence) and not isinstance(rows, str | bytes)
    kind = f"{type(rows).__module__}.{type(rows).__qualname__}"
    check(is_table or is_list, f"{name} is a {kind}: give a list of dictionaries or a datasets.Dataset")
    check(len(rows) > 0, f"{name} holds no rows")
    path = stem.with_name(stem.name + (".parquet" if is_table else ".jsonl"))
    # All ranks write the same rows, also those of another node with the same file system.
    written = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_table:
            rows.to_parquet(str(written))
        else:
            written.write_text("".join(_line(row, number, name) for number, row in enumerate(rows)), encoding="utf-8")
        written.replace(path)
    return path


def _line(row: Any, number: int, name: str) -> str:
    check(isinstance(row, Mapping), f"{name}: row {number} is a {type(row).__name__}: give a dictionary of columns")
    try:
        return json.dumps(dict(row), allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name}: row {number} cannot be written as JSON ({error}): give text, finite numbers, lists "
            "and dictionaries"
        ) from error


def run(config: Config) -> dict[str, float]:
    """Train as the rank that the environment names, alone without RANK and WORLD_SIZE; return the last evaluation.

    Raises:
        ConfigError: a setting or an input file cannot work.
        RunError: the run cannot go on.
    """
    choose_accelerator()
    findings = Findings()
    findings.run(lambda: validate(config))
    findings.run(lambda: check_environment(os.environ))
    findings.raise_any()
    num_gpus, num_ranks = num_visible_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_gpus > num_ranks:
        logger.warning(
            "%d GPUs are visible, of which this program uses %d: start it with torchrun --nproc-per-node %d to use all",
            num_gpus,
            num_ranks,
            num_gpus,
        )
    return run_rank(prepare(config), handles_signals=False)
