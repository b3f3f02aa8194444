"""Data rows of files: every format gives the same rows, and broken files are named."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.data.files import column_of, is_chat, read_rows

ROWS = [{"prompt": f"say {n}", "answer": str(n), "level": n % 3} for n in range(5)]
CHAT = [{"role": "user", "content": "say 7"}]


def read(path):
    return read_rows(path, source="prompts.path = F", text_column="prompt")


def save(format, folder):
    """Save ROWS in a format and return the path."""
    path = folder / f"data.{format}"
    match format:
        case "jsonl" | "json":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case "csv":
            lines = [f"{row['prompt']},{row['answer']},{row['level']}\n" for row in ROWS]
            path.write_text("".join(["prompt,answer,level\n", *lines]))
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        case "dataset":
            datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
        case "only_split":
            datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(path))
        case "train_split":
            other = datasets.Dataset.from_list([{"prompt": "other", "answer": "0", "level": 0}])
            splits = {"test": other, "train": datasets.Dataset.from_list(ROWS)}
            datasets.DatasetDict(splits).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("format", ["jsonl", "json", "csv", "parquet", "dataset", "only_split", "train_split"])
def test_every_format_gives_the_same_rows(format, tmp_path):
    expected = [{**row, "level": str(row["level"])} for row in ROWS] if format == "csv" else ROWS
    assert read(save(format, tmp_path)) == expected


def test_csv_fields_are_text_except_for_chats_in_json(tmp_path):
    field = json.dumps(CHAT).replace('"', '""')
    # pandas writes an index as an unnamed first column.
    (tmp_path / "data.csv").write_text(f',prompt,answer\n0,"{field}","1,000"\n1,[not json,007\n2,"two\nlines",1\n')
    rows = read(tmp_path / "data.csv")
    assert [row["prompt"] for row in rows] == [CHAT, "[not json", "two\nlines"]
    assert [row["answer"] for row in rows] == ["1,000", "007", "1"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("absent.jsonl", None, "no such file or folder"),
        ("data.txt", b"hello", "must be .jsonl, .csv, .parquet or a dataset folder"),
        ("data.parquet", b"not parquet", "cannot be read"),
        ("data.jsonl", b"\xff\xfe", "cannot be read"),
        ("data.csv", b'prompt,answer\n"open,b\n', "cannot be read"),
        ("data.csv", b"prompt,answer\na,b,c\n", "row 0 has more fields than the header"),
        ("data.jsonl", b'{"prompt": "a"}\n{"prompt"', "line 2 is not JSON"),
        ("data.jsonl", b'["a"]', "line 1 is not a JSON object"),
    ],
)
def test_files_that_cannot_be_read_are_named(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^prompts.path = F: .*{message}"):
        read(tmp_path / name)


def test_folders_that_are_not_one_data_set_are_named(tmp_path):
    with pytest.raises(ConfigError, match="save_to_disk"):
        read(tmp_path)
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"a": data, "b": data}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ConfigError, match="no split 'train' but a, b"):
        read(tmp_path / "splits")


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n{"prompt": "b"}\n')
    assert read(tmp_path / "data.jsonl") == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_csv_field_with_json_that_is_no_chat_stays_text(tmp_path):
    (tmp_path / "data.csv").write_text('prompt,answer\n"[1, 2]","[3]"\n')
    assert read(tmp_path / "data.csv") == [{"prompt": "[1, 2]", "answer": "[3]"}]


def test_a_missing_column_names_setting_and_columns():
    assert column_of({"q": None, "a": 1}, "a", field="prompts.answer_column", where="row 3") == 1
    with pytest.raises(ConfigError) as caught:
        column_of({"q": "x", "a": 1}, "prompt", field="prompts.prompt_column", where="row 3")
    assert str(caught.value) == "row 3 has no column 'prompt'; set prompts.prompt_column to one of: q, a"


@pytest.mark.parametrize(
    "value, expected",
    [
        (CHAT, True),
        ([*CHAT, {"role": "assistant", "content": "7", "name": "b"}], True),
        ([], False),
        ("say 7", False),
        ([{"role": "user"}], False),
        ([{"role": "user", "content": 7}], False),
        ([*CHAT, "say 7"], False),
    ],
)
def test_a_chat_is_a_list_of_messages_with_role_and_content(value, expected):
    assert is_chat(value) is expected
