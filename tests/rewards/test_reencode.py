"""Re-encoded rollouts hold exactly prompt and response in the reward model's tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hybrid_rl.batch import make_train_batch
from hybrid_rl.config import ConfigError
from hybrid_rl.rewards.reencode import reencode
from tests.conftest import make_rollout


def make_tokenizer(vocabulary, merges=(), *, adds=None, **special):
    """Return a byte-pair tokenizer; `adds` is the template of its post-processor, $A being the text."""
    ids = {token: i for i, token in enumerate([*special.values(), *vocabulary, *("".join(pair) for pair in merges)])}
    core = Tokenizer(models.BPE(ids, list(merges)))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated") if not merges else None
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(special.values()))
    if adds:
        used = [(token, ids[token]) for token in special.values() if token in adds]
        core.post_processor = processors.TemplateProcessing(single=adds, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


CHARACTERS = "0123456789+= <s>/[]BE"
ACTOR = make_tokenizer(CHARACTERS, adds="<s> $A", bos_token="<s>", eos_token="</s>")
MERGES = [("1", "2"), ("=", "3"), ("3", "6")]
OTHER = make_tokenizer(CHARACTERS, MERGES, adds="[B] $A [E]", bos_token="[B]", eos_token="[E]")


def make_response(prompt, response, *, is_truncated=False, prefill=""):
    """Return a response of the actor, which ends with EOS unless it is truncated."""
    response_ids = ACTOR(response, add_special_tokens=False)["input_ids"]
    return make_rollout(
        ACTOR(prompt)["input_ids"],
        response_ids if is_truncated else [*response_ids, ACTOR.eos_token_id],
        prompt_id=4,
        sequence_id=9,
        is_truncated=is_truncated,
        text=response,
        prompt_text=prompt,
        prefill=prefill,
        answer="36",
    )


def read(rollout, tokenizer=OTHER):
    """Return the tokens of prompt and response."""
    tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in (rollout.prompt.token_ids, rollout.response_ids)]
    return tokens[0], tokens[1]


def encode(rollout, tokenizer=OTHER):
    (found,) = reencode([rollout], tokenizer, actor_tokenizer=ACTOR)
    return found


def test_the_text_stands_between_bos_and_eos_of_the_reward_models_tokenizer():
    rollout = make_response("12+24=", "12")
    found = encode(rollout)
    assert read(found) == (["[B]", "12", "+", "2", "4", "="], ["12", "[E]"])
    assert (found.text, found.prompt.text, found.prompt.answer) == ("12", "12+24=", "36")
    assert (found.sequence_id, found.prompt.prompt_id, found.rollout_logprobs) == (9, 4, [])
    assert read(encode(make_response("12+24=", "12", is_truncated=True)))[1] == ["12"]


def test_a_token_that_spans_prompt_and_response_belongs_to_the_response():
    assert read(encode(make_response("12+24=", "36"))) == (["[B]", "12", "+", "2", "4"], ["=3", "6", "[E]"])


def test_the_first_token_belongs_to_the_prompt_even_if_it_spans_it():
    without_bos = make_tokenizer(CHARACTERS, MERGES, bos_token="[B]", eos_token="[E]")
    assert read(encode(make_response("1", "26"), without_bos), without_bos) == (["12"], ["6", "[E]"])


def test_the_actors_bos_is_removed_and_bos_occurs_once():
    assert read(encode(make_response("<s>1+", "1"))) == (["[B]", "1", "+"], ["1", "[E]"])
    assert read(encode(make_response("[B]1+", "1"))) == (["[B]", "1", "+"], ["1", "[E]"])


def test_special_tokens_of_the_actor_are_plain_text_unless_both_tokenizers_have_them():
    assert read(encode(make_response("1</s>", "1"))) == (["[B]", "1", "<", "/", "s", ">"], ["1", "[E]"])
    assert read(encode(make_response("1[E]", "1"))) == (["[B]", "1", "[E]"], ["1", "[E]"])


def test_the_prefill_occurs_once():
    assert read(encode(make_response("12+24=3", "36", prefill="3"))) == (
        ["[B]", "12", "+", "2", "4"],
        ["=3", "6", "[E]"],
    )


def test_eos_occurs_once_if_the_tokenizer_appends_it_and_is_its_bos():
    both = make_tokenizer(CHARACTERS, MERGES, adds="$A [E]", bos_token="[E]", eos_token="[E]")
    assert read(encode(make_response("12+24=", "12"), both), both) == (["12", "+", "2", "4", "="], ["12", "[E]"])


def test_an_empty_response_leaves_the_prompt_alone():
    assert read(encode(make_response("1+", "", is_truncated=True))) == (["[B]", "1", "+"], [])
    assert reencode([], OTHER, actor_tokenizer=ACTOR) == []


def test_the_same_tokenizer_gives_the_same_ids():
    rollouts = [make_response("12+24=", "36"), make_response("1+", "2345", is_truncated=True)]
    for before, after in zip(rollouts, reencode(rollouts, ACTOR, actor_tokenizer=ACTOR), strict=True):
        assert after.prompt.token_ids == before.prompt.token_ids and after.response_ids == before.response_ids


def test_the_batch_holds_the_whole_text():
    rollouts = reencode([make_response("12+24=", "36"), make_response("1+", "2")], OTHER, actor_tokenizer=ACTOR)
    batch = make_train_batch(rollouts)
    assert [OTHER.decode(ids) for ids in batch.sequences] == ["[B]12+24=36[E]", "[B]1+2[E]"]
    assert batch.response_lengths.tolist() == [3, 2] and batch.prompt_lengths.tolist() == [5, 3]


def test_a_tokenizer_without_eos_is_refused():
    with pytest.raises(ConfigError, match=r"its tokenizer .* has no EOS"):
        encode(make_response("1", "2"), make_tokenizer(CHARACTERS, bos_token="[B]"))
