"""Data rows of a file, one dict per row: JSON, CSV, Parquet, or a folder of Hugging Face datasets."""

import csv
import io
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hybrid_rl.config import ConfigError, check
from hybrid_rl.data.json_rows import BYTE_ORDER_MARK, Row, decode, parse_json, read_json_rows

Message = dict[str, Any]
"""One chat message, with text in `role` and `content`."""
TRAINING_SPLITS = ("train",)
EVALUATION_SPLITS = ("test", "validation")
"""Splits of which a DatasetDict must have exactly one."""
DAMAGED = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, pyarrow.ArrowException)
"""What pyarrow and datasets raise for files that are damaged or of a type that they do not read."""


def read_rows(
    path: Path,
    *,
    source: str,
    text_column: str,
    split: str | None = None,
    splits: Sequence[str] = TRAINING_SPLITS,
) -> list[Row]:
    """Return the rows of a JSON, CSV or Parquet file, or of a folder written by datasets' save_to_disk.

    A JSON file has one object per line, or is one array of objects.

    Args:
        source: setting and file, for messages.
        text_column: column of a CSV file that may hold chat messages as JSON, which are returned as a list.
        split: the split of a folder to read; None chooses one by `splits`.
        splits: of a folder with several splits, the one that has one of these names is read.
    Raises:
        ConfigError: the file is missing, has another format or is broken, or is asked for a split; or a folder has no
            such split, or several and not exactly one of the given names. The message names the row or line where
            there is one.
    """
    check(path.exists(), f"{source}: no such file or folder")
    try:
        if path.is_dir():
            return _read_folder(path, split, splits, source)
        check(split is None, f"{source}: is one file, which has no split '{split}': remove the split")
        match path.suffix:
            case ".jsonl" | ".json":
                return read_json_rows(path, text_column=text_column, source=source)
            case ".csv":
                return _read_csv(path, text_column, source)
            case ".parquet":
                return to_rows(pyarrow.parquet.ParquetFile(path).read(), source)
    except ConfigError:
        raise
    except DAMAGED as error:
        raise ConfigError(f"{source}: cannot be read: {_first_line(error)}") from error
    raise ConfigError(f"{source}: must be .jsonl, .json, .csv, .parquet or a dataset folder")


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


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def _read_folder(path: Path, split: str | None, splits: Sequence[str], source: str) -> list[Row]:
    import datasets  # slow to import, and only this format needs it

    try:
        data = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ConfigError(f"{source}: is not a folder written by datasets' save_to_disk") from error
    if isinstance(data, datasets.DatasetDict):
        data = choose_split(data, split, splits, source=source)
    else:
        check(split is None, f"{source}: is one data set, which has no split '{split}': remove the split")
    return to_rows(data.with_format("arrow")[:], source)


def choose_split(data: Mapping[str, Any], split: str | None, splits: Sequence[str], *, source: str) -> Any:
    """Return one of the splits of a data set.

    Args:
        data: name of a split -> its rows.
        split: name of the split; None takes the only one, or the one whose name is in `splits`.
        splits: names, of which the data set must have exactly one where it has several splits and none is given.
        source: setting and data set, for messages.

    Raises:
        ConfigError: there is no such split, or several that could be meant.
    """
    names = [name for name in ([split] if split else splits) if name in data]
    names = list(data) if not split and len(data) == 1 else names
    wanted = split or " or ".join(splits)
    check(
        len(names) == 1,
        f"{source}: has the splits {', '.join(data)}, of which exactly one must be named {wanted}: set prompts.split "
        "or prompts.eval_split, or give the folder of one split",
    )
    return data[names[0]]


def to_rows(table: pyarrow.Table, source: str) -> list[Row]:
    """Return the rows of a table.

    Raises:
        ConfigError: a value cannot be read; the message names its row.
    """
    _check_unique(table.column_names, source)
    try:
        return table.to_pylist()
    except DAMAGED as error:
        number = next((n for n in range(len(table)) if not _is_readable(table.slice(n, 1))), None)
        where = source if number is None else f"{source}: row {number}"
        raise ConfigError(f"{where}: cannot be read: {_first_line(error)}") from error


def _is_readable(row: pyarrow.Table) -> bool:
    try:
        row.to_pylist()
    except DAMAGED:
        return False
    return True


def _check_unique(names: Sequence[str], source: str) -> None:
    double = next((name for name, count in Counter(names).items() if count > 1), None)
    check(double is None, f"{source}: has two columns named '{double}': rename one")


def _read_csv(path: Path, text_column: str, source: str) -> list[Row]:
    text = decode(path.read_bytes().removeprefix(BYTE_ORDER_MARK), source)
    csv.field_size_limit(sys.maxsize)  # the default of 131,072 characters is less than a long prompt
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    try:
        header = next(reader, [])
        _check_unique(header, source)
        for fields in filter(None, reader):
            comparison = "more" if len(fields) > len(header) else "fewer"
            check(len(fields) == len(header), f"{source}: row {len(rows)} has {comparison} fields than the header")
            rows.append(dict(zip(header, fields, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"{source}: row {len(rows)}: cannot be read: {error}") from error
    for number, row in enumerate(rows):
        value = row.get(text_column)
        if value and value.startswith("["):
            row[text_column] = _parse_messages(value, f"{source}: row {number}")
    return rows


def _parse_messages(text: str, where: str) -> str | list[Message]:
    """Return the chat messages that a CSV field holds as JSON, or its text if it holds none."""
    try:
        value = parse_json(text, where)
    except ConfigError:
        return text
    return value if is_chat(value) else text
