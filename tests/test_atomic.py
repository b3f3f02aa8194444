"""Files that are replaced are for the user alone."""

import os
from pathlib import Path

import pytest

from hybrid_rl.atomic import append, write_atomically


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


@pytest.mark.parametrize("mask", [0, 0o022])
def test_a_file_is_readable_by_its_user_alone_whatever_the_umask(tmp_path, mask):
    path, before = tmp_path / "run.json", os.umask(mask)
    try:
        write_atomically(path, "first")
        append(path, b" and more")
    finally:
        os.umask(before)
    assert (mode(path), path.read_text()) == ("0o600", "first and more")


def test_a_file_that_others_could_read_becomes_private(tmp_path):
    path = tmp_path / "config.yaml"
    for name in ("config.yaml", ".config.yaml.partial"):  # the second one of a process that was killed
        (tmp_path / name).write_text("old")
        (tmp_path / name).chmod(0o644)
    write_atomically(path, "new")
    assert (mode(path), path.read_text()) == ("0o600", "new")
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
