"""Texts of the language-model (ptx) loss, as token ids."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import ConfigError, PtxConfig, check
from hybrid_rl.data.chat import chat_template_of
from hybrid_rl.data.files import column_of, is_chat, read_rows
from hybrid_rl.data.template import Template
from hybrid_rl.models.tokenizer import encode


def load_texts(config: PtxConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of every row of `ptx.path`, each with one EOS at its end, truncated to `max_tokens`.

    Chat messages are rendered by the tokenizer's chat template. A BOS that both the template and the tokenizer add
    occurs once.

    Raises:
        ConfigError: the file cannot be read, a row lacks the column or has a value of another type, or a row has fewer
            than two tokens.
    """
    assert config.path is not None
    source = f"ptx.path = {config.path}"
    rows = read_rows(Path(config.path), source=source, text_column=config.column)
    check(bool(rows), f"{source}: holds no rows")
    check(tokenizer.eos_token_id is not None, f"{source}: the tokenizer {tokenizer.name_or_path!r} has no EOS token")
    texts = []
    for number, row in enumerate(rows):
        where = f"{source}: row {number}"
        value = column_of(row, config.column, field="ptx.column", where=where)
        token_ids = _end_with_eos(tokenizer, _encode(tokenizer, value, config, where))[: config.max_tokens]
        check(
            len(token_ids) >= 2,
            f"{where}: gives {len(token_ids)} of at most ptx.max_tokens = {config.max_tokens} tokens, needs 2 or more",
        )
        texts.append(token_ids)
    return texts


def _encode(tokenizer: PreTrainedTokenizerBase, value: Any, config: PtxConfig, where: str) -> list[int]:
    if not isinstance(value, str):
        check(
            is_chat(value),
            f"{where}: '{config.column}' (ptx.column) must be text, or a list of messages with text in `role` and "
            f"`content`; got {str(value)[:80]!r}",
        )
        source = chat_template_of(tokenizer, Template(), where)
        try:
            value = tokenizer.apply_chat_template(value, chat_template=source, tokenize=False)
        except Exception as error:  # a template is a program of its own, which can raise anything
            raise ConfigError(f"{where}: the tokenizer's chat template refuses its messages: {error}") from error
    return encode(tokenizer, value)


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
