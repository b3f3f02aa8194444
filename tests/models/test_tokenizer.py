"""Tokenizers of model folders and the ids that end a response."""

import json

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.models.tokenizer import eos_token_ids, load_other_tokenizer, load_tokenizer


@pytest.mark.parametrize(
    "generation, expected",
    [
        ({"eos_token_id": [3, 5]}, [0, 3, 5]),
        ({"eos_token_id": 4}, [0, 4]),
        ({"eos_token_id": 0}, [0]),
        ({}, [0]),
        (None, [0]),
    ],
)
def test_eos_ids_are_those_of_tokenizer_and_generation_config(tiny, tmp_path, generation, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(str(tmp_path), load_tokenizer(str(tiny / "policy"))) == expected


def test_a_folder_without_any_eos_is_refused(tiny, tmp_path):
    tokenizer = load_tokenizer(str(tiny / "policy"))
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="names an EOS token"):
        eos_token_ids(str(tmp_path), tokenizer)


def test_another_tokenizer_is_one_with_another_vocabulary(tiny, tmp_path):
    tokenizer = load_tokenizer(str(tiny / "policy"))
    assert load_other_tokenizer(str(tiny / "reward"), tokenizer) is None
    tokenizer.add_tokens(["abc"])
    tokenizer.save_pretrained(tmp_path)
    other = load_other_tokenizer(str(tmp_path), load_tokenizer(str(tiny / "policy")))
    assert other is not None and "abc" in other.get_vocab()
