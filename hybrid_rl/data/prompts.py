"""Prompts: rows of a file or of a generated task, their token ids, and the order in which steps take them."""

import difflib
import hashlib
import logging
import random
from math import isfinite
from numbers import Number
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl import serialization
from hybrid_rl.batch import Prompt
from hybrid_rl.config import ConfigError, PromptsConfig, check
from hybrid_rl.data.chat import render_chat
from hybrid_rl.data.files import EVALUATION_SPLITS, TRAINING_SPLITS, Message, column_of, is_chat
from hybrid_rl.data.formats import FORMATS, format_of, standardise
from hybrid_rl.data.json_rows import Row
from hybrid_rl.data.sources import read_source
from hybrid_rl.data.template import Template, load_template
from hybrid_rl.models.tokenizer import encode
from hybrid_rl.rewards.rules import import_reasoning_gym

logger = logging.getLogger(__name__)

TASK_PREFIX = "reasoning_gym:"
MISSING = ("nan", "none", "null", "na", "n/a", "<na>")
"""Texts that pandas, Python and spreadsheets write for the missing values of a column of numbers."""


def load_rows(
    path: str, config: PromptsConfig, *, seed: int, num_rows: int | None = None, is_evaluation: bool | None = None
) -> list[Row]:
    """Return the rows of a data set, after checking that each has a prompt and, if `answer_column` is set, an answer.

    Args:
        path: file, folder or `reasoning_gym:<task>`, as in prompts.path.
        seed: of the rows that a `reasoning_gym:<task>` generates; files ignore it.
        num_rows: number of rows to take from the start, or to generate; None takes all, or generates `num_generated`.
        is_evaluation: whether a DatasetDict gives its held-out rows; None does if only prompts.eval_path names it.
    Raises:
        ConfigError: the data set cannot be read, or a row lacks a column or has a value of another type.
    """
    is_evaluation = path == config.eval_path != config.path if is_evaluation is None else is_evaluation
    source = f"prompts.{'eval_path' if is_evaluation else 'path'} = {path}"
    splits = EVALUATION_SPLITS if is_evaluation else TRAINING_SPLITS
    if path.startswith(TASK_PREFIX):
        rows = _generate_rows(path.removeprefix(TASK_PREFIX), config, source, seed, num_rows or config.num_generated)
        has_answer = False  # some tasks have no single answer; their scorer reads the entry instead
    else:
        split = config.eval_split if is_evaluation else config.split
        rows = read_source(path, source=source, text_column=config.prompt_column, split=split, splits=splits)[:num_rows]
        rows, has_answer = _read_format(rows, config, source)
    check(bool(rows), f"{source}: holds no rows")

    for number, row in enumerate(rows):
        where = f"{source}: row {number}"
        _prompt_of(row, config, where)
        check(
            not has_answer or _answer_of(row, config, where) is not None,
            f"{where}: '{config.answer_column}' (prompts.answer_column) is empty",
        )
    if has_answer:
        _check_missing_numbers([_answer_of(row, config, source) or "" for row in rows], config, source)
    return rows


def _read_format(rows: list[Row], config: PromptsConfig, source: str) -> tuple[list[Row], bool]:
    """Return the rows with prompt and answer in the columns of the settings, and whether each must have an answer."""
    prompt_column, answer_column = config.prompt_column, config.answer_column
    name = format_of(rows, config.format, prompt_column=prompt_column, answer_column=answer_column)
    if name != "plain":
        logger.info("%s: rows in the format %s", source, name)
    has_answer = answer_column is not None and (name == "plain" or FORMATS[name].has_answer)
    rows = standardise(rows, name, prompt_column=prompt_column, answer_column=answer_column, source=source)
    return rows, has_answer


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
) -> list[Prompt]:
    """Return the prompts of a data set in its order; overlong prompts are an error, or dropped with a warning.

    `prompt_id` is the row number in the data set, also after rows are dropped.

    Args:
        path, config, seed, num_rows, is_evaluation: see `load_rows`.
        tokenizer: the actor's.
    Raises:
        ConfigError: as `load_rows` and `encode_prompt`; a prompt is too long and `overlong_prompts` is error; no
            prompt is left.
    """
    rows = load_rows(path, config, seed=seed, num_rows=num_rows, is_evaluation=is_evaluation)
    template = load_template(config.template_path, tokenizer)
    prompts = [
        encode_prompt(tokenizer, row, config, prompt_id=number, template=template) for number, row in enumerate(rows)
    ]
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


class PromptLoader:
    """An endless sequence of batches of prompts, which can resume at any step.

    The order depends on seed and epoch only and is the same on every rank: of each batch, rank r of n takes every n-th
    prompt from the r-th on. No batch spans two epochs, so the last batch of an epoch may be smaller.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Start at the first step of epoch 0.

        Args:
            batch_size: prompts of one step over all ranks.
            seed: of the order of every epoch.
            shuffle: whether the order differs from that of the data set.
            rank, world_size: of this process.
        Raises:
            ConfigError: there are no prompts, or batch_size is not positive.
        """
        check(bool(prompts), "the prompt loader got no prompts")
        check(batch_size > 0, f"batch_size = {batch_size}: must be greater than 0")
        self._prompts = prompts
        self._batch_size = batch_size
        self._order_settings = {"seed": seed, "shuffle": shuffle}
        self._rank, self._world_size = rank, world_size
        self._fingerprint = _fingerprint(prompts)
        self._start_epoch(0)

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts, over all ranks, in the order of the data set."""
        return self._prompts

    def next_batch(self) -> list[Prompt]:
        """Return this rank's prompts of the next step; may be empty if the batch has fewer prompts than ranks."""
        if self._position == len(self._order):
            self._start_epoch(self._epoch + 1)
        batch = self._order[self._position : self._position + self._batch_size]
        self._position += len(batch)
        return [self._prompts[index] for index in batch[self._rank :: self._world_size]]

    def batch_sizes(self, num_steps: int) -> list[int]:
        """Return the number of prompts, over all ranks, of each of the first `num_steps` steps from epoch 0 on."""
        full, rest = divmod(len(self._prompts), self._batch_size)
        epoch = [self._batch_size] * full + [rest] * (rest > 0)
        return [epoch[step % len(epoch)] for step in range(num_steps)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next step, which is the same on every rank and for any number of ranks."""
        position = {"epoch": self._epoch, "position": self._position, "fingerprint": self._fingerprint}
        return position | self._order_settings

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a `state_dict`; `batch_size` and the number of ranks may differ from then.

        Raises:
            ConfigError: the prompts, or the settings of their order, differ from those of the state.
        """
        check(
            state["fingerprint"] == self._fingerprint,
            f"the data set is not the checkpoint's: the hash of its token ids and answers is {self._fingerprint}, was "
            f"{state['fingerprint']}; bring the old data and tokenizer back, or start anew with run.resume = never",
        )
        for name, value in self._order_settings.items():
            check(
                state[name] == value,
                f"{name} = {value}, but the checkpoint's prompt order has {name} = {state[name]}: keep it to resume",
            )
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = list(range(len(self._prompts)))
        if self._order_settings["shuffle"]:
            random.Random(f"{self._order_settings['seed']} {epoch}").shuffle(self._order)


def _fingerprint(prompts: list[Prompt]) -> str:
    """Return a hash of the token ids and answers of the prompts, in their order, which is the same on every day."""
    digest = hashlib.sha256()
    for prompt in prompts:
        token_ids = prompt.token_ids if prompt.undated_token_ids is None else prompt.undated_token_ids
        digest.update(repr((token_ids, prompt.answer)).encode())
    return digest.hexdigest()[:16]


def _prompt_of(row: Row, config: PromptsConfig, where: str) -> str | list[Message]:
    value = column_of(row, config.prompt_column, field="prompts.prompt_column", where=where)
    check(
        isinstance(value, str) or is_chat(value),
        f"{where}: '{config.prompt_column}' (prompts.prompt_column) must be text, or a list of messages with text in "
        f"`role` and `content`; got {str(value)[:80]!r}",
    )
    return value


def _answer_of(row: Row, config: PromptsConfig, where: str) -> str | None:
    value = column_of(row, config.answer_column, field="prompts.answer_column", where=where)
    check(
        value is None or (isinstance(value, str | Number) and not isinstance(value, bool)),
        f"{where}: '{config.answer_column}' (prompts.answer_column) must be text or a number, got {str(value)[:80]!r}",
    )
    if value is None:
        return None
    text = str(value)
    check(
        bool(text.strip()) and (isinstance(value, str) or isfinite(value)),
        f"{where}: '{config.answer_column}' (prompts.answer_column) is empty or not a finite number, got {text[:80]!r}",
    )
    return text


def _check_missing_numbers(answers: list[str], config: PromptsConfig, source: str) -> None:
    """Raise ConfigError if a word of MISSING is among answers that are numbers; among other texts it is an answer."""
    missing = [number for number, text in enumerate(answers) if text.strip().casefold() in MISSING]
    others = [text for text in answers if text.strip().casefold() not in MISSING]
    if not missing or not all(map(_is_number, others)):
        return
    raise ConfigError(
        f"{source}: row {missing[0]}: '{config.answer_column}' (prompts.answer_column) is {answers[missing[0]]!r}, and "
        "the other answers are numbers, so that it stands for a missing one: give the number, or remove the row"
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
