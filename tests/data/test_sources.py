"""Where rows come from: files and folders, URLs, and data sets of the hub by the real client, with and without it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.data.sources import HubName, is_url, parse_hub_name, read_source
from tests.data.hub import COMMIT, running_hub
from tests.programs import PATHS, ROOT

TRAIN = [{"question": f"{n}+1?", "answer": f"so\n#### {n + 1}"} for n in range(5)]
TEST = [{"question": "9+1?", "answer": "so\n#### 10"}]
CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
- config_name: other
  data_files: other.jsonl
---
"""


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


FILES = {
    "me/tiny": {
        "README.md": CARD,
        "main/train.jsonl": lines(TRAIN),
        "main/test.jsonl": lines(TEST),
        "other.jsonl": lines([{"prompt": "say 1", "answer": 1}]),
    }
}
PROGRAM = """
import json, sys
from hybrid_rl.config import ConfigError
from hybrid_rl.data.sources import read_source
for path, split in json.loads(sys.argv[1]):
    try:
        found = read_source(path, source="prompts.path", text_column="prompt", split=split)
    except ConfigError as error:
        found = str(error)
    print(json.dumps(found))
"""


def read_all(*asked: tuple[str, str | None], home: Path, **environment: str) -> list[Any]:
    """Return rows, or the sentence of a refusal, in a process of its own: `datasets` reads the environment once."""
    variables = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_ENDPOINT")}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(asked)],
        env={**variables, **PATHS, "HF_HOME": str(home), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("openai/gsm8k", HubName(name="openai/gsm8k")),
        ("openai/gsm8k:main", HubName(name="openai/gsm8k", config="main")),
        ("openai/gsm8k:main@v1.0", HubName(name="openai/gsm8k", config="main", revision="v1.0")),
        ("openai/gsm8k@refs/convert/parquet", HubName(name="openai/gsm8k", revision="refs/convert/parquet")),
        ("gsm8k", HubName(name="gsm8k")),
        ("train.jsonl", None),
        ("data/train.parquet", None),
        ("/data/train", None),
        ("./train", None),
        ("~/train", None),
        ("a/b/c", None),
        ("https://host/train.jsonl", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths(text, name):
    assert parse_hub_name(text) == name


def test_urls_are_told_from_names():
    assert is_url("https://host/a.jsonl") and is_url("hf://datasets/me/tiny/other.csv")
    assert not is_url("me/tiny:main") and not is_url("/data/a.jsonl")


def test_a_folder_gives_the_split_that_is_asked_for(tmp_path):
    splits = {"train": TRAIN, "test": TEST}
    data = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    data.save_to_disk(str(tmp_path / "data"))
    read = lambda **named: read_source(str(tmp_path / "data"), source="F", text_column="prompt", **named)  # noqa: E731
    assert (read(), read(split="test"), read(splits=("test", "validation"))) == (TRAIN, TEST, TEST)
    with pytest.raises(ConfigError, match=r"^F: has the splits train, test, of which exactly one must be named dev"):
        read(split="dev")
    file = tmp_path / "rows.jsonl"
    file.write_bytes(lines(TEST))
    with pytest.raises(ConfigError, match=r"^F: is one file, which has no split 'train': remove the split$"):
        read_source(str(file), source="F", text_column="prompt", split="train")


def test_data_sets_of_the_hub_and_urls_are_read_and_stay_in_the_cache(tmp_path):
    with running_hub(FILES) as hub:
        asked = [
            ("me/tiny:main", None),
            ("me/tiny:main", "test"),
            ("me/tiny:main@main", "train[:2]"),
            ("me/tiny:other", None),
            (f"{hub.url}/datasets/me/tiny/resolve/main/main/test.jsonl", None),
            ("me/tiny", None),
            ("me/tiny:third", None),
            ("me/tiny:main", "dev"),
            ("me/none", None),
            (f"{hub.url}/none.jsonl", None),
            (f"{hub.url}/rows.xlsx", None),
        ]
        *found, no_config, third, dev, none, no_file, other = read_all(*asked, home=tmp_path, HF_ENDPOINT=hub.url)
    assert found == [TRAIN, TEST, TRAIN[:2], [{"prompt": "say 1", "answer": 1}], TEST]
    hub_source = "prompts.path: no such file or folder, so it is a name on the hub: cannot be read: "
    assert no_config.startswith(f"{hub_source}Config name is missing.") and "['main', 'other']" in no_config
    assert third == f"{hub_source}BuilderConfig 'third' not found. Available: ['main', 'other']"
    assert dev.startswith(hub_source) and "dev" in dev
    assert none == f"{hub_source}Dataset 'me/none' doesn't exist on the Hub or cannot be accessed."
    assert no_file.startswith("prompts.path: cannot be read: ")
    assert other == "prompts.path: must end with one of .jsonl, .json, .csv, .parquet"
    assert any(COMMIT in path for path in hub.paths)

    again = read_all(*asked[:2], asked[8], home=tmp_path, HF_HUB_OFFLINE="1")
    assert again[:2] == [TRAIN, TEST]
    assert again[2].startswith(f"{hub_source}Couldn't reach 'me/none' on the Hub")
