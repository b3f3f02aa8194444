"""A run closes everything that it has opened, and ends with the error that came first."""

import threading
from pathlib import Path

import psutil
import pytest
import yaml

from hybrid_rl import build, trainer
from hybrid_rl.checkpoints.lock import RunLock
from hybrid_rl.config import as_dict
from hybrid_rl.engines.huggingface import HuggingFaceEngine


def opened(folder: Path) -> tuple[int, set[str]]:
    """Return the number of children of this process, and its open files in a folder; libraries keep others open."""
    process = psutil.Process()
    return len(process.children(recursive=True)), {
        file.path for file in process.open_files() if Path(file.path).is_relative_to(folder)
    }


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
    config, before = make_config(tmp_path), opened(tmp_path)
    monkeypatch.setattr(trainer, place, fail_in_a_phase)
    with pytest.raises(ArithmeticError, match="the first error"):
        trainer.train(config)
    assert closed == ["engine"] and opened(tmp_path) == before
    assert "could not be closed: RuntimeError: the engine does not close" in caplog.text
    assert "ERROR the run ends: ArithmeticError: the first error" in (config.run_dir / "log.txt").read_text()
    assert '"phase": "ended"' in (config.run_dir / "heartbeat.json").read_text()
    RunLock(config.run_dir, patience_s=0).unlock()


def test_a_start_that_fails_closes_what_is_open_and_keeps_its_error(make_config, tmp_path, monkeypatch, closed):
    """The engine, the scorers, the log and the heartbeat exist when the critic is loaded."""
    config, before = make_config(tmp_path), opened(tmp_path)
    monkeypatch.setattr(build, "build_critic", fail_in_a_phase)
    with pytest.raises(ArithmeticError, match="the first error"):
        build.build(config)
    assert closed == ["engine"] and opened(tmp_path) == before
    assert "ERROR the run ends: ArithmeticError" in (config.run_dir / "log.txt").read_text()
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}
    RunLock(config.run_dir, patience_s=0).unlock()


def test_a_run_whose_engine_does_not_close_ends_with_this_error(make_config, tmp_path, closed):
    config, before = make_config(tmp_path, run={"num_steps": 1}), opened(tmp_path)
    with pytest.raises(RuntimeError, match="the engine does not close"):
        trainer.train(config)
    assert opened(tmp_path) == before and (config.run_dir / "summary.json").exists()
    RunLock(config.run_dir, patience_s=0).unlock()


FULL = """
import os, resource, subprocess
from hybrid_rl.checkpoints import snapshot
from hybrid_rl.models import exporting
from hybrid_rl.monitoring import metrics, recorder, timeline
from launch.colocated import main

def fill_before(owner, name, calls):
    original = getattr(owner, name)
    def counted(*arguments, **named):
        nonlocal calls
        calls -= 1
        if calls == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return original(*arguments, **named)
    setattr(owner, name, counted)

if __name__ == "__main__":
    cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # the output is a file, which would be full, too
    for stream in (1, 2):
        os.dup2(cat.stdin.fileno(), stream)
    cat.stdin.close()
    fill_before({owner}, "{name}", {calls})
    main()
"""
# Owner and function, the call in which the disk fills up for good, and the file that the sentence names.
FULL_PLACES = [
    ("recorder", "write_rollouts", 2, "rollouts/step_000002.jsonl"),
    ("metrics", "append", 2, "metrics.jsonl"),
    ("snapshot.Snapshot", "write", 1, "checkpoints/.partial-step_000002/"),
    ("exporting.ModelWriter", "finish", 1, "export"),
    ("timeline.Timeline", "write", 1, "timeline.json"),
]


@pytest.mark.slow
@pytest.mark.parametrize("owner, name, calls, file", FULL_PLACES, ids=[name for _, name, *_ in FULL_PLACES])
def test_a_full_disk_is_one_sentence_about_its_file_and_the_run_goes_on_when_there_is_room(
    make_config, train_here, run_forked, tmp_path, owner, name, calls, file
):
    config = make_config(tmp_path, checkpoint={"every_steps": 2, "export": True})
    settings, program = Path(config.run.dir) / "settings.yaml", Path(config.run.dir) / "full.py"
    settings.write_text(yaml.safe_dump(as_dict(config)))
    program.write_text(FULL.format(owner=owner, name=name, calls=calls))
    ended = run_forked(str(program), "--config", str(settings))
    lines = [line for line in ended.output.splitlines() if "error" in line or "warning" in line or "cannot" in line]
    assert ended.code == 7 and len(lines) == 1 and not ended.survivors, ended.output
    assert lines[0].startswith("error: ") and f"{config.run_dir / file}" in lines[0], lines
    left = [path for path in config.run_dir.rglob(".*") if ".partial" in path.name]
    assert left == []
    assert [row["step"] for row in train_here(config).metrics] == [1, 2]
    assert (config.run_dir / "export" / "config.json").exists()
