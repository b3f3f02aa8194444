"""Conversation templates: their keys, their errors, and the prompts rendered with them."""

import json

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_rl.config import ConfigError, PromptsConfig
from hybrid_rl.data.prompts import encode_prompt, load_prompts
from hybrid_rl.data.template import Template, load_template
from hybrid_rl.rewards import FUNCTIONS

CHAT = [{"role": "user", "content": "say 7"}]
OWN = (
    "{% for m in messages %}{{ 'own' if m['role'] == 'assistant' else m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}own{% endif %}"
)
OTHER = OWN.replace("own", "[assistant]")
TAGS = {
    "think_start": {"text": "[", "num_occur": 0},
    "think_end": {"text": "]", "num_occur": 1},
    "answer_start": {"text": "(", "num_occur": 1},
    "answer_end": {"text": ")", "num_occur": 1},
}


def make_tokenizer():
    words = ["</s>", "<unk>", "<|end|>", "say", "user", "assistant", "system", "be", "brief", "own", "[", "]", "7"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    # Words and punctuation marks; a line break is a token.
    splits = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split(Regex(r"\w+|\n|[^\w\s]"), "isolated")]
    core.pre_tokenizer = pre_tokenizers.Sequence(splits)
    core.add_special_tokens(["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = OWN
    return tokenizer


TOKENIZER = make_tokenizer()


@pytest.fixture
def write(tmp_path):
    """Return a function that writes keys as JSON, or a text unchanged, to a template file and returns its path."""

    def write_file(keys):
        path = tmp_path / "template.json"
        path.write_text(keys if isinstance(keys, str) else json.dumps(keys))
        return str(path)

    return write_file


def test_every_key_is_read(write):
    keys = {
        "chat_template": OTHER,
        "system_message": "be brief",
        "stop_ids": [2, 3],
        "end_of_assistant": "say 7",
        "response_format_tags": TAGS,
    }
    assert load_template(write(keys), TOKENIZER) == Template(
        chat_template=OTHER,
        system_message="be brief",
        stop_token_ids=(2, 3),
        end_of_assistant="say 7",
        response_format_tags=TAGS,
    )


@pytest.mark.parametrize(
    "keys", [{}, {"chat_template": None, "system_message": "", "stop_ids": None}, {"stop_ids": []}]
)
def test_missing_keys_change_nothing(write, keys):
    assert load_template(write(keys), TOKENIZER) == Template() == load_template(None, TOKENIZER)


def test_the_token_of_end_of_assistant_ends_a_response_unless_stop_ids_are_given(write):
    assert load_template(write({"end_of_assistant": "<|end|>\n"}), TOKENIZER).stop_token_ids == (2,)
    assert load_template(write({"end_of_assistant": "<|end|>", "stop_ids": []}), TOKENIZER).stop_token_ids == ()


@pytest.mark.parametrize(
    "keys, message",
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object with some of: chat_template, "),
        ({"stop_tokens": []}, "unknown key 'stop_tokens'; there are: chat_template, system_message, stop_ids"),
        ({"chat_template": 1}, "chat_template must be text or null, got 1"),
        ({"system_message": ["be brief"]}, "system_message must be text or null"),
        ({"end_of_assistant": 2}, "end_of_assistant must be text or null"),
        ({"end_of_assistant": "say 7"}, "end_of_assistant 'say 7' is 2 tokens, .* give stop_ids"),
        ({"stop_ids": 2}, "stop_ids must be a list of token ids, got 2"),
        ({"stop_ids": ["<|end|>"]}, "stop_ids must be a list of token ids"),
        ({"stop_ids": [True]}, "stop_ids must be a list of token ids"),
        ({"stop_ids": [2, 13]}, "stop_ids: the tokenizer has no token 13, only 0 to 12"),
        (
            {"response_format_tags": []},
            "response_format_tags must have exactly the tags think_start, think_end, answer_",
        ),
        ({"response_format_tags": {"think_start": {}}}, r"must have exactly the tags .* got \{'think_start': \{\}\}"),
        ({"response_format_tags": TAGS | {"answer_end": ")"}}, r"answer_end must be \{text, num_occur\}, got '\)'"),
        ({"response_format_tags": TAGS | {"answer_end": {"text": "", "num_occur": 1}}}, "answer_end.text must be"),
        (
            {"response_format_tags": TAGS | {"answer_end": {"text": "x", "num_occur": 2}}},
            "num_occur = 2: must be 0 or 1",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(write, keys, message):
    path = write(keys)
    with pytest.raises(ConfigError, match=rf"prompts\.template_path = {path}.*{message}"):
        load_template(path, TOKENIZER)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"prompts\.template_path = .*absent\.json: there is no such file"):
        load_template(str(tmp_path / "absent.json"), TOKENIZER)


# --- prompts


def encode(row, path, **settings):
    return encode_prompt(TOKENIZER, {"prompt": row}, PromptsConfig(template_path=path, **settings))


def test_chat_template_and_system_message_render_the_prompt(write):
    assert encode(CHAT, None).text == "user say 7 own"
    assert encode(CHAT, write({"chat_template": OTHER})).text == "user say 7 [assistant]"
    assert encode("say 7", write({"chat_template": OTHER}), chat=True).text == "user say 7 [assistant]"
    assert encode(CHAT, write({"system_message": "be brief"})).text == "system be brief user say 7 own"
    prompt = encode(CHAT, write({"chat_template": OTHER}), system_message="be brief")
    assert prompt.text == "system be brief user say 7 [assistant]"
    assert prompt.token_ids == [6, 7, 8, 4, 3, 12, 10, 5, 11]


def test_prompts_of_a_data_set_follow_the_template_and_carry_its_tags(write, tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": CHAT, "answer": "7", "level": 1}) + "\n")
    config = PromptsConfig(template_path=write({"chat_template": OTHER, "response_format_tags": TAGS}))
    (prompt,) = load_prompts(str(tmp_path / "data.jsonl"), TOKENIZER, config, seed=0).prompts
    assert prompt.text == "user say 7 [assistant]"
    assert prompt.metadata == {"level": 1, "response_format_tags": TAGS}
    assert FUNCTIONS["think_format"](prompt, "so ] (7)") == 1
    assert FUNCTIONS["think_format"](prompt, "<think>so</think><answer>7</answer>") == 0


@pytest.mark.parametrize(
    "prompt, keys, settings, message",
    [
        ("say 7", {"chat_template": OTHER}, {}, "chat_template in prompts.template_path = .* is set but row 0 is text"),
        ("say 7", {"system_message": "be brief"}, {}, "system_message in .* is set but row 0 is text"),
        (CHAT, {"system_message": "a"}, {"system_message": "b"}, "prompts.system_message is set, and another one in"),
        (
            [{"role": "system", "content": "be brief"}, *CHAT],
            {"system_message": "be brief"},
            {},
            "prompts.template_path is set but row 0 already starts with a system message",
        ),
        (
            CHAT,
            {"chat_template": "{{ raise_exception('no') }}"},
            {},
            "row 0: the chat template refuses its messages: no",
        ),
    ],
)
def test_settings_and_rows_that_contradict_the_template_are_refused(write, prompt, keys, settings, message):
    with pytest.raises(ConfigError, match=message):
        encode(prompt, write(keys), **settings)


def test_a_template_without_chat_keys_leaves_text_prompts_unchanged(write):
    assert encode("say 7", write({"stop_ids": [2], "response_format_tags": TAGS})).text == "say 7"
