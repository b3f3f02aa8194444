"""Texts of the language-model (ptx) loss, as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import ConfigError, DataSource, PtxConfig, check
from hybrid_rl.data.chat import Clock, chat_template_of, on_fixed_day
from hybrid_rl.data.files import Message, column_of, is_chat
from hybrid_rl.data.sources import read_source
from hybrid_rl.data.template import Template
from hybrid_rl.models.tokenizer import encode


@dataclass(frozen=True, kw_only=True)
class Text:
    """One row of `ptx.path`."""

    token_ids: list[int]
    undated_token_ids: list[int] | None
    """Token ids of the same text on a fixed day; None if its chat template does not ask for the date."""


@dataclass(frozen=True, kw_only=True)
class TextSet:
    """The texts of one data set."""

    source: str
    """Setting and data set, for messages."""
    texts: list[Text]
    weight: float | None

    @property
    def line(self) -> str:
        """What a run shows of the data set when it starts."""
        return f"{self.source}: {len(self.texts)} texts" + (f", weight {self.weight:g}" if self.weight else "")


def read_texts(config: PtxConfig) -> list[list[str | list[Message]]]:
    """Return for each data set of `ptx.path` the value of its column in every row.

    Raises:
        ConfigError: a file cannot be read, or a row lacks the column or has a value of another type.
    """
    return [_read_source(config, source) for source in config.sources]


def _read_source(config: PtxConfig, source: DataSource) -> list[str | list[Message]]:
    name, column = _name(source), source.column or config.column
    rows = read_source(source.path, source=name, text_column=column, split=source.split)[: source.max_samples]
    check(bool(rows), f"{name}: holds no rows")
    values = []
    for number, row in enumerate(rows):
        where = f"{name}: row {number}"
        value = column_of(row, column, field="ptx.column", where=where)
        check(
            isinstance(value, str) or is_chat(value),
            f"{where}: '{column}' (ptx.column) must be text, or a list of messages with text in `role` and "
            f"`content`; got {str(value)[:80]!r}",
        )
        values.append(value)
    return values


def load_text_sets(config: PtxConfig, tokenizer: PreTrainedTokenizerBase) -> list[TextSet]:
    """Return the texts of `ptx.path`, by data set: each with one EOS at its end, truncated to `max_tokens`.

    Chat messages are rendered by the tokenizer's chat template. A BOS that both the template and the tokenizer add
    occurs once.

    Raises:
        ConfigError: as read_texts; the tokenizer has no EOS; or a row has fewer than two tokens.
    """
    return [
        TextSet(source=_name(source), texts=_load_texts(config, tokenizer, source, values), weight=source.weight)
        for source, values in zip(config.sources, read_texts(config), strict=True)
    ]


def _load_texts(
    config: PtxConfig, tokenizer: PreTrainedTokenizerBase, source: DataSource, values: Sequence[str | list[Message]]
) -> list[Text]:
    name = _name(source)
    check(tokenizer.eos_token_id is not None, f"{name}: the tokenizer {tokenizer.name_or_path!r} has no EOS token")
    texts = []
    for number, value in enumerate(values):
        where = f"{name}: row {number}"
        text, undated = _render(tokenizer, value, where)
        token_ids = _encode(tokenizer, text, config)
        check(
            len(token_ids) >= 2,
            f"{where}: gives {len(token_ids)} of at most ptx.max_tokens = {config.max_tokens} tokens, needs 2 or more",
        )
        undated_token_ids = None if undated is None else _encode(tokenizer, undated, config)
        texts.append(Text(token_ids=token_ids, undated_token_ids=undated_token_ids))
    return texts


def _name(source: DataSource) -> str:
    return f"ptx.path = {source.path}"


def _render(tokenizer: PreTrainedTokenizerBase, value: str | list[Message], where: str) -> tuple[str, str | None]:
    """Return the text of a row, and the same text on a fixed day; None if it does not depend on the day."""
    if isinstance(value, str):
        return value, None
    source = chat_template_of(tokenizer, Template(), where)

    def render(**variables: Clock) -> str:
        try:
            return tokenizer.apply_chat_template(value, chat_template=source, tokenize=False, **variables)
        except Exception as error:  # a template is a program of its own, which can raise anything
            raise ConfigError(f"{where}: the tokenizer's chat template refuses its messages: {error}") from error

    return render(), on_fixed_day(render, source)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, config: PtxConfig) -> list[int]:
    """Return the token ids of a text with one EOS at its end, truncated to `max_tokens`."""
    return _end_with_eos(tokenizer, encode(tokenizer, text))[: config.max_tokens]


def _end_with_eos(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[int]:
    """Return the ids up to the last EOS if only white space follows it, as in many chat templates, else with EOS added.

    The policy never samples a token after EOS, so the loss does not train it to.
    """
    end = tokenizer.eos_token_id
    if end in token_ids[1:]:
        last = len(token_ids) - 1 - token_ids[::-1].index(end)
        if not tokenizer.decode(token_ids[last + 1 :]).strip():
            return token_ids[: last + 1]
    return [*token_ids, end]
