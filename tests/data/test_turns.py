"""Tokens between two turns: what chat templates write there, worked by hand, for turns that ended and that were cut."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_rl.batch import Prompt
from hybrid_rl.config import ConfigError, PromptsConfig
from hybrid_rl.data.template import Template
from hybrid_rl.data.tool_calls import ToolFormat
from hybrid_rl.data.turns import TurnEncoder
from hybrid_rl.models.tokenizer import decode_after

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
DROPS_THINKING = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
TRIMS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %} "
    "{{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
ONLY_USERS = CHATML.replace(
    "<|im_start|>{{ m.role }}",
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}<|im_start|>{{ m.role }}",
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "</s>"]
IM_END, END_OF_TEXT, END = 1, 2, 3
PROMPT = Prompt(prompt_id=0, text="", token_ids=[5], messages=[{"role": "user", "content": "hi"}])


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and four special tokens."""
    words = [*SPECIAL, *map(chr, range(32, 127)), "\n"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|endoftext|>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)


def no_tools() -> ToolFormat:
    raise AssertionError("these conversations have no tools")


def encoder(template: str) -> TurnEncoder:
    return TurnEncoder(make_tokenizer(template), PromptsConfig(), Template(), make_tool_format=no_tools)


def glue(template: str, observation, stop_token: int | None, prompt: Prompt = PROMPT) -> str:
    """Return the text of the tokens after a turn."""
    made = encoder(template).glue(prompt, observation, stop_token=stop_token)
    return decode_after(make_tokenizer(template), [], made.token_ids)


@pytest.mark.parametrize(
    "template, stop_token, expected",
    [
        (CHATML, IM_END, "\n<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, None, "<|im_end|>\n<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, END_OF_TEXT, "<|im_end|>\n<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"),
        (THINKING, IM_END, "\n<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        (TRIMS, END, "[INST] 7 [/INST]"),
        (TRIMS, None, "</s>[INST] 7 [/INST]"),
    ],
)
def test_what_the_template_writes_after_a_turn_that_ended_or_was_cut(template, stop_token, expected):
    """The token that ended the turn stands there already."""
    assert glue(template, "7", stop_token) == expected


def test_several_messages_are_written_with_their_roles():
    messages = [{"role": "tool", "content": "42"}, {"role": "user", "content": "and?"}]
    expected = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert glue(CHATML, messages, IM_END) == expected


def test_history_and_glue_are_what_the_template_renders_at_once():
    """For a template that leaves turns as they are, prompt, turn and glue are the rendering of the whole chat."""
    tokenizer, made = make_tokenizer(CHATML), encoder(CHATML)
    start = made.prompt(PROMPT, "first", None)
    turn = tokenizer("an answer<|im_end|>", add_special_tokens=False)["input_ids"]
    after = made.glue(start, "second", stop_token=turn[-1])
    chat = [("user", "first"), ("assistant", "an answer"), ("user", "second")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in chat],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert [*start.token_ids, *turn, *after.token_ids] == whole


def test_the_thinking_that_a_template_begins_belongs_to_the_turn():
    made = encoder(THINKING)
    assert made.prompt(PROMPT, "first", None).prefill == "<think>\n"
    assert made.glue(PROMPT, "second", stop_token=IM_END).prefill == "<think>\n"


def test_text_prompts_get_the_text_of_the_environment_as_it_is():
    plain = Prompt(prompt_id=0, text="a", token_ids=[70])
    assert glue(CHATML, " higher\n", IM_END, plain) == " higher\n"
    assert encoder(CHATML).prompt(plain, "guess:", None).text == "guess:"
    with pytest.raises(ConfigError, match="the environment gives messages, but the prompts are text"):
        glue(CHATML, [{"role": "user", "content": "x"}], None, plain)
    with pytest.raises(ConfigError, match="gives messages or tools, but the prompts are text"):
        encoder(CHATML).prompt(plain, [{"role": "user", "content": "x"}], None)


def test_a_text_prompt_that_the_template_wraps_stays_the_prompt_where_the_environment_says_nothing():
    wrapped = Prompt(prompt_id=0, text="rendered", token_ids=[70], user_text="3+4")
    assert encoder(CHATML).prompt(wrapped, None, None) is wrapped
    assert (
        encoder(CHATML).prompt(wrapped, "5+6", None).text == "<|im_start|>user\n5+6<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template, expected", [(CHATML, False), (DROPS_THINKING, True), (THINKING, True)])
def test_a_template_that_rewrites_earlier_turns_is_noticed(template, expected):
    assert encoder(template).rewrites_history() is expected


def test_a_template_that_refuses_a_role_is_one_sentence():
    sentence = (
        "the chat template refuses messages with the roles user, assistant, tool: no tools here; give other messages"
    )
    with pytest.raises(ConfigError, match=sentence):
        glue(ONLY_USERS, [{"role": "tool", "content": "42"}], IM_END)


def test_a_first_observation_beyond_the_limit_of_a_prompt_is_refused():
    made = TurnEncoder(
        make_tokenizer(CHATML), PromptsConfig(max_prompt_tokens=25), Template(), make_tool_format=no_tools
    )
    with pytest.raises(ConfigError, match=r"has 26 tokens: raise prompts\.max_prompt_tokens = 25"):
        made.prompt(PROMPT, "1234567", None)


def test_a_verbatim_observation_is_all_the_text_and_no_mark_stands_twice():
    """Agent files of OpenRLHF write the marks of the template themselves."""
    tokenizer, made = make_tokenizer(CHATML), encoder(CHATML)
    said = "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    after = [made.glue(PROMPT, said, stop_token=stop, is_verbatim=True).token_ids for stop in (IM_END, None)]
    assert [decode_after(tokenizer, [], ids) for ids in after] == [said.removeprefix("<|im_end|>"), said]
    assert made.prompt(PROMPT, "<|im_start|>user\nhi", None, is_verbatim=True).text == "<|im_start|>user\nhi"
