"""Chats end where the response begins, and what the template writes in the model's name is known."""

import json
from datetime import datetime

import pytest
import torch
from transformers.utils import chat_template_utils

from hybrid_rl.config import ConfigError, PromptsConfig, PtxConfig
from hybrid_rl.data.order import PromptLoader
from hybrid_rl.data.prompts import encode_prompt
from hybrid_rl.data.texts import load_text_sets
from hybrid_rl.distributed import World
from hybrid_rl.rewards.rules import FUNCTIONS
from hybrid_rl.steps.ptx import PtxLoss
from tests.conftest import make_tokenizer

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
CHAT = [{"role": "user", "content": "2+2"}]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
QWEN = (  # past turns with thoughts only after the last question of the user, as Qwen3
    "{% set last = messages | map(attribute='role') | list %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and 'user' not in last[loop.index0:] %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
)
DEEPSEEK = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}<think></think>\n{% endif %}{{ m.content }}{% endfor %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


def encode(template, end, messages=CHAT, **settings):
    tokenizer = make_tokenizer()
    prompt = "{% if add_generation_prompt %}" + end + "{% endif %}"
    tokenizer.chat_template = (
        {"default": template + prompt, "tool_use": "x"} if settings.pop("named", 0) else template + prompt
    )
    return encode_prompt(tokenizer, {"prompt": messages}, PromptsConfig(**settings), prompt_id=3)


@pytest.mark.parametrize(
    "template, end, prefill",
    [
        (CHATML, "<|im_start|>assistant\n", ""),
        (CHATML, "<|im_start|>assistant\n<think>\n", "<think>\n"),
        (CHATML, "<|im_start|>assistant\nLet me think.\n<think>", "Let me think.\n<think>"),
        (QWEN, "<|im_start|>assistant\n", ""),
        (QWEN, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        (DEEPSEEK, "<assistant><think>\n", "<think>\n"),
        (DEEPSEEK, "<assistant></think>", "</think>"),
        (GLM, "<|assistant|>\n", ""),
        (GLM, "<|assistant|>\n<think>\n", "<think>\n"),
        (GLM, "<|assistant|>\n<think></think>", "<think></think>"),
        (MISTRAL, "", ""),
    ],
)
@pytest.mark.parametrize("messages", [CHAT, [*CHAT, {"role": "assistant", "content": "4"}, *CHAT]])
def test_the_prefill_is_what_the_template_writes_after_the_assistants_header(template, end, prefill, messages):
    prompt = encode(template, end, messages)
    assert prompt.prefill == prefill and prompt.text.endswith(end)


def test_a_template_that_changes_earlier_turns_has_the_prefill_of_a_short_chat():
    tools = [*CHAT, {"role": "assistant", "content": "look up"}, {"role": "tool", "content": "4"}]
    for messages in (tools, CHAT):
        prompt = encode(
            QWEN.replace("'user' not in", "'user' in last and 'user' not in"),
            "<|im_start|>assistant\n<think>\n",
            messages,
        )
        assert prompt.prefill == "<think>\n"
    assert (
        encode("{% for m in messages[-1:] %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<assistant><think>").prefill
        == "<think>"
    )


def test_a_prefilled_think_block_and_the_models_rest_have_the_right_format():
    prompt = encode(CHATML, "<|im_start|>assistant\n<think>\n")
    score = FUNCTIONS["think_format"]
    assert score(prompt, prompt.prefill + "2+2\n</think>\n<answer>4</answer>") == 1
    assert score(prompt, prompt.prefill + "<think>2+2\n</think>\n<answer>4</answer>") == 0


def test_the_default_of_several_templates_is_taken():
    assert encode(CHATML, "<|im_start|>assistant\n", named=True).text.endswith("2+2<|im_end|>\n<|im_start|>assistant\n")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"rag": "x", "tool_use": "y"}
    with pytest.raises(
        ConfigError, match=r"row 3: the tokenizer .* has the chat templates rag, tool_use and none named"
    ):
        encode_prompt(tokenizer, {"prompt": CHAT}, PromptsConfig(), prompt_id=3)


def test_messages_that_end_with_an_assistants_turn_are_refused():
    with pytest.raises(ConfigError, match="row 3: its messages end with the role 'assistant': put an assistant's answ"):
        encode(CHATML, "<|im_start|>assistant\n", [*CHAT, {"role": "assistant", "content": "4"}])


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
def test_messages_that_end_with_any_other_turn_are_what_the_template_makes_of_them(role):
    end = "<|im_start|>assistant\n<think>\n"
    prompt = encode(CHATML, end, [*CHAT, {"role": role, "content": "4"}])
    expected = f"<|im_start|>user\n2+2<|im_end|>\n<|im_start|>{role}\n4<|im_end|>\n{end}"
    assert (prompt.text, prompt.prefill) == (expected, "<think>\n")
    refusing = CHATML.replace(
        "{{ m.role", "{% if m.role == '" + role + "' %}{{ raise_exception('no') }}{% endif %}{{ m.role"
    )
    with pytest.raises(ConfigError, match="row 3: the chat template refuses its messages: no"):
        encode(refusing, end, [{"role": role, "content": "4"}])


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ messages[7].content + 1 }}", "{{ 1 / 0 }}", "{% for %}"]
)
def test_a_template_that_fails_in_any_way_is_one_sentence(template):
    with pytest.raises(ConfigError, match="row 3: the chat template refuses its messages: "):
        encode(template, "")


def test_a_key_that_only_other_rows_have_is_no_part_of_a_message():
    chat = [{"role": "user", "content": "2+2", "name": None}]
    assert encode("{% for m in messages %}{{ m.keys() | list | length }}{% endfor %}", "", chat).text == "2"


class Day(datetime):
    """The date in the year year_now."""

    year_now = 2031

    @classmethod
    def now(cls, tz=None):
        return cls(cls.year_now, 5, 6, tzinfo=tz)


def test_a_template_with_the_date_gives_the_same_data_set_on_another_day(monkeypatch):
    def prompt_of(question):
        dated = "{{ strftime_now('%Y') }} " + CHATML
        return encode(dated, "<|im_start|>assistant\n", [{"role": "user", "content": question}])

    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    monkeypatch.setattr(Day, "year_now", 2031)
    first = prompt_of("2+2")
    monkeypatch.setattr(Day, "year_now", 2042)
    second, other = prompt_of("2+2"), prompt_of("3+3")
    assert first.text.startswith("2031 ") and second.text.startswith("2042 ")  # the model reads the real date
    settings = {"batch_size": 1, "seed": 0, "shuffle": False}
    state = PromptLoader([first], **settings).state_dict()
    PromptLoader([second], **settings).load_state_dict(state)
    with pytest.raises(ConfigError, match="the data set is not the checkpoint's"):
        PromptLoader([other], **settings).load_state_dict(state)


def test_ptx_texts_with_the_date_are_the_same_stream_on_another_day(monkeypatch, tmp_path):
    def stream_of(answer):
        turns = [*CHAT, {"role": "assistant", "content": answer}]
        (tmp_path / "texts.jsonl").write_text(json.dumps({"text": turns}) + "\n")
        tokenizer = make_tokenizer()
        tokenizer.chat_template = "{{ strftime_now('%Y') }}=" + "{% for m in messages %}{{ m.content }}{% endfor %}"
        config = PtxConfig(path=str(tmp_path / "texts.jsonl"))
        texts = load_text_sets(config, tokenizer)[0].texts
        ids, undated = [text.token_ids for text in texts], [text.undated_token_ids for text in texts]
        return tokenizer.decode(ids[0]), PtxLoss(ids, config, ALONE, seed=0, undated_texts=undated)

    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    monkeypatch.setattr(Day, "year_now", 2031)
    text, first = stream_of("4")
    monkeypatch.setattr(Day, "year_now", 2042)
    later_text, second = stream_of("4")
    assert (text, later_text) == ("2031=2+24<eos>", "2042=2+24<eos>")  # the model reads the real date
    second.load_state_dict(first.state_dict())
    with pytest.raises(ConfigError, match=r"ptx\.path = .*: with run\.seed = 0 the hash of its texts is"):
        stream_of("5")[1].load_state_dict(first.state_dict())
