"""Folders that a run writes to."""

import shutil
from pathlib import Path

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.machine.disk import check_space, check_temporary_folder, check_writable, folder_bytes


def test_a_writable_folder_is_accepted_and_nothing_is_created(tmp_path):
    check_writable(tmp_path / "a" / "b", "run.dir")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigError, match=rf"^run.dir = x: {tmp_path}/a is a file, not a folder"):
        check_writable(tmp_path / "a", "run.dir = x")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        check_writable(tmp_path / "a" / "b", "run.dir = x")


def test_a_folder_that_cannot_be_written_is_named():
    with pytest.raises(ConfigError, match=r"^run.dir = x: no file can be created in /proc \("):
        check_writable(Path("/proc/x"), "run.dir = x")


def test_space_counts_all_files_and_those_that_are_replaced(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    check_space(tmp_path / "new", {"checkpoints": free // 2})
    with pytest.raises(ConfigError, match=r"\(\d[\d,]* for 3 checkpoints, 5 for exports\)"):
        check_space(tmp_path, {"3 checkpoints": 2 * free, "exports": 5})
    check_space(tmp_path, {"3 checkpoints": 2 * free}, reused_bytes=2 * free)


def test_the_size_of_a_folder_is_the_sum_of_its_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"123")
    (tmp_path / "c").write_bytes(b"12")
    assert folder_bytes(tmp_path) == 5
    assert folder_bytes(tmp_path / "missing") == 0


def test_a_temporary_folder_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    check_temporary_folder()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="no such folder; create it, or unset TMPDIR"):
        check_temporary_folder()
