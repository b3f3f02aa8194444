"""Prompts: rows of a file or of a generated task, and their token ids."""

import difflib
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Number
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl import serialization
from hybrid_rl.batch import Prompt
from hybrid_rl.config import ConfigError, PromptsConfig, check
from hybrid_rl.data.chat import render_chat
from hybrid_rl.data.files import EVALUATION_SPLITS, TRAINING_SPLITS, Message, column_of, is_chat
from hybrid_rl.data.formats import FORMATS, SOURCE, format_of, standardise
from hybrid_rl.data.json_rows import Row
from hybrid_rl.data.sources import read_source
from hybrid_rl.data.template import Template, load_template
from hybrid_rl.models.tokenizer import encode
from hybrid_rl.rewards.rules import import_reasoning_gym

logger = logging.getLogger(__name__)

TASK_PREFIX = "reasoning_gym:"
MISSING = ("nan", "none", "null", "na", "n/a", "<na>")
"""Texts that pandas, Python and spreadsheets write for the missing values of a column of numbers."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one data set."""

    source: str
    """Setting and data set, for messages."""
    prompts: list[Prompt]
    format: str
    """Format of the rows, or `task` for a generated task."""
    num_rows: int
    """Rows that were read; the overlong ones among them may have been dropped."""


def load_rows(
    path: str,
    config: PromptsConfig,
    *,
    seed: int,
    num_rows: int | None = None,
    is_evaluation: bool | None = None,
    data_source: str | None = None,
) -> list[Row]:
    """Return the rows of a data set, after checking that each has a prompt and, if `answer_column` is set, an answer.

    Args:
        path: file, folder or `reasoning_gym:<task>`, as in prompts.path.
        seed: of the rows that a `reasoning_gym:<task>` generates; files ignore it.
        num_rows: number of rows to take from the start, or to generate; None takes all, or generates `num_generated`.
        is_evaluation: whether a DatasetDict gives its held-out rows; None does if only prompts.eval_path names it.
        data_source: name of the data set for the column SOURCE; None keeps the column of the format, if it has one.
    Raises:
        ConfigError: the data set cannot be read, or a row lacks a column or has a value of another type.
    """
    rows, _ = _load(path, config, seed, num_rows, is_evaluation, data_source)
    return rows


def source_name(path: str, config: PromptsConfig, is_evaluation: bool | None = None) -> str:
    """Return what a message calls a data set; see load_rows."""
    return f"prompts.{'eval_path' if _is_evaluation(path, config, is_evaluation) else 'path'} = {path}"


def _is_evaluation(path: str, config: PromptsConfig, is_evaluation: bool | None) -> bool:
    return path == config.eval_path != config.path if is_evaluation is None else is_evaluation


def _load(
    path: str,
    config: PromptsConfig,
    seed: int,
    num_rows: int | None,
    is_evaluation: bool | None,
    data_source: str | None,
) -> tuple[list[Row], str]:
    """Return the rows of a data set and the name of their format; see load_rows."""
    is_evaluation = _is_evaluation(path, config, is_evaluation)
    source = source_name(path, config, is_evaluation)
    if path.startswith(TASK_PREFIX):
        rows = _generate_rows(path.removeprefix(TASK_PREFIX), config, source, seed, num_rows or config.num_generated)
        name, has_answer = "task", False  # some tasks have no single answer; their scorer reads the entry instead
    else:
        split, splits = (config.eval_split, EVALUATION_SPLITS) if is_evaluation else (config.split, TRAINING_SPLITS)
        rows = read_source(path, source=source, text_column=config.prompt_column, split=split, splits=splits)[:num_rows]
        rows, name = _read_format(rows, config, source)
        has_answer = config.answer_column is not None and (name == "plain" or FORMATS[name].has_answer)
    check(bool(rows), f"{source}: holds no rows")
    _check_rows(rows, config, source, has_answer=has_answer)
    return [row | {SOURCE: data_source} for row in rows] if data_source else rows, name


def _check_rows(rows: Sequence[Row], config: PromptsConfig, source: str, *, has_answer: bool) -> None:
    """Check that each row has a prompt and, if it must, an answer."""
    for number, row in enumerate(rows):
        where = f"{source}: row {number}"
        _prompt_of(row, config, where)
        check(
            not has_answer or _answer_of(row, config, where) is not None,
            f"{where}: '{config.answer_column}' (prompts.answer_column) is empty",
        )
    if has_answer:
        answers = [answers_of(_answer_of(row, config, source)) for row in rows]
        _check_missing_numbers(answers, config, source)


def _read_format(rows: list[Row], config: PromptsConfig, source: str) -> tuple[list[Row], str]:
    """Return the rows with prompt and answer in the columns of the settings, and the name of their format."""
    prompt_column, answer_column = config.prompt_column, config.answer_column
    name = format_of(rows, config.format, prompt_column=prompt_column, answer_column=answer_column)
    return standardise(rows, name, prompt_column=prompt_column, answer_column=answer_column, source=source), name


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    config: PromptsConfig,
    *,
    prompt_id: int = 0,
    template: Template | None = None,
) -> Prompt:
    """Return the prompt of a row, with the token ids that the engine and the trainer both use.

    Text is tokenized with the special tokens that the tokenizer adds. Chat messages are rendered by the chat template,
    the tokenizer's or that of `template_path`, up to the start of the response. A BOS that both the template and the
    tokenizer add occurs once.

    Args:
        row: `prompt_column` is text or chat messages; `answer_column` may be missing; other columns become metadata.
        prompt_id: row number in the data set.
        template: content of `template_path`; None reads the file.
    Raises:
        ConfigError: the row gives no tokens, its chat cannot be rendered, or a column has a value of a type that
            serialization.encode does not take.
    """
    where = f"row {prompt_id}"
    value = _prompt_of(row, config, where)
    if template is None:
        template = load_template(config.template_path, tokenizer)
    if isinstance(value, str) and not config.chat:
        _check_plain(config, template, where)
        text, prefill, undated = value, "", None
    else:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        chat = render_chat(tokenizer, messages, config, template, where)
        text, prefill, undated = chat.text, chat.prefill, chat.undated_text
    token_ids = encode(tokenizer, text)
    check(bool(token_ids), f"{where}: its prompt {text!r} gives no tokens")
    metadata = {name: v for name, v in row.items() if name not in (config.prompt_column, config.answer_column)}
    if template.response_format_tags:
        metadata["response_format_tags"] = template.response_format_tags
    _check_metadata(metadata, where)

    return Prompt(
        prompt_id=prompt_id,
        text=text,
        token_ids=token_ids,
        undated_token_ids=None if undated is None else encode(tokenizer, undated),
        prefill=prefill,
        messages=None if isinstance(value, str) else value,
        user_text=value if isinstance(value, str) and config.chat else None,
        answer=_answer_of(row, config, where) if config.answer_column in row else None,
        metadata=metadata,
    )


def load_prompts(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    config: PromptsConfig,
    *,
    seed: int,
    num_rows: int | None = None,
    is_evaluation: bool | None = None,
    data_source: str | None = None,
) -> PromptSet:
    """Return the prompts of a data set in its order; overlong prompts are an error, or dropped with a warning.

    `prompt_id` is the row number in the data set, also after rows are dropped.

    Args:
        path, config, seed, num_rows, is_evaluation, data_source: see `load_rows`.
        tokenizer: the actor's.
    Raises:
        ConfigError: as `load_rows` and `encode_prompt`; a prompt is too long and `overlong_prompts` is error; no
            prompt is left.
    """
    rows, format_name = _load(path, config, seed, num_rows, is_evaluation, data_source)
    template = load_template(config.template_path, tokenizer)
    prompts = [
        encode_prompt(tokenizer, row, config, prompt_id=number, template=template) for number, row in enumerate(rows)
    ]
    return PromptSet(
        source=source_name(path, config, is_evaluation),
        prompts=_without_overlong(prompts, config, path),
        format=format_name,
        num_rows=len(rows),
    )


def _without_overlong(prompts: list[Prompt], config: PromptsConfig, path: str) -> list[Prompt]:
    """Return the prompts that are not longer than max_prompt_tokens."""
    kept = [p for p in prompts if len(p.token_ids) <= config.max_prompt_tokens]
    if len(kept) == len(prompts):
        return kept
    first = next(p for p in prompts if len(p.token_ids) > config.max_prompt_tokens)
    finding = (
        f"{path}: {len(prompts) - len(kept)} of {len(prompts)} prompts are longer than prompts.max_prompt_tokens = "
        f"{config.max_prompt_tokens}, first row {first.prompt_id} with {len(first.token_ids)} tokens"
    )
    check(config.overlong_prompts == "drop", f"{finding}: raise the limit or set prompts.overlong_prompts = drop")
    check(bool(kept), f"{finding}: prompts.overlong_prompts = drop leaves none")
    logger.warning("%s: dropped", finding)
    return kept


def _prompt_of(row: Row, config: PromptsConfig, where: str) -> str | list[Message]:
    value = column_of(row, config.prompt_column, field="prompts.prompt_column", where=where)
    check(
        isinstance(value, str) or is_chat(value),
        f"{where}: '{config.prompt_column}' (prompts.prompt_column) must be text, or a list of messages with text in "
        f"`role` and `content`; got {str(value)[:80]!r}",
    )
    return value


def _answer_of(row: Row, config: PromptsConfig, where: str) -> str | list[str] | None:
    """Return the answer of a row as text; a list where the row has a list of right answers."""
    value = column_of(row, config.answer_column, field="prompts.answer_column", where=where)
    if isinstance(value, list):
        check(bool(value), f"{where}: '{config.answer_column}' (prompts.answer_column) is an empty list")
        return [_answer_text(item, config, where) for item in value]
    return None if value is None else _answer_text(value, config, where)


def _answer_text(value: Any, config: PromptsConfig, where: str) -> str:
    column = f"{where}: '{config.answer_column}' (prompts.answer_column)"
    check(
        isinstance(value, str | Number) and not isinstance(value, bool),
        f"{column} must be text, a number or a list of them, got {str(value)[:80]!r}",
    )
    text = str(value)
    check(
        bool(text.strip()) and (isinstance(value, str) or isfinite(value)),
        f"{column} is empty or not a finite number, got {text[:80]!r}",
    )
    return text


def answers_of(answer: str | list[str] | None) -> list[str]:
    """Return the right answers of a prompt; none if it has none."""
    return answer if isinstance(answer, list) else [] if answer is None else [answer]


def _check_missing_numbers(answers: Sequence[list[str]], config: PromptsConfig, source: str) -> None:
    """Raise ConfigError if a word of MISSING is among answers that are numbers; among other texts it is an answer.

    Args:
        answers: the right answers of each row.
    """
    texts = [(number, text) for number, found in enumerate(answers) for text in found]
    missing = [(number, text) for number, text in texts if text.strip().casefold() in MISSING]
    others = [text for _, text in texts if text.strip().casefold() not in MISSING]
    if not missing or not all(map(_is_number, others)):
        return
    number, text = missing[0]
    raise ConfigError(
        f"{source}: row {number}: '{config.answer_column}' (prompts.answer_column) is {text!r}, and the other answers "
        "are numbers, so that it stands for a missing one: give the number, or remove the row"
    )


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text.replace(",", "")))
    except ValueError:
        return False


def _check_metadata(metadata: Row, where: str) -> None:
    """Raise ConfigError if other ranks and the scorers cannot be sent a column."""
    for name, value in metadata.items():
        try:
            serialization.encode(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: column '{name}': {error}; remove the column, or write it as text") from error


def _check_plain(config: PromptsConfig, template: Template, where: str) -> None:
    """Raise ConfigError if a setting that applies only to chat prompts is set."""
    for value, name in (
        (config.system_message, "prompts.system_message"),
        (template.system_message, f"system_message in prompts.template_path = {config.template_path}"),
        (template.chat_template, f"chat_template in prompts.template_path = {config.template_path}"),
    ):
        check(value is None, f"{name} is set but {where} is text: give chat messages or prompts.chat = true")


def _generate_rows(task: str, config: PromptsConfig, source: str, seed: int, num_rows: int) -> list[Row]:
    reasoning_gym = import_reasoning_gym()
    known = reasoning_gym.factory.DATASETS
    close = ", ".join(difflib.get_close_matches(task, known, n=5)) or ", ".join(sorted(known))
    check(task in known, f"{source}: reasoning_gym has no task '{task}'; did you mean: {close}")
    # A task seeds entry i with seed + i, so adjacent seeds of training and evaluation would share most entries.
    spread_seed = random.Random(seed).getrandbits(31)
    try:
        entries = reasoning_gym.create_dataset(task, size=num_rows, seed=spread_seed, **config.task_options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{source}: prompts.task_options = {config.task_options} do not suit it: {error}") from error
    answer_column = config.answer_column or "answer"
    return [{config.prompt_column: e["question"], answer_column: e["answer"], "entry": e} for e in entries]
