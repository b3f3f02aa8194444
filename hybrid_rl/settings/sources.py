"""The data sets of `prompts.path`, `prompts.eval_path` and `ptx.path`: what an item may hold, which weights work."""

import math
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from hybrid_rl.config import Config, DataSource
from hybrid_rl.config_data import named_sets
from hybrid_rl.settings.types import has_type, show, wrong_type

KEYS: dict[str, tuple[str, ...]] = {
    "prompts.path": (
        "path",
        "weight",
        "split",
        "max_samples",
        "format",
        "prompt_column",
        "answer_column",
        "data_source",
        "task_options",
    ),
    "prompts.eval_path": (
        "path",
        "split",
        "max_samples",
        "format",
        "prompt_column",
        "answer_column",
        "data_source",
        "task_options",
    ),
    "ptx.path": ("path", "weight", "split", "max_samples", "column"),
}
"""Setting -> keys of a mapping in it."""
TYPES: dict[str, Any] = {field.name: field.type for field in fields(DataSource)}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Name of an evaluation, which is part of the names of its metrics."""


def broken_sources(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the name of every setting whose data sets cannot work, and a sentence; types must be right."""
    for field, value in (("prompts.path", config.prompts.path), ("ptx.path", config.ptx.path)):
        if isinstance(value, list) and (sentence := _list_sentence(field, value)):
            yield field, sentence
    if isinstance(config.prompts.eval_path, dict) and (sentence := _sets_sentence(config.prompts.eval_path)):
        yield "prompts.eval_path", sentence


def _list_sentence(field: str, items: list[Any]) -> str | None:
    if not items:
        return f"{field} is an empty list: give at least one data set"
    sentence = next(filter(None, (_item_sentence(field, item) for item in items)), None)
    if sentence:
        return sentence
    twice = next((item for place, item in enumerate(items) if item in items[:place]), None)
    if twice is not None:
        return f"{field}: holds {show(twice)} twice: keep one, and give it a larger weight"
    weights = [item.get("weight") if isinstance(item, dict) else None for item in items]
    if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        return (
            f"{field}: {show(items[weights.index(None)])} has no weight, and others have one: give every data set a "
            "weight, or none, which joins them"
        )
    return None


def _sets_sentence(sets: dict[str, Any]) -> str | None:
    field = "prompts.eval_path"
    if not sets:
        return f"{field} is an empty mapping: give at least one data set, or null"
    for name, item in named_sets(sets).items():
        if name and not NAME.fullmatch(name):
            return (
                f"{field}: the name {show(name, is_quoted=True)} is part of metrics such as eval/<name>/accuracy: "
                "write it with letters, digits, _ - and ."
            )
        if sentence := _item_sentence(f"{field}.{name}" if name else field, item, KEYS[field]):
            return sentence
    return None


def _item_sentence(field: str, item: Any, keys: tuple[str, ...] | None = None) -> str | None:
    """Return what is wrong with one data set; None if nothing is."""
    keys = keys or KEYS[field]
    if isinstance(item, str):
        item = {"path": item}
    if not isinstance(item, dict):
        return f"{field}: {show(item)}: must be a path, or a mapping with the keys {', '.join(keys)}"
    unknown = next((key for key in item if key not in keys), None)
    if unknown is not None:
        return f"{field}: {show(item)}: there is no key '{unknown}'; there are: {', '.join(keys)}"
    path = item.get("path")
    if not isinstance(path, str) or not path.strip() or not path.isprintable():
        return f"{field}: {show(item)}: must have a path"
    for key, value in item.items():
        if not has_type(value, TYPES[key]):
            return f"{field}: {path}: {wrong_type(key, show(value, is_quoted=True), TYPES[key])}"
    weight, max_samples = item.get("weight"), item.get("max_samples")
    if weight is not None and not (math.isfinite(weight) and weight > 0):
        return f"{field}: {path}: weight = {show(weight)}: must be greater than 0 and finite; remove what is not used"
    if max_samples is not None and max_samples <= 0:
        return f"{field}: {path}: max_samples = {max_samples}: must be greater than 0"
    return None
