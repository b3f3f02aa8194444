"""Tokenizers of model folders and the ids that end a response."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hybrid_rl.config import ConfigError
from hybrid_rl.models.tokenizer import encode, eos_token_ids, load_other_tokenizer, load_tokenizer


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


@pytest.mark.parametrize(
    "generation, expected", [(None, [0, 6, 8]), ({}, [0, 6, 8]), ({"eos_token_id": 3}, [0, 3, 6, 8])]
)
def test_eos_ids_are_the_union_of_all_sources_where_they_disagree(tiny, tmp_path, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [6, 8]}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(str(tmp_path), load_tokenizer(str(tiny / "policy"))) == expected


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b"\xff", b"", b'{"eos_token_id": "</s>"}', b'{"eos_token_id": [true]}', b'{"eos_token_id": -1}'],
)
def test_a_damaged_generation_config_is_named(tiny, tmp_path, content):
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}: generation_config.json (cannot be read|must be a JSON object)"
    ):
        eos_token_ids(str(tmp_path), load_tokenizer(str(tiny / "policy")))


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


def make_tokenizer(adds):
    """Return a tokenizer of words: </s> 0, <s> 1, [SEP] 2, a 3, b 4; `adds` is what it puts around a text, $A."""
    words = {word: i for i, word in enumerate(["</s>", "<s>", "[SEP]", "a", "b"])}
    core = Tokenizer(models.WordLevel(words, unk_token="b"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(["</s>", "<s>", "[SEP]"])
    used = [(token, words[token]) for token in ("</s>", "<s>", "[SEP]") if token in adds]
    core.post_processor = processors.TemplateProcessing(single=adds, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", bos_token="<s>")


@pytest.mark.parametrize(
    "adds, text, expected",
    [
        ("$A", "a b", [3, 4]),
        ("$A </s>", "a b", [3, 4]),
        ("<s> $A", "a b", [1, 3, 4]),
        ("<s> $A </s>", "a b", [1, 3, 4]),
        ("<s> $A [SEP] </s>", "a b", [1, 3, 4]),
        ("[SEP] <s> $A </s>", "a b", [2, 1, 3, 4]),
        ("<s> $A </s>", "<s> a", [1, 3]),  # a BOS that the text begins with is not added again
        ("[SEP] <s> $A", "[SEP] <s> a", [2, 1, 3]),
        ("<s> $A </s>", "a </s>", [1, 3, 0]),  # an EOS that the text itself has stays
        ("</s> $A </s>", "a </s> b", [0, 3, 0, 4]),
        ("<s> $A </s>", "a " * 1000, [1] + [3] * 1000),
        ("<s> $A </s>", "", []),
    ],
)
def test_a_text_keeps_the_tokens_put_before_it_and_loses_those_put_after_it(adds, text, expected):
    assert encode(make_tokenizer(adds), text) == expected


@pytest.mark.parametrize("change", ["normalizer", "bos", "strip"])
def test_another_tokenizer_is_one_that_gives_other_ids_with_the_same_vocabulary(tiny, tmp_path, change):
    tokenizer = load_tokenizer(str(tiny / "policy"))
    other = load_tokenizer(str(tiny / "policy"))
    if change == "normalizer":
        other.backend_tokenizer.normalizer = normalizers.Lowercase()
    elif change == "bos":
        rule = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
        other.backend_tokenizer.post_processor = rule
    else:
        other.add_tokens([AddedToken("<bos>", lstrip=True, special=True)])
    assert other.get_vocab() == tokenizer.get_vocab()
    other.save_pretrained(tmp_path)
    assert load_other_tokenizer(str(tmp_path), tokenizer) is not None


def test_other_padding_and_truncation_do_not_make_another_tokenizer(tiny, tmp_path):
    tokenizer = load_tokenizer(str(tiny / "policy"))
    other = load_tokenizer(str(tiny / "policy"))
    other.backend_tokenizer.enable_padding(length=9)
    other.backend_tokenizer.enable_truncation(4)
    other.model_max_length = 4
    other.save_pretrained(tmp_path)
    assert load_other_tokenizer(str(tmp_path), tokenizer) is None
