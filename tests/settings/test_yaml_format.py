"""The YAML of settings files: what plain words mean, and that what is written is read again."""

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.settings.yaml_format import dump, load

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LOOK_ALIKES = [
    "off",
    "y",
    "1e5",
    "1e-6",
    "010",
    "1:30",
    "2026-01-01",
    "null",
    "~",
    "",
    "0x1f",
    ".inf",
    "<<",
    "=",
    "1_000",
]


@pytest.mark.parametrize(
    "word, value",
    [
        ("1e-6", 1e-6),
        ("1e5", 1e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("010", 10),
        ("1_000", 1000),
        ("0x1f", 31),
        ("-3", -3),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("0o17", "0o17"),
        ("1.2.3", "1.2.3"),
        ("off", False),
        ("Yes", True),
        ("y", "y"),
        ("~", None),
        ("", None),
        ("'off'", "off"),
        ('"1e5"', "1e5"),
    ],
)
def test_plain_word_where_the_type_is_free(word, value):
    read = load(f"a: {word}")["a"]
    assert read == value and type(read) is type(value)


@given(PLAIN)
def test_written_values_are_read_again(value):
    assert load(dump({"a": value})) == {"a": value}


@given(st.text() | st.sampled_from(LOOK_ALIKES))
def test_text_is_text_for_every_reader_of_yaml(text):
    written: Any = dump({"a": text})
    assert yaml.safe_load(written) == {"a": text} == load(written)
    assert written.isascii()
