"""Files that are replaced are whole at every moment, on the disk, and for the user alone."""

import os
from pathlib import Path

import pytest

from hybrid_rl.atomic import append, flush_tree, make_folder, write_atomically, writing
from hybrid_rl.errors import FileWriteError
from tests.disks import a_full_disk


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


@pytest.mark.parametrize("mask", [0, 0o022])
def test_a_file_is_readable_by_its_user_alone_whatever_the_umask(tmp_path, mask):
    path, before = tmp_path / "run.json", os.umask(mask)
    try:
        write_atomically(path, "first")
        append(path, b" and more")
        append(tmp_path / "metrics.jsonl", b"a row")
    finally:
        os.umask(before)
    assert (mode(path), path.read_text()) == ("0o600", "first and more")
    assert mode(tmp_path / "metrics.jsonl") == "0o600"


def test_a_file_that_others_could_read_becomes_private(tmp_path):
    path = tmp_path / "config.yaml"
    for name in ("config.yaml", ".config.yaml.partial"):  # the second one of a process that was killed
        (tmp_path / name).write_text("old")
        (tmp_path / name).chmod(0o644)
    write_atomically(path, "new")
    assert (mode(path), path.read_text()) == ("0o600", "new")
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_a_file_that_does_not_fit_keeps_its_former_content(tmp_path):
    path, rows = tmp_path / "a.json", tmp_path / "rows.jsonl"
    write_atomically(path, "old")
    append(rows, b"first\n")
    with a_full_disk(8):
        for write in (lambda: write_atomically(path, "new" * 5), lambda: append(rows, b"second\n")):
            with pytest.raises(FileWriteError, match=r"(a.json|rows.jsonl) cannot be written \(File too large\): free"):
                write()
    assert (path.read_text(), rows.read_bytes()) == ("old", b"first\n")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "rows.jsonl"]


def test_a_missing_folder_and_a_device_without_room_are_named_too(tmp_path):
    with pytest.raises(FileWriteError, match=r"/none/a\.json cannot be written \(No such file or directory\)"):
        write_atomically(tmp_path / "none" / "a.json", "new")
    with (
        pytest.raises(
            FileWriteError, match=r"^x cannot be written \(No space left on device\): free space on its disk"
        ),
        writing(Path("x")),
        open("/dev/full", "w", buffering=1) as file,
    ):
        file.write("full\n")


def flushed(monkeypatch) -> list[str]:
    """Return the list that receives the path of everything that is flushed to the disk."""
    paths, fsync = list[str](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: paths.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    return paths


def test_a_new_folder_is_on_the_disk_with_all_its_parents(tmp_path, monkeypatch):
    paths = flushed(monkeypatch)
    make_folder(tmp_path / "a" / "b" / "c")
    assert paths == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
    make_folder(tmp_path / "a" / "b" / "c")
    assert len(paths) == 3


def test_files_are_on_the_disk_before_the_folders_that_name_them(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("one", "a/two", "a/b/three"):
        (tmp_path / name).write_text(name)
    paths = flushed(monkeypatch)
    flush_tree(tmp_path)
    names = ["a/b/three", "a/b", "a/two", "a", "one", ""]
    assert paths == [str(tmp_path / name) for name in names]
