"""Seeds of requests, and rollouts of transformers' generation."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_rl.batch import Prompt
from hybrid_rl.config import RolloutConfig
from hybrid_rl.engines import Generation
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.seeds import request_seed
from hybrid_rl.steps.rollout import collect_rollouts, generate_greedy, judged_text
from tests.conftest import make_rollout

CPU = torch.device("cpu")
CONFIG = RolloutConfig(engine="hf", group_size=3, max_response_tokens=6)


@pytest.fixture
def engine(hf_engine: HuggingFaceEngine) -> HuggingFaceEngine:
    return hf_engine


@pytest.fixture(scope="module")
def tokenizer(tiny: Path):
    return load_tokenizer(str(tiny / "policy"))


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Prompt]:
    texts = ["3+4=", "1+1=", "12+3=", "a", "9+9="]
    return [Prompt(prompt_id=10 + i, text=text, token_ids=tokenizer(text)["input_ids"]) for i, text in enumerate(texts)]


def collect(prompts, engine, tokenizer, *, config=CONFIG, step=4):
    return collect_rollouts(prompts, engine, tokenizer, config, stop_token_ids=[0], run_seed=5, step=step)


def test_request_seeds_are_distinct_repeatable_and_fit():
    places = [(run, step, i) for run in (0, 1) for step in (1, 2, 11, 12) for i in range(500)]
    seeds = {place: request_seed(*place) for place in places}
    assert len(set(seeds.values())) == len(places)
    assert all(0 <= seed < 2**32 for seed in seeds.values())
    assert seeds == {place: request_seed(*place) for place in places}
    assert request_seed(1, 1, 12) != request_seed(1, 11, 2) != request_seed(11, 1, 2)


@pytest.mark.parametrize("greedy", [False, True])
def test_stop_strings_of_the_settings_end_responses_and_stay_in_their_text(engine, tokenizer, prompts, greedy):
    def generate(config):
        if greedy:
            return generate_greedy(prompts, engine, tokenizer, config, stop_token_ids=[0])
        return collect(prompts, engine, tokenizer, config=config)

    free = generate(CONFIG)
    string = free[0].text[:2]  # a character is a token
    stopped = generate(replace(CONFIG, stop_strings=[string]))
    assert stopped[0].text == string and stopped[0].response_ids == free[0].response_ids[:2]
    for before, after in zip(free, stopped, strict=True):
        assert after == before if string not in before.text else after.text.endswith(string) and not after.is_truncated


def test_rollouts_are_grouped_and_numbered(engine, tokenizer, prompts):
    rollouts = collect(prompts, engine, tokenizer)
    assert [r.prompt.prompt_id for r in rollouts] == [p.prompt_id for p in prompts for _ in range(3)]
    assert [r.sequence_id for r in rollouts] == list(range(30, 45))
    assert [r.prompt for r in rollouts[::3]] == prompts
    for rollout in rollouts:
        assert 1 <= len(rollout.response_ids) <= 6
        assert len(rollout.rollout_logprobs) == len(rollout.response_ids)
        assert all(value <= 0 for value in rollout.rollout_logprobs)
        assert rollout.is_truncated == (rollout.response_ids[-1] != 0)
        assert 0 not in rollout.response_ids[:-1]  # nothing after the EOS, and the EOS is kept
        num_eos = 0 if rollout.is_truncated else 1  # the EOS that ended the response is no part of its text
        ids = rollout.prompt.token_ids + rollout.response_ids
        assert rollout.full_text == tokenizer.decode(ids[: len(ids) - num_eos])
    assert any(len({tuple(r.response_ids) for r in rollouts[i : i + 3]}) > 1 for i in range(0, 15, 3))


def test_rollouts_do_not_depend_on_rank_or_batching(engine, tokenizer, prompts):
    together = {r.sequence_id: r for r in collect(prompts, engine, tokenizer)}
    ranks = [collect(prompts[rank::2], engine, tokenizer) for rank in range(2)]
    apart = {r.sequence_id: r for rollouts in ranks for r in rollouts}
    assert apart.keys() == together.keys()
    for i, rollout in together.items():
        assert apart[i].response_ids == rollout.response_ids
        assert apart[i].rollout_logprobs == pytest.approx(rollout.rollout_logprobs, abs=1e-5)


def test_every_step_samples_other_responses(engine, tokenizer, prompts):
    first, again, second = (collect(prompts, engine, tokenizer, step=step) for step in (1, 1, 2))
    assert [r.response_ids for r in first] == [r.response_ids for r in again]
    assert [r.response_ids for r in first] != [r.response_ids for r in second]


def test_samples_repeat_with_the_engines_own_generator(engine, tokenizer, prompts):
    config = RolloutConfig(engine="hf", group_size=2, max_response_tokens=6, seed_per_request=False)
    first, again, second = (collect(prompts, engine, tokenizer, config=config, step=step) for step in (1, 1, 2))
    assert [r.response_ids for r in first] == [r.response_ids for r in again]
    assert [r.response_ids for r in first] != [r.response_ids for r in second]


@pytest.mark.parametrize("seed_per_request", [True, False])
def test_no_prompts_give_no_rollouts(engine, tokenizer, seed_per_request):
    config = RolloutConfig(engine="hf", seed_per_request=seed_per_request)
    assert collect([], engine, tokenizer, config=config) == []


def test_greedy_takes_one_response_each_without_logprobs(engine, tokenizer, prompts):
    first, again = (generate_greedy(prompts, engine, tokenizer, CONFIG, stop_token_ids=[0]) for _ in range(2))
    assert first == again
    assert [r.prompt for r in first] == prompts
    assert [r.sequence_id for r in first] == [p.prompt_id for p in prompts]
    assert all(r.rollout_logprobs == [] for r in first)
    alone = [generate_greedy([p], engine, tokenizer, CONFIG, stop_token_ids=[0])[0] for p in prompts]
    assert [r.response_ids for r in alone] == [r.response_ids for r in first]


# --- the text that is judged

SPECIAL = ["</s>", "<|im_start|>", "<think>"]
EOS, IM_START = 0, 1
SPACE = "\u2581"  # SentencePiece's mark of a space
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def wrap(core):
    """Return the tokenizer that transformers makes of it, with clean-up of spaces as many old tokenizers have it."""
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=True)


def byte_level():
    """A byte-level BPE without merges, as GPT-2's and Qwen's: every token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(SPECIAL + alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return wrap(core)


def metaspace():
    """A SentencePiece tokenizer of words and characters, whose decoder strips the first space."""
    words = [SPACE, *"abcdefghijklmnopqrstuvwxyz+=0123456789.,!", f"{SPACE}is", f"{SPACE}four"]
    core = Tokenizer(models.Unigram([(t, 0.0) for t in SPECIAL] + [(t, -len(words) / len(t)) for t in words], unk_id=0))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return wrap(core)


def byte_fallback():
    """Llama 2's kind: characters, and bytes for those that the vocabulary lacks."""
    tokens = [*SPECIAL, *BYTES, SPACE, *"abcdefghijklmnopqrstuvwxyz+=0123456789.,!", "\n"]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    return wrap(core)


def respond(tokenizer, prompt_text, tokens, *, is_truncated=False, prefill="", stop_token_ids=(EOS,)):
    """Return the rollout of a response of the given tokens."""
    prompt = Prompt(
        prompt_id=0,
        text=prompt_text,
        token_ids=tokenizer(prompt_text, add_special_tokens=False)["input_ids"],
        prefill=prefill,
    )
    ids = tokenizer.convert_tokens_to_ids(tokens)
    text = judged_text(
        prompt, Generation(token_ids=ids, logprobs=[], is_truncated=is_truncated), tokenizer, stop_token_ids
    )
    return make_rollout(
        prompt.token_ids, ids, prompt_text=prompt_text, prefill=prefill, is_truncated=is_truncated, text=text
    )


@pytest.mark.parametrize(
    "make, tokens, expected",
    [
        (byte_level, ["\u0120", "4", "\u0120", "."], " 4 ."),
        (byte_level, ["4", "\u00c3", "\u00a9"], "4\u00e9"),
        (byte_level, [], ""),
        (metaspace, [f"{SPACE}is", f"{SPACE}four", SPACE, "."], " is four ."),
        (metaspace, ["4", SPACE, ","], "4 ,"),
        (metaspace, [], ""),
        (byte_fallback, [SPACE, "4", SPACE, "."], " 4 ."),
        (byte_fallback, [SPACE, SPACE, "4"], "  4"),
        (byte_fallback, ["<0xC3>", "<0xA9>", "!"], "\u00e9!"),
    ],
)
@pytest.mark.parametrize("prompt_text", ["what is 2+2", "i", "2+2 =<|im_start|>", "what <think>"])
def test_prompt_and_judged_text_are_the_text_of_all_tokens(make, tokens, expected, prompt_text):
    """A decoder that strips the first space of a text does not strip that of a response; nothing is cleaned up."""
    tokenizer = make()
    rollout = respond(tokenizer, prompt_text, [*tokens, "</s>"])
    assert rollout.text == expected
    ids = rollout.prompt.token_ids + rollout.response_ids[:-1]
    assert rollout.full_text == prompt_text + expected == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("make", [byte_level, metaspace, byte_fallback])
def test_special_tokens_that_the_model_wrote_are_judged(make):
    tokenizer = make()
    tokens = ["<think>", "2", "<|im_start|>", "</s>", "4"]
    assert respond(tokenizer, "2+2=", [*tokens, "</s>"], stop_token_ids=[EOS]).text == "<think>2<|im_start|></s>4"
    assert respond(tokenizer, "2+2=", tokens, is_truncated=True).text == "<think>2<|im_start|></s>4"


def test_only_the_stop_token_that_ended_the_response_is_left_out():
    tokenizer = byte_level()
    four = tokenizer.convert_tokens_to_ids("4")
    assert respond(tokenizer, "2+2=", ["4", "<|im_start|>"], stop_token_ids=[EOS, IM_START]).text == "4"
    assert respond(tokenizer, "2+2=", ["4", "4"], stop_token_ids=[EOS, four]).text == "4"
    assert respond(tokenizer, "2+2=", ["4", "!"]).text == "4!"  # a stop string ended it
    assert respond(tokenizer, "2+2=", ["4", "!"], is_truncated=True).text == "4!"
    assert respond(tokenizer, "2+2=", ["</s>"]).text == ""


@pytest.mark.parametrize("make, first_byte", [(byte_level, "\u00c3"), (byte_fallback, "<0xC3>")])
@pytest.mark.parametrize("prompt_text", ["a", "\u00e9"])
def test_a_character_that_the_token_limit_cut_is_one_replacement_character(make, first_byte, prompt_text):
    rollout = respond(make(), prompt_text, ["4", first_byte], is_truncated=True)
    assert rollout.text == "4\ufffd" and rollout.full_text == f"{prompt_text}4\ufffd"
    assert respond(make(), prompt_text, [first_byte], is_truncated=True).text == "\ufffd"


@pytest.mark.parametrize("make", [byte_level, metaspace, byte_fallback])
def test_the_prefill_begins_the_judged_text_and_occurs_once(make):
    rollout = respond(make(), "2+2=<think>", ["4", "</s>"], prefill="<think>")
    assert rollout.text == "<think>4" and rollout.full_text == "2+2=<think>4"
    assert rollout.prompt.text_without_prefill == "2+2="
