"""A run closes everything that it has opened, and ends with the error that came first."""

import threading

import psutil
import pytest

from hybrid_rl import build, trainer
from hybrid_rl.checkpoints.lock import RunLock
from hybrid_rl.engines.huggingface import HuggingFaceEngine


def num_open() -> tuple[int, int]:
    """Return the numbers of children and of open files of this process."""
    process = psutil.Process()
    return len(process.children(recursive=True)), len(process.open_files())


@pytest.fixture
def closed(monkeypatch) -> list[str]:
    """Names of what is closed; the engine fails to close."""
    names: list[str] = []

    def fail(_: HuggingFaceEngine) -> None:
        names.append("engine")
        raise RuntimeError("the engine does not close")

    monkeypatch.setattr(HuggingFaceEngine, "close", fail, raising=False)
    return names


def fail_in_a_phase(*_):
    raise ArithmeticError("the first error")


@pytest.mark.parametrize("place", ["generate", "compute_advantages"])
def test_an_error_of_a_phase_is_not_hidden_by_an_engine_that_does_not_close(
    make_config, tmp_path, monkeypatch, caplog, closed, place
):
    config, before = make_config(tmp_path), num_open()
    monkeypatch.setattr(trainer, place, fail_in_a_phase)
    with pytest.raises(ArithmeticError, match="the first error"):
        trainer.train(config)
    assert closed == ["engine"] and num_open() == before
    assert "could not be closed: RuntimeError: the engine does not close" in caplog.text
    assert "ERROR the run ends: ArithmeticError: the first error" in (config.run_dir / "log.txt").read_text()
    assert '"phase": "ended"' in (config.run_dir / "heartbeat.json").read_text()
    RunLock(config.run_dir, patience_s=0).unlock()


def test_a_start_that_fails_closes_what_is_open_and_keeps_its_error(make_config, tmp_path, monkeypatch, closed):
    """The engine, the scorers, the log and the heartbeat exist when the critic is loaded."""
    config, before = make_config(tmp_path), num_open()
    monkeypatch.setattr(build, "build_critic", fail_in_a_phase)
    with pytest.raises(ArithmeticError, match="the first error"):
        build.build(config)
    assert closed == ["engine"] and num_open() == before
    assert "ERROR the run ends: ArithmeticError" in (config.run_dir / "log.txt").read_text()
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}
    RunLock(config.run_dir, patience_s=0).unlock()


def test_a_run_whose_engine_does_not_close_ends_with_this_error(make_config, tmp_path, closed):
    config, before = make_config(tmp_path, run={"num_steps": 1}), num_open()
    with pytest.raises(RuntimeError, match="the engine does not close"):
        trainer.train(config)
    assert num_open() == before and (config.run_dir / "summary.json").exists()
    RunLock(config.run_dir, patience_s=0).unlock()
