"""Data rows of JSON files: one object per line, or one array of objects."""

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from hybrid_rl.config import ConfigError, check

Row = dict[str, Any]
"""One data row: column name -> value."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NEWLINE = b"\n"
WHITE_SPACE = re.compile(r"[ \t\n\r]*")
"""The white space of JSON."""


def read_json_rows(path: Path, *, text_column: str, source: str) -> list[Row]:
    """Return the rows of a JSON file, one object per line or one array of objects; its name decides nothing.

    Args:
        text_column: column that tells a row from an object that holds the rows.
        source: setting and file, for messages.
    Raises:
        ConfigError: a line is not JSON in UTF-8, not an object, or has a value or a key that JSON does not allow; the
            message names it.
    """
    with path.open("rb") as file:
        first = next((line for line in file if line.removeprefix(BYTE_ORDER_MARK).strip()), b"")
    if first.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
        return _read_array(path, source)
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if line.strip():
                rows.append(_parse_line(line, path, f"{source}: line {number}"))
    _check_is_row(rows, text_column, source)
    return rows


def _parse_line(line: bytes, path: Path, where: str) -> Row:
    try:
        row = parse_json(decode(line, where), where)
    except ConfigError as error:
        check(
            not (isinstance(error.__cause__, json.JSONDecodeError) and _is_one_object(path)),
            f"{where} does not end an object: the file is one object over several lines; write one row per line, or an "
            "array of rows",
        )
        raise
    check(isinstance(row, dict), f"{where} is not a JSON object; each line must be one")
    return row


def _is_one_object(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (ValueError, RecursionError):
        return False


def _check_is_row(rows: list[Row], text_column: str, source: str) -> None:
    """Check that a file with one object does not hold its rows in a list inside it."""
    if len(rows) != 1 or text_column in rows[0]:
        return
    for name, value in rows[0].items():
        check(
            not (isinstance(value, list) and value and all(map(_may_be_row, value))),
            f"{source}: is one JSON object with a list of objects under '{name}': write the list alone, or one row per "
            "line",
        )


def _may_be_row(item: Any) -> bool:
    """Return whether an item of a list is an object, and no turn of a dialogue."""
    return isinstance(item, dict) and not item.keys() & {"role", "from"}


def _read_array(path: Path, source: str) -> list[Row]:
    """Return the rows of an array; whatever is wrong is named with its row."""
    text = decode(path.read_bytes().removeprefix(BYTE_ORDER_MARK), source)
    rows: list[Row] = []
    place = _after_space(text, text.index("[") + 1)
    is_done = text.startswith("]", place)
    while not is_done:
        where = f"{source}: row {len(rows)}"
        row, place = _parse_value(text, place, where)
        check(isinstance(row, dict), f"{where} is not a JSON object; each item of the array must be one")
        rows.append(row)
        place = _after_space(text, place)
        is_done = text.startswith("]", place)
        found = repr(text[place]) if place < len(text) else "the end of the file"
        check(is_done or found == "','", f"{where} is not JSON: {found} follows it instead of a comma or ]")
        place = _after_space(text, place + 1)
    check(place == len(text), f"{source}: the file is not JSON: text follows the array, {text[place : place + 40]!a}")
    return rows


def _after_space(text: str, place: int) -> int:
    """Return the place of the first character from a place on that is not white space."""
    found = WHITE_SPACE.match(text, place)
    assert found is not None
    return found.end()


def decode(content: bytes, where: str) -> str:
    """Return the text of UTF-8 bytes.

    Raises:
        ConfigError: they are no UTF-8; the message names the byte and its line.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        number = content[: error.start].count(NEWLINE) + 1
        place = f"{where}: line {number}" if NEWLINE in content.rstrip(NEWLINE) else where
        raise ConfigError(f"{place} is not UTF-8: byte 0x{content[error.start]:02x}; save the file in UTF-8") from error


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ConfigError: it is not JSON, has NaN or an infinite number, a key twice, or half of a surrogate pair.
    """
    start = _after_space(text, 0)
    value, end = _parse_value(text, start, where)
    end = _after_space(text, end)
    check(end == len(text), f"{where} is not JSON: text follows its value, {text[end : end + 40]!a}")
    return value


def _parse_value(text: str, start: int, where: str) -> tuple[Any, int]:
    """Return the JSON value that starts at a place, and the place after it; see parse_json."""

    def refuse(name: str) -> NoReturn:
        raise ConfigError(f"{where} has {name}, which JSON does not allow: write null, or leave the key out")

    def unique(pairs: list[tuple[str, Any]]) -> Row:
        found = dict(pairs)
        names = [name for name, _ in pairs]
        double = next((name for name in names if names.count(name) > 1), None) if len(found) < len(pairs) else None
        check(double is None, f"{where} has the key '{double}' twice: keep one")
        return found

    try:
        value, end = json.JSONDecoder(parse_constant=refuse, object_pairs_hook=unique).raw_decode(text, start)
        if text.find("\\u", start, end) >= 0:  # the only way to half of a surrogate pair, which no tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except ConfigError:
        raise
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} has half of a surrogate pair, {error.object[error.start]!a}: remove it") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    return value, end
