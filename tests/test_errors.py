"""The first error of a run is the one that it ends with, and exit codes do not change."""

import ast
from pathlib import Path

import pytest

from hybrid_rl import errors
from hybrid_rl.errors import FileWriteError, RunError, close_each


def failing(name: str, closed: list[str]):
    def close() -> None:
        closed.append(name)
        raise RuntimeError(name)

    return close


def test_every_part_is_closed_and_the_first_error_is_raised(caplog):
    closed: list[str] = []
    with pytest.raises(RuntimeError, match=r"^first$"):
        close_each(failing("first", closed), lambda: closed.append("second"), failing("third", closed))
    assert closed == ["first", "second", "third"]
    assert caplog.messages == ["a part of the run could not be closed: RuntimeError: third"]


def test_what_ends_the_run_already_is_not_hidden(caplog):
    closed: list[str] = []
    with pytest.raises(ValueError, match="the reason"):
        try:
            raise ValueError("the reason")
        except ValueError as error:
            close_each(failing("first", closed), failing("second", closed), error=error)
            raise
    assert closed == ["first", "second"]
    assert [message.rpartition(" ")[2] for message in caplog.messages] == ["first", "second"]


def test_an_interrupt_while_a_part_closes_does_not_keep_the_others_open():
    closed: list[str] = []

    def interrupted() -> None:
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        close_each(interrupted, lambda: closed.append("other"))
    assert closed == ["other"]


def test_exit_codes_are_those_of_the_documentation():
    """Supervisors act on the codes, so a code never gets another meaning."""
    page = (Path(__file__).parents[1] / "docs" / "operating.md").read_text()
    codes = {kind.__name__: kind.exit_code for kind in (RunError, *RunError.__subclasses__())}
    assert codes == {
        "RunError": 1,
        "EngineLostError": 3,
        "RewardLostError": 4,
        "OutOfMemoryError": 5,
        "RankLostError": 6,
        "FileWriteError": 7,
        "PreemptedError": 75,
    }
    for code in (0, 2, *codes.values(), 130, 143):
        assert f"\n| {code} |" in page, code


def test_every_error_that_ends_a_run_has_its_own_code():
    tree = ast.parse(Path(errors.__file__).read_text())
    kinds = [getattr(errors, node.name) for node in tree.body if isinstance(node, ast.ClassDef)]
    assert all(issubclass(kind, RunError) for kind in kinds)
    assert len({kind.exit_code for kind in kinds}) == len(kinds)


def test_further_files_on_the_same_full_disk_are_no_warnings(caplog):
    def full() -> None:
        raise FileWriteError("timeline.json cannot be written")

    with caplog.at_level("INFO"):
        close_each(full, error=FileWriteError("metrics.jsonl cannot be written"))
        close_each(full, error=RuntimeError("another reason"))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
