"""The ends of tokens in the text of a response."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_rl.rewards.spans import token_ends
from tests.conftest import make_rollout


def byte_tokenizer():
    """Return a tokenizer with one token per byte, and one for `ab`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*alphabet, "ab"])}, [("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    "text, ends",
    [
        ("abc", [2, 3]),
        ("a\u00e9b", [1, 1, 2, 3]),  # a character of two bytes ends with its second token
        ("\u20ac\u20ac", [0, 0, 1, 1, 1, 2]),
        ("a b" * 9, [end for n in range(9) for end in (3 * n + 1, 3 * n + 2, 3 * n + 3)]),
        ("", []),
    ],
)
def test_a_token_ends_after_the_last_character_that_it_completes(text, ends):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    before = tokenizer("2+5=")["input_ids"]
    assert token_ends(tokenizer, make_rollout(before, ids, text=text)) == ends


def test_characters_of_the_prefill_come_before_the_first_token():
    tokenizer = byte_tokenizer()
    ids = tokenizer("abc")["input_ids"]
    rollout = make_rollout([1], ids, text="<think>abc", prompt_text="2+5=<think>", prefill="<think>")
    assert token_ends(tokenizer, rollout) == [9, 10]


def test_bytes_that_are_no_character_do_not_hide_the_tokens_after_them():
    tokenizer = byte_tokenizer()
    bad = tokenizer("\u20ac")["input_ids"][0]
    rollout = replace(make_rollout([1], [bad] * 20 + tokenizer("c")["input_ids"]), text="\ufffd" * 20 + "c")
    assert token_ends(tokenizer, rollout)[-1] == 21
