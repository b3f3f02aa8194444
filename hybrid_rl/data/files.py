"""Data rows of a file, one dict per row: JSONL, CSV, Parquet, or a folder of Hugging Face datasets."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hybrid_rl.config import ConfigError, check

Row = dict[str, Any]
"""One data row: column name -> value."""
Message = dict[str, Any]
"""One chat message, with text in `role` and `content`."""


def read_rows(path: Path, *, source: str, text_column: str) -> list[Row]:
    """Return the rows of a JSONL, CSV or Parquet file, or of a folder written by datasets' save_to_disk.

    Args:
        source: setting and file, for messages.
        text_column: column of a CSV file that may hold chat messages as JSON, which are returned as a list.
    Raises:
        ConfigError: the file is missing, has another format or is broken.
    """
    check(path.exists(), f"{source}: no such file or folder")
    try:
        if path.is_dir():
            return _read_folder(path, source)
        match path.suffix:
            case ".jsonl" | ".json":
                return _read_jsonl(path, source)
            case ".csv":
                return _read_csv(path, text_column, source)
            case ".parquet":
                return pyarrow.parquet.read_table(path).to_pylist()
    except (UnicodeDecodeError, csv.Error, pyarrow.ArrowInvalid) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from error
    raise ConfigError(f"{source}: must be .jsonl, .csv, .parquet or a dataset folder")


def column_of(row: Row, name: str | None, *, field: str, where: str) -> Any:
    """Return the value of a row in a column.

    Args:
        name: of the column.
        field: setting that names the column, for messages.
        where: file and row, for messages.
    Raises:
        ConfigError: the row has no such column; the message lists those that it has.
    """
    if name not in row:
        raise ConfigError(f"{where} has no column '{name}'; set {field} to one of: {', '.join(map(str, row))}")
    return row[name]


def is_chat(value: Any) -> bool:
    """Return whether a value is a non-empty list of messages with text in `role` and `content`."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _read_folder(path: Path, source: str) -> list[Row]:
    import datasets  # slow to import, and only this format needs it

    try:
        data = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: is not a folder written by datasets' save_to_disk") from error
    if isinstance(data, datasets.DatasetDict):
        split = "train" if len(data) > 1 else next(iter(data))
        check(split in data, f"{source}: has no split 'train' but {', '.join(data)}: give the folder of one split")
        data = data[split]
    return data.to_list()


def _read_jsonl(path: Path, source: str) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{source}: line {number} is not JSON: {error}") from error
            check(isinstance(row, dict), f"{source}: line {number} is not a JSON object; each line must be one")
            rows.append(row)
    return rows


def _read_csv(path: Path, text_column: str, source: str) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows: list[Row] = list(csv.DictReader(file, strict=True))
    for number, row in enumerate(rows):
        check(None not in row, f"{source}: row {number} has more fields than the header")
        text = row.get(text_column)
        if text and text.startswith("["):
            row[text_column] = _parse_messages(text)
    return rows


def _parse_messages(text: str) -> str | list[Message]:
    """Return the chat messages that a CSV field holds as JSON, or its text if it holds none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if is_chat(value) else text
