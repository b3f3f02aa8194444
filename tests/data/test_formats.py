"""Rows as other trainers' data sets have them: the format that is recognised, and what it gives."""

from typing import Any

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.data.formats import FORMATS, Example, lookup, recognise

USER = {"role": "user", "content": "2+2?"}
REPLY = {"role": "assistant", "content": "4"}
EXAMPLES: dict[str, list[tuple[dict[str, Any], Example]]] = {
    "verl": [
        (
            {
                "data_source": "openai/gsm8k",
                "prompt": [USER],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "4"},
                "extra_info": {"split": "train", "index": 0, "answer": "2+2=4\n#### 4", "question": "2+2?"},
            },
            Example(prompt=[USER], answer="4", source="openai/gsm8k"),
        ),
        (
            {"prompt": [USER], "answer": "not this", "reward_model": {"ground_truth": ["4", "four"]}},
            Example(prompt=[USER], answer=["4", "four"]),
        ),
    ],
    "gsm8k": [
        ({"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, Example(prompt="2+2?", answer="4")),
        ({"question": "2+2?", "answer": "1\n#### 2\n#### 1,000"}, Example(prompt="2+2?", answer="1,000")),
        ({"question": "2+2?", "answer": 4}, Example(prompt="2+2?", answer=4)),
    ],
    "math": [({"problem": "2+2?", "solution": "so 4", "answer": "4"}, Example(prompt="2+2?", answer="4"))],
    "trl": [({"prompt": [USER], "solution": "\\boxed{4}"}, Example(prompt=[USER], answer="\\boxed{4}"))],
    "open_instruct": [
        (
            {"messages": [USER], "ground_truth": "4", "dataset": "gsm8k"},
            Example(prompt=[USER], answer="4", source="gsm8k"),
        ),
        (
            {"messages": [USER], "ground_truth": ["4"], "dataset": ["math", "other"]},
            Example(prompt=[USER], answer=["4"], source="math"),
        ),
    ],
    "openrlhf": [({"input": "2+2?", "label": "4", "datasource": "x"}, Example(prompt="2+2?", answer="4"))],
    "openrlhf_chat": [
        ({"dataset": "x", "context_messages": [USER]}, Example(prompt=[USER])),
        ({"context_messages": [USER], "label": "4"}, Example(prompt=[USER], answer="4")),
    ],
    "sharegpt": [
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": "4"},
                    {"from": "human", "value": "and 3+3?"},
                    {"from": "gpt", "value": "6"},
                ]
            },
            Example(
                prompt=[
                    {"role": "system", "content": "Be brief."},
                    USER,
                    REPLY,
                    {"role": "user", "content": "and 3+3?"},
                ]
            ),
        ),
        ({"id": 3, "conversations": [USER, REPLY]}, Example(prompt=[USER])),
    ],
    "preference": [
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, Example(prompt="2+2?")),
        ({"chosen": [USER, REPLY], "rejected": [USER, {**REPLY, "content": "5"}]}, Example(prompt=[USER])),
        (
            {
                "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2+2?\n\nAssistant: 4",
                "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2+2?\n\nAssistant: 5",
            },
            Example(prompt="\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2+2?\n\nAssistant:"),
        ),
    ],
}
ROWS = [(name, row, wanted) for name, rows in EXAMPLES.items() for row, wanted in rows]


def format_of(row: dict[str, Any], *, prompt: str = "prompt", answer: str | None = "answer") -> str:
    return recognise(row, prompt_column=prompt, answer_column=answer)


def test_every_format_has_an_example():
    assert EXAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize(("name", "row", "wanted"), ROWS, ids=[f"{i}-{row[0]}" for i, row in enumerate(ROWS)])
def test_a_row_is_recognised_and_read(name, row, wanted):
    assert format_of(row) == name
    assert FORMATS[name].read(row) == wanted


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "answer": "4"},
        {"prompt": "2+2?", "answer": "4", "solution": "so 4"},
        {"prompt": "2+2?", "answer": "4", "reward_model": "a name"},
        {"prompt": "2+2?", "answer": "4", "chosen": "a", "rejected": "b"},
        {"text": "2+2?"},
        {},
    ],
)
def test_rows_with_prompt_and_answer_and_rows_of_no_format_are_plain(row):
    assert format_of(row) == "plain"


def test_columns_that_a_user_names_are_the_plain_format():
    row = {"question": "2+2?", "answer": "4", "extra": {"gold": "4"}}
    assert format_of(row) == "gsm8k"
    assert format_of(row, prompt="question") == "plain"
    assert format_of(row, prompt="question", answer="extra.gold") == "plain"
    assert format_of(row, prompt="question", answer=None) == "plain"


def test_a_column_may_lead_into_dictionaries():
    row = {"a": {"b": {"c": 1}}, "a.b": 2}
    assert lookup(row, "a.b.c") == 1
    assert lookup(row, "a.b") == 2
    with pytest.raises(ConfigError, match=r"^has no column 'a.x', only a, a.b$"):
        lookup(row, "a.x")
    with pytest.raises(ConfigError, match=r"^has no column 'a.b.c.d', only"):
        lookup({"a": {"b": {"c": "text"}}}, "a.b.c.d")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("verl", {"prompt": [USER], "reward_model": {"ground_truth": {"target": ["4"]}}}, "prompts.format = plain"),
        ("verl", {"prompt": [USER], "reward_model": {}}, "has no column 'reward_model.ground_truth'"),
        ("sharegpt", {"conversations": [{"from": "judge", "value": "x"}]}, "one of human, user, gpt"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "x"}]}, "has no turn besides the assistant's"),
        ("sharegpt", {"conversations": "text"}, "must be a list of turns"),
        ("preference", {"chosen": "4", "rejected": "5"}, "where there is no column 'prompt'"),
        ("open_instruct", {"messages": [USER], "ground_truth": "4", "dataset": 3}, "must be text, got '3'"),
    ],
)
def test_what_a_row_of_a_format_lacks_is_named(name, row, message):
    with pytest.raises(ConfigError) as error:
        FORMATS[name].read(row)
    assert message in str(error.value)
