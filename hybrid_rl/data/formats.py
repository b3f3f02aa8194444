"""Formats of data sets that trainers read, recognised by their columns: where prompt, answer and source of a row are.

Each format is one function of a row. What a row lacks, or holds in another type, is named with its column.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_rl.config import ConfigError, check
from hybrid_rl.data.files import Message, is_chat
from hybrid_rl.data.json_rows import Row

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
"""Speaker of a ShareGPT turn -> role of a chat message."""
SOURCE = "data_source"
"""Column with the name of the data set that a row comes from."""
FINAL = "####"
"""Mark before the result of a solution in GSM8K."""
HEADER = "\n\nAssistant:"
"""Start of a reply in texts of dialogues, as in Anthropic's HH-RLHF."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """What a row gives, whatever its format."""

    prompt: Any
    """Text or chat messages, checked by the caller."""
    answer: Any = None
    """Text, number or a list of them; None if the format has no answers."""
    source: str | None = None
    """Name of the data set that the row comes from, where rows of several are mixed."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of rows."""

    columns: tuple[str, ...]
    """Columns by which it is recognised; all are there."""
    read: Callable[[Row], Example]
    """Returns prompt, answer and source of a row."""
    has_answer: bool = True
    """Whether every row must have an answer."""
    used: tuple[str, ...] = ()
    """Further columns that `read` uses where a row has them."""


def format_of(rows: Sequence[Row], name: str, *, prompt_column: str, answer_column: str | None) -> str:
    """Return the name of the format of rows: the given one, or for `auto` what `recognise` finds in the first row."""
    if name != "auto" or not rows:
        return name if rows else "plain"
    return recognise(rows[0], prompt_column=prompt_column, answer_column=answer_column)


def standardise(
    rows: Sequence[Row], name: str, *, prompt_column: str, answer_column: str | None, source: str
) -> list[Row]:
    """Return rows with the prompt and the answer in these columns, and with the name of their data set in SOURCE.

    The other columns stay.

    Args:
        rows: rows of one format.
        name: the format.
        prompt_column, answer_column: columns, whose names may lead into dictionaries in the plain format.
        source: setting and data set, for messages.

    Raises:
        ConfigError: a row lacks a column of its format, or holds another type; the message has its number.
    """
    if name == "plain":
        dotted = [column for column in (prompt_column, answer_column) if column and "." in column]
        return [row | {column: lookup(row, column) for column in dotted if has_column(row, column)} for row in rows]
    found = []
    for number, row in enumerate(rows):
        try:
            example = FORMATS[name].read(row)
        except ConfigError as error:
            raise ConfigError(f"{source}: row {number} {error} (prompts.format {name})") from error
        columns = {prompt_column: example.prompt, answer_column: example.answer, SOURCE: example.source}
        found.append(row | {column: value for column, value in columns.items() if column and value is not None})
    return found


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """Return the value in a column, whose name may lead into dictionaries: `reward_model.ground_truth`.

    Raises:
        ConfigError: the row has no such column; the message lists those that it has.
    """
    found, rest = row, column
    while rest not in found:
        name, _, rest = rest.partition(".")
        if not rest or not isinstance(found.get(name), Mapping):
            raise ConfigError(f"has no column '{column}', only {', '.join(map(str, row))}")
        found = found[name]
    return found[rest]


def recognise(row: Row, *, prompt_column: str, answer_column: str | None) -> str:
    """Return the name of a row's format; `plain` if it has the two columns, or is of no known format.

    verl's rows come first, because their column `prompt` has its answer elsewhere.

    Args:
        prompt_column, answer_column: columns of the plain format; None if it has no answers.
    """
    names = [name for name, known in FORMATS.items() if all(column in row for column in known.columns)]
    if "verl" in names and isinstance(row["reward_model"], Mapping) and "ground_truth" in row["reward_model"]:
        return "verl"
    is_plain = all(has_column(row, column) for column in (prompt_column, answer_column) if column)
    others = [name for name in names if name != "verl"]
    return others[0] if others and not is_plain else "plain"


def has_column(row: Row, column: str) -> bool:
    """Return whether `lookup` finds a column."""
    try:
        lookup(row, column)
    except ConfigError:
        return False
    return True


def _verl(row: Row) -> Example:
    answer = lookup(row, "reward_model.ground_truth")
    check(
        not isinstance(answer, Mapping),
        f"'reward_model.ground_truth' must be text, a number or a list of them, got {str(answer)[:80]!r}; set "
        "prompts.format = plain with prompts.answer_column = reward_model.ground_truth.<key>",
    )
    return Example(prompt=lookup(row, "prompt"), answer=answer, source=_source(row.get("data_source")))


def _gsm8k(row: Row) -> Example:
    answer = lookup(row, "answer")
    is_solution = isinstance(answer, str) and FINAL in answer
    return Example(
        prompt=lookup(row, "question"), answer=answer.rpartition(FINAL)[2].strip() if is_solution else answer
    )


def _math(row: Row) -> Example:
    return Example(prompt=lookup(row, "problem"), answer=lookup(row, "answer"))


def _trl(row: Row) -> Example:
    return Example(prompt=lookup(row, "prompt"), answer=lookup(row, "solution"))


def _open_instruct(row: Row) -> Example:
    prompt, answer = lookup(row, "messages"), lookup(row, "ground_truth")
    return Example(prompt=prompt, answer=answer, source=_source(row.get("dataset")))


def _openrlhf(row: Row) -> Example:
    return Example(prompt=lookup(row, "input"), answer=lookup(row, "label"))


def _openrlhf_chat(row: Row) -> Example:
    return Example(prompt=lookup(row, "context_messages"), answer=row.get("label"))


def _sharegpt(row: Row) -> Example:
    turns = lookup(row, "conversations")
    check(isinstance(turns, list), f"'conversations' must be a list of turns, got {str(turns)[:80]!r}")
    return Example(prompt=_without_reply([_message(turn) for turn in turns], "conversations"))


def _message(turn: Any) -> Message:
    """Return the chat message of a ShareGPT turn, which may be one already."""
    is_turn = isinstance(turn, dict) and isinstance(turn.get("value"), str)
    if not is_turn and is_chat([turn]):
        return turn
    check(
        is_turn and turn.get("from") in ROLES,
        f"'conversations' must hold turns with text in `value` and one of {', '.join(ROLES)} in `from`, got "
        f"{str(turn)[:80]!r}",
    )
    return {"role": ROLES[turn["from"]], "content": turn["value"]}


def _preference(row: Row) -> Example:
    if "prompt" in row:
        return Example(prompt=row["prompt"])
    chosen = lookup(row, "chosen")
    if is_chat(chosen):
        return Example(prompt=_without_reply(chosen, "chosen"))
    check(
        isinstance(chosen, str) and HEADER in chosen,
        f"'chosen' must be chat messages, or a dialogue with {HEADER.strip()!r}, where there is no column 'prompt', "
        f"got {str(chosen)[:80]!r}",
    )
    return Example(prompt=chosen[: chosen.rindex(HEADER) + len(HEADER)])


def _without_reply(messages: list[Message], column: str) -> list[Message]:
    """Return the messages up to the last one that is not the assistant's."""
    number = len(messages)
    while number and messages[number - 1]["role"] == "assistant":
        number -= 1
    check(number > 0, f"'{column}' has no turn besides the assistant's")
    return messages[:number]


def _source(value: Any) -> str | None:
    """Return the name of a data set; the first one where a row names several."""
    value = value[0] if isinstance(value, list) and value else value
    check(value is None or isinstance(value, str), f"the name of its data set must be text, got {str(value)[:80]!r}")
    return value


FORMATS: Mapping[str, Format] = {
    "verl": Format(columns=("prompt", "reward_model"), read=_verl, used=("data_source",)),
    "preference": Format(columns=("chosen", "rejected"), read=_preference, has_answer=False, used=("prompt",)),
    "trl": Format(columns=("prompt", "solution"), read=_trl),
    "open_instruct": Format(columns=("messages", "ground_truth"), read=_open_instruct, used=("dataset",)),
    "gsm8k": Format(columns=("question", "answer"), read=_gsm8k),
    "math": Format(columns=("problem", "answer"), read=_math),
    "openrlhf": Format(columns=("input", "label"), read=_openrlhf),
    "openrlhf_chat": Format(columns=("context_messages",), read=_openrlhf_chat, has_answer=False, used=("label",)),
    "sharegpt": Format(columns=("conversations",), read=_sharegpt, has_answer=False),
}
"""Name -> format, in the order in which they are recognised; `plain` is the format of the named columns."""
