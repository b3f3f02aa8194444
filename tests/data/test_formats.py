"""Rows as other trainers' data sets have them: the format that is recognised, and what it gives."""

import json
from dataclasses import replace
from typing import Any, get_args

import pyarrow
import pyarrow.parquet
import pytest

from hybrid_rl.config import ConfigError, PromptsConfig
from hybrid_rl.data.formats import FORMATS, Example, lookup, recognise
from hybrid_rl.data.prompts import encode_prompt, load_rows
from hybrid_rl.settings.types import setting_types
from tests.conftest import make_tokenizer

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
    assert set(get_args(setting_types()["prompts.format"])) == {"auto", "plain", *FORMATS}


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


def test_the_rows_of_a_format_get_the_columns_of_the_settings_and_keep_theirs(tmp_path):
    path = tmp_path / "verl.parquet"
    rows = [row for row, _ in EXAMPLES["verl"][:1]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert load_rows(str(path), PromptsConfig(), seed=0) == [rows[0] | {"answer": "4"}]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}"
    prompt = encode_prompt(tokenizer, load_rows(str(path), PromptsConfig(), seed=0)[0], PromptsConfig())
    assert prompt.answer == "4" and prompt.metadata["data_source"] == "openai/gsm8k"
    assert prompt.metadata["extra_info"] == rows[0]["extra_info"]


def test_a_format_without_answers_needs_none_and_another_does(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row for row, _ in EXAMPLES["sharegpt"]]))
    assert [row["prompt"][-1] for row in load_rows(str(path), PromptsConfig(), seed=0)] == [
        {"role": "user", "content": "and 3+3?"},
        USER,
    ]
    path.write_text(json.dumps([{"question": "2+2?", "answer": "#### 4"}, {"question": "3+3?", "answer": "so ####"}]))
    with pytest.raises(ConfigError, match=r"row 1: 'answer' \(prompts.answer_column\) is empty"):
        load_rows(str(path), PromptsConfig(), seed=0)


def test_a_row_of_another_format_than_the_first_is_named(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"question": "2+2?", "answer": "#### 4"}, {"problem": "3+3?", "answer": "6"}]))
    with pytest.raises(ConfigError) as error:
        load_rows(str(path), PromptsConfig(path=str(path)), seed=0)
    expected = "row 1 has no column 'question', only problem, answer (prompts.format gsm8k)"
    assert str(error.value) == f"prompts.path = {path}: {expected}"
    path.write_text(json.dumps([{"question": "2+2?", "answer": "4"}]))
    with pytest.raises(ConfigError, match=r"row 0 has no column 'input', only question, answer \(prompts"):
        load_rows(str(path), PromptsConfig(format="openrlhf"), seed=0)


def test_columns_inside_dictionaries_are_read_by_their_dotted_names(tmp_path):
    path = tmp_path / "rows.json"
    rows = [{"q": {"text": "2+2?"}, "gold": {"value": 4, "unit": "x"}}]
    path.write_text(json.dumps(rows))
    config = PromptsConfig(prompt_column="q.text", answer_column="gold.value")
    (row,) = load_rows(str(path), config, seed=0)
    prompt = encode_prompt(make_tokenizer(), row, config)
    assert (prompt.text, prompt.answer, prompt.metadata) == ("2+2?", "4", rows[0])
    with pytest.raises(ConfigError, match=r"has no column 'gold.amount'; set prompts.answer_column to one of: q, gold"):
        load_rows(str(path), replace(config, answer_column="gold.amount"), seed=0)
