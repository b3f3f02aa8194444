"""`colocated.py data`: prompts, lengths, and whether the rule functions tell answers from empty responses."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hybrid_rl.config import Config, ConfigError
from launch.data import histogram, show_data
from tests.conftest import VALID_CONFIG, change

ROWS = [{"question": f"{n} + 1 =", "answer": f"so\n#### {n + 1}"} for n in range(3)]


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Config:
    rows = tmp_path / "gsm8k.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return change(
        VALID_CONFIG,
        {
            "models.actor": str(tiny / "policy"),
            "prompts.path": str(rows),
            "prompts.max_prompt_tokens": 16,
            "rollout.rollout_batch_size": 4,
            "rollout.max_response_tokens": 12,
            "update.mini_batch_size": 4,
            "reward.functions": ["last_number"],
        },
    )


def shown(config: Config) -> tuple[bool, str]:
    console = Console(file=StringIO(), width=120)
    return show_data(config, console), console.file.getvalue()  # type: ignore[attr-defined]


def test_a_histogram_has_ranges_of_equal_width():
    assert histogram([7]) == [(7, 7, 1)]
    assert histogram([1, 1, 2, 9]) == [(n, n + 1, count) for n, count in ((1, 3), (3, 0), (5, 0), (7, 0))] + [(9, 9, 1)]
    assert sum(count for _, _, count in histogram(list(range(100)))) == 100
    assert len(histogram(list(range(100)))) <= 8


def test_prompts_are_shown_as_the_engine_gets_them_and_functions_tell_answers_apart(config):
    is_right, text = shown(config)
    assert is_right
    assert "text: '0 + 1 ='" in text and "answer: '1'" in text
    assert "prompts.path: 3 prompts" in text
    (row,) = [line for line in text.splitlines() if "last_number" in line]
    assert "3 of 3" in row and "the answer alone" in row and row.split("│")[4].strip() == "0"


def test_a_function_that_wants_a_form_gets_it_and_one_that_scores_anything_is_found_out(config, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(
        "def boxed(prompt, response):\n"
        "    return float(response == '\\\\boxed{' + prompt.answer + '}')\n"
        "def anything(prompt, response):\n"
        "    return 1.0\n"
        "def never(prompt, response):\n"
        "    return 0.0\n"
    )
    is_right, text = shown(change(config, {"reward.functions": [f"{file}:boxed"]}))
    assert is_right and "\\boxed{...}" in text
    for name in ("anything", "never"):
        assert not shown(change(config, {"reward.functions": [f"{file}:{name}"]}))[0]


def test_rows_without_answers_and_rows_that_cannot_be_used_are_said(config, tmp_path):
    rows = tmp_path / "chats.jsonl"
    rows.write_text(json.dumps({"prompt": "say 1", "chosen": "1", "rejected": "2"}) + "\n")
    assert "no prompt has an answer" in shown(change(config, {"prompts.path": str(rows)}))[1]
    with pytest.raises(ConfigError, match=r"longer than prompts.max_prompt_tokens = 2"):
        shown(change(config, {"prompts.max_prompt_tokens": 2}))


def test_each_of_several_right_answers_must_be_found_right(config, tmp_path):
    rows, file = tmp_path / "several.jsonl", tmp_path / "rewards.py"
    rows.write_text(json.dumps({"prompt": "1 + 1 =", "answer": ["2", "2.0"]}) + "\n")
    file.write_text("def first(prompt, response):\n    return float(response == prompt.answer[0])\n")
    is_right, text = shown(change(config, {"prompts.path": str(rows)}))
    assert is_right and "answers: ['2', '2.0']" in text and "1 of 1" in text
    assert not shown(change(config, {"prompts.path": str(rows), "reward.functions": [f"{file}:first"]}))[0]


def test_functions_chosen_by_data_set_are_tried_on_their_own_rows(config, tmp_path):
    rows = tmp_path / "mixed.jsonl"
    answers = {"openai/gsm8k": "3", "math": r"\\frac{1}{2}"}
    rows.write_text(
        "".join(f'{{"prompt": "1 + 1 =", "answer": "{answers[name]}", "data_source": "{name}"}}\n' for name in answers)
    )
    is_right, text = shown(change(config, {"prompts.path": str(rows), "reward.functions": ["by_source"]}))
    assert is_right and text.count("1 of 1") == 2
    assert f"prompts.path = {rows}: 2 prompts in the format plain" in text
