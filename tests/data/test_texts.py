"""Texts of the ptx loss become token ids that end where the policy would end a response."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybrid_rl.config import ConfigError, PtxConfig
from hybrid_rl.data.texts import load_text_sets

WORDS = ["<eos>", "<bos>", "\n", *"abcdefgh"]


def make_tokenizer(*, adds_bos: bool = False, template: str | None = None) -> PreTrainedTokenizerBase:
    """Return a tokenizer of single letters: <eos> 0, <bos> 1, line break 2, a to h 3 to 10."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="h"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<bos>")
    tokenizer.chat_template = template
    return tokenizer


def write(folder: Path, *values: Any, column: str = "text") -> PtxConfig:
    """Write a JSONL file with the values in a column and return the settings that read it."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({column: value}) + "\n" for value in values))
    return PtxConfig(path=str(path))


def ids_of(config: PtxConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [text.token_ids for text in load_text_sets(config, tokenizer)[0].texts]


CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
OPEN = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
CLOSED = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<eos>\n{% endfor %}"


@pytest.mark.parametrize(
    "value, adds_bos, template, expected",
    [
        ("abc", False, None, [3, 4, 5, 0]),
        ("abc", True, None, [1, 3, 4, 5, 0]),
        ("abc<eos>", True, None, [1, 3, 4, 5, 0]),
        ("a<eos>b", False, None, [3, 0, 4, 0]),  # an EOS inside the text is kept
        ("a\n", False, None, [3, 2, 0]),
        (CHAT, True, OPEN, [1, 3, 4, 2, 5, 6, 2, 0]),  # BOS of the template and of the tokenizer occurs once
        (CHAT, False, CLOSED, [1, 3, 4, 0, 2, 5, 6, 0]),  # white space after the last EOS is removed
    ],
)
def test_texts_and_chats_end_with_one_eos(tmp_path, value, adds_bos, template, expected):
    tokenizer = make_tokenizer(adds_bos=adds_bos, template=template)
    assert ids_of(write(tmp_path, value), tokenizer) == [expected]


def test_long_texts_are_truncated_and_the_column_is_read(tmp_path):
    config = write(tmp_path, "abc", "abcdefgh", column="body")
    config = PtxConfig(path=config.path, column="body", max_tokens=4)
    assert ids_of(config, make_tokenizer()) == [[3, 4, 5, 0], [3, 4, 5, 6]]


def test_a_csv_field_may_hold_a_chat_as_json(tmp_path):
    path = tmp_path / "texts.csv"
    path.write_text('text\n"' + json.dumps(CHAT).replace('"', '""') + '"\n')
    assert ids_of(PtxConfig(path=str(path)), make_tokenizer(template=OPEN)) == [[1, 3, 4, 2, 5, 6, 2, 0]]


@pytest.mark.parametrize(
    "values, changes, message",
    [
        (["abc"], {"path": "nowhere.jsonl"}, r"ptx\.path = nowhere\.jsonl: no such file or folder"),
        (["abc"], {"column": "body"}, r"row 0 has no column 'body'; set ptx\.column to one of: text"),
        ([], {}, "holds no rows"),
        (["abc", ""], {}, r"row 1: gives 1 of at most ptx\.max_tokens = 512 tokens, needs 2 or more"),
        (["abc"], {"max_tokens": 1}, r"row 0: gives 1 of at most ptx\.max_tokens = 1 tokens"),
        (["abc", 7], {}, r"row 1: 'text' \(ptx\.column\) must be text, or a list of messages .*; got '7'"),
        ([CHAT], {}, "row 0 is a chat prompt but the tokenizer '.*' has no chat template"),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path, values, changes, message):
    config = write(tmp_path, *values)
    with pytest.raises(ConfigError, match=message):
        load_text_sets(PtxConfig(**{"path": config.path, **changes}), make_tokenizer())


def test_a_template_that_raises_and_a_tokenizer_without_eos_are_refused(tmp_path):
    refusing = make_tokenizer(template="{{ raise_exception('no assistant here') }}")
    with pytest.raises(ConfigError, match="row 0: the tokenizer's chat template refuses its messages: no assistant"):
        load_text_sets(write(tmp_path, CHAT), refusing)
    endless = make_tokenizer()
    endless.eos_token = None
    with pytest.raises(ConfigError, match="has no EOS token"):
        load_text_sets(write(tmp_path, "abc"), endless)
