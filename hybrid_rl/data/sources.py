"""Rows of files, folders, URLs and data sets of the hub; the last two through `datasets`, which keeps a cache."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from hybrid_rl.config import ConfigError, check
from hybrid_rl.data.files import TRAINING_SPLITS, choose_split, read_rows, to_rows
from hybrid_rl.data.json_rows import Row

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Ending of a file -> the loader of `datasets` that reads it."""
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?::(?P<config>[\w.+-]+))?(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A data set of the hub, as `name[:config][@revision]`."""

    name: str
    """Such as openai/gsm8k."""
    config: str | None = None
    """None if the data set has one configuration."""
    revision: str | None = None
    """Branch, tag or commit; None takes the main branch."""


def parse_hub_name(text: str) -> HubName | None:
    """Return the data set of the hub that a text names; None for the path of a file or a folder, and for a URL."""
    found = _NAME.fullmatch(text)
    if found is None or PurePosixPath(found["name"]).suffix in LOADERS:
        return None
    return HubName(**found.groupdict())


def is_url(text: str) -> bool:
    """Return whether a text is a URL."""
    return urlsplit(text).scheme in ("http", "https", "hf")


def load_url(url: str, *, source: str) -> Any:
    """Return the table of a file at a URL, as a `datasets.Dataset`.

    Args:
        url: its path ends like a file that LOADERS lists.
        source: setting and URL, for messages.

    Raises:
        ConfigError: the file cannot be fetched or read.
    """
    loader = LOADERS.get(PurePosixPath(urlsplit(url).path).suffix)
    check(loader is not None, f"{source}: must end with one of {', '.join(LOADERS)}")
    return _load(source, loader, data_files=url, split="train")


def load_from_hub(hub_name: HubName, *, split: str | None, splits: Sequence[str], source: str) -> Any:
    """Return a split of a data set of the hub, as a `datasets.Dataset`.

    Args:
        split: name of a split, or a part of one such as `train[:1000]`; None chooses, see files.choose_split.
        splits: see files.choose_split.
        source: setting and name, for messages.

    Raises:
        ConfigError: there is no such data set, configuration or split, or the hub cannot be reached and the data set
            is not in the cache.
    """
    data = _load(source, hub_name.name, hub_name.config, revision=hub_name.revision, split=split)
    return data if split is not None else choose_split(data, None, splits, source=source)


def _load(source: str, *arguments: Any, **named: Any) -> Any:
    import datasets  # slow to import, and local files do not need it

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(*arguments, **named)
    except Exception as error:  # builders raise what their parsers raise
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        lines = (str(cause).strip() or type(cause).__name__).splitlines()
        raise ConfigError(f"{source}: cannot be read: {' '.join(line.strip() for line in lines[:2])}") from error


def read_source(
    path: str, *, source: str, text_column: str, split: str | None = None, splits: Sequence[str] = TRAINING_SPLITS
) -> list[Row]:
    """Return the rows of a file, a folder, a URL, or a data set of the hub; see files.read_rows.

    Args:
        path: what exists on the disk is read from there; any other path with an ending of LOADERS is a missing file.

    Raises:
        ConfigError: as read_rows, load_url and load_from_hub.
    """
    if is_url(path):
        check(split is None, f"{source}: is one file, which has no split '{split}': remove the split")
        return to_rows(load_url(path, source=source).with_format("arrow")[:], source)
    hub_name = None if Path(path).exists() else parse_hub_name(path)
    if hub_name is None:
        return read_rows(Path(path), source=source, text_column=text_column, split=split, splits=splits)
    source = f"{source}: no such file or folder, so it is a name on the hub"
    return to_rows(load_from_hub(hub_name, split=split, splits=splits, source=source).with_format("arrow")[:], source)
