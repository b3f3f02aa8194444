"""Data rows of files: every format gives the same rows, and broken files are named."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.data.files import EVALUATION_SPLITS, column_of, is_chat, read_rows

ROWS = [{"prompt": f"say {n}", "answer": str(n), "level": n % 3} for n in range(5)]
CHAT = [{"role": "user", "content": "say 7"}]


def read(path, **options):
    return read_rows(path, source="prompts.path = F", text_column="prompt", **options)


def save(format, folder):
    """Save ROWS in a format and return the path."""
    path = folder / f"data.{format}"
    match format:
        case "jsonl" | "json":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case "array.json":
            path.write_text(json.dumps(ROWS, indent=1))
        case "marked_array.jsonl":
            path.write_text(f"\n  {json.dumps(ROWS)}\n", encoding="utf-8-sig")
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


@pytest.mark.parametrize(
    "format",
    ["jsonl", "json", "array.json", "marked_array.jsonl", "csv", "parquet", "dataset", "only_split", "train_split"],
)
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
        ("data.txt", b"hello", "must be .jsonl, .json, .csv, .parquet or a dataset folder"),
        ("data.parquet", b"not parquet", "cannot be read: ArrowInvalid: "),
        ("data.parquet", b"", "cannot be read: ArrowInvalid: "),
        ("data.jsonl", b"\xff\xfe", "line 1 is not UTF-8: byte 0xff; save the file in UTF-8"),
        ("data.jsonl", b'{"prompt": "a"}\n{"prompt": "caf\xe9"}', "line 2 is not UTF-8: byte 0xe9"),
        ("data.json", b'[{"prompt": "a"},\n{"prompt": "caf\xe9"}]', "F: line 2 is not UTF-8: byte 0xe9"),
        ("data.csv", b"prompt,answer\na,b\ncaf\xe9,b\n", "F: line 3 is not UTF-8: byte 0xe9"),
        ("data.csv", b'prompt,answer\n"open,b\n', "row 0: cannot be read: unexpected end of data"),
        ("data.csv", b'prompt,answer\na,b\n"a"c,b\n', "row 1: cannot be read: "),
        ("data.csv", b"prompt,answer\na,b,c\n", "row 0 has more fields than the header"),
        ("data.csv", b"prompt,answer\na,b\na\n", "row 1 has fewer fields than the header"),
        ("data.csv", b"prompt,answer,prompt\na,b,c\n", "has two columns named 'prompt': rename one"),
        ("data.jsonl", b'{"prompt": "a"}\n{"prompt"', "line 2 is not JSON"),
        ("data.jsonl", b"prompt", "line 1 is not JSON"),
        ("data.jsonl", b'"a"', "line 1 is not a JSON object"),
        ("data.jsonl", b'["a"]', "row 0 is not a JSON object; each item of the array must be one"),
        ("data.json", b'[{"prompt": "a"}, 7]', "row 1 is not a JSON object"),
        ("data.json", b'[{"prompt": "a"},', "is not JSON"),
        ("data.json", b'{"rows": [{"prompt": "a"}]}', "one JSON object with a list of objects under 'rows'"),
        ("data.json", b'{\n"rows": [{"prompt": "a"}]\n}', "the file is one object over several lines"),
        ("data.jsonl", b'{"prompt": "a", "answer": NaN}', "line 1 has NaN, which JSON does not allow: write null"),
        ("data.jsonl", b'{"prompt": "a"}\n{"n": [-Infinity]}', "line 2 has -Infinity"),
        ("data.json", b'[{"prompt": "a", "answer": Infinity}]', "F: row 0 has Infinity"),
        ("data.json", b'[{"prompt": "a"},\n{"answer": NaN}]', "row 1 has NaN, which JSON does not allow: write null"),
        ("data.json", b'[{"n": [[1], {"a": 2}]}, {}, {"n": [[NaN]]}, {}]', "row 2 has NaN"),
        ("data.json", b'[{"a": 1}, {"a": 2, "a": 3}]', "row 1 has the key 'a' twice: keep one"),
        ("data.json", b'[{"a": 1}, {"a": "\\ud83d"}]', "row 1 has half of a surrogate pair"),
        ("data.json", b'[{"a": 1} {"a": 2}]', "row 0 is not JSON: '{' follows it instead of a comma or ]"),
        ("data.json", b'[{"a": 1}, {"a": 2}', "row 1 is not JSON: the end of the file follows it instead of a comma"),
        ("data.json", b'[{"a": 1},]', "row 1 is not JSON"),
        ("data.json", b'[{"a": 1}] [{"a": 2}]', "the file is not JSON: text follows the array"),
        ("data.jsonl", b'{"prompt": "a", "prompt": "b"}', "line 1 has the key 'prompt' twice: keep one"),
        ("data.jsonl", b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", "line 1 is not JSON: Exceeds the limit"),
        ("data.jsonl", b'{"prompt": "\\ud83d"}', r"line 1 has half of a surrogate pair, '.ud83d': remove it"),
        ("data.jsonl", b"[" * 100_000, "is not JSON"),
        ("data.jsonl", b'{"prompt": ' + b"[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_files_that_cannot_be_read_are_named(name, content, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^prompts.path = .*{message}"):
        read(tmp_path / name)


def test_folders_that_are_not_one_data_set_are_named(tmp_path):
    with pytest.raises(ConfigError, match="save_to_disk"):
        read(tmp_path)
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"a": data, "b": data}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ConfigError, match="has the splits a, b, of which exactly one must be named train: set "):
        read(tmp_path / "splits")


@pytest.mark.parametrize(
    "names, options, expected",
    [
        (("train", "test"), {}, "train"),
        (("train", "test"), {"splits": EVALUATION_SPLITS}, "test"),
        (("train", "validation"), {"splits": EVALUATION_SPLITS}, "validation"),
        (("train",), {"splits": EVALUATION_SPLITS}, "train"),  # the only split
        (("train", "test", "validation"), {"splits": EVALUATION_SPLITS}, None),
        (("train", "dev"), {"splits": EVALUATION_SPLITS}, None),
    ],
)
def test_training_takes_the_split_train_and_evaluation_the_only_one_of_test_and_validation(
    names, options, expected, tmp_path
):
    splits = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in names}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "data"))
    if expected:
        assert read(tmp_path / "data", **options) == [{"prompt": expected}]
        return
    with pytest.raises(ConfigError, match=f"has the splits {', '.join(names)}, .* must be named test or validation"):
        read(tmp_path / "data", **options)


def test_damaged_parquet_and_dataset_folders_are_named(tmp_path):
    path = tmp_path / "data.parquet"
    text = pyarrow.array([b"a", b"caf\xe9"]).cast(pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": text}), path)
    with pytest.raises(ConfigError, match=r"^prompts.path = F: row 1: cannot be read: UnicodeDecodeError: "):
        read(path)
    content = save("parquet", tmp_path).read_bytes()
    for damaged in (content[:-50], content[: len(content) // 2], b"PAR1" + bytes(len(content)) + b"PAR1"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"^prompts.path = F: cannot be read: "):
            read(path)
    folder = save("dataset", tmp_path)
    for name, damage in {"state.json": b"{", "dataset_info.json": b"[]", "data-00000-of-00001.arrow": b"ARROW"}.items():
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(damage)
        with pytest.raises(ConfigError, match=r"^prompts.path = F: cannot be read: "):
            read(folder)
        (folder / name).write_bytes(content)
    assert read(folder) == ROWS


def test_a_list_of_chat_messages_is_a_row_and_not_the_rows(tmp_path):
    (tmp_path / "data.json").write_text(json.dumps({"prompt": CHAT, "answer": "7"}))
    assert read(tmp_path / "data.json") == [{"prompt": CHAT, "answer": "7"}]


def test_csv_keeps_unusual_line_breaks_and_long_fields(tmp_path):
    fields = ["a\u2028b\x85c\x0bd", "long " * 40_000]
    (tmp_path / "data.csv").write_bytes("\r\n".join(["prompt", *fields]).encode("utf-8-sig"))
    assert [row["prompt"] for row in read(tmp_path / "data.csv")] == fields


def test_columns_that_occur_twice_in_parquet_are_refused(tmp_path):
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(ConfigError, match="has two columns named 'prompt': rename one"):
        read(tmp_path / "data.parquet")


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
