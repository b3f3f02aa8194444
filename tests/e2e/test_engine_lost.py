"""The command ends in one sentence when its rollout engine is killed or stopped, and leaves nothing."""

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import yaml

from hybrid_rl.config import Config, as_dict
from tests.programs import PATHS, ROOT

pytestmark = pytest.mark.slow

LEFT_S = 15.0
"""Time after which nothing may be left of a run."""


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """A temporary folder of the command, with a short path, and empty at the end."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        assert [path.name for path in Path(folder).iterdir() if not path.name.startswith("torchinductor_")] == []


def engine_of(process: subprocess.Popen) -> psutil.Process | None:
    """Return the core process of the engine, as vLLM names it."""
    children = psutil.Process(process.pid).children(recursive=True)
    return next((child for child in children if "EngineCore" in " ".join(child.cmdline())), None)


@pytest.mark.parametrize(
    "mode, number", [("alias", signal.SIGKILL), ("copy", signal.SIGSTOP)], ids=["killed", "stopped"]
)
def test_a_run_whose_engine_is_lost(make_config: Callable[..., Config], temporary, tmp_path, mode, number):
    config = make_config(tmp_path, rollout={"engine": "vllm"}, sync={"mode": mode})
    run = dataclasses.replace(config.run, num_steps=100_000, stall_timeout_s=10.0)
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump(as_dict(dataclasses.replace(config, run=run))))
    process = subprocess.Popen(
        [sys.executable, "launch/colocated.py", "--config", str(settings)],
        cwd=ROOT,
        env={**os.environ, **PATHS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while not (config.run_dir / "latest").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.2)
        engine = engine_of(process)
        others = psutil.Process(process.pid).children(recursive=True)
        engine.send_signal(number)
        start = time.monotonic()
        output, _ = process.communicate(timeout=60)
        assert time.monotonic() - start < 30
    finally:
        process.kill()
    assert process.returncode == 3, output
    words = "was killed by SIGKILL (exit code -9;" if number == signal.SIGKILL else "is stopped (SIGSTOP or a debugger)"
    assert f"error: process {engine.pid} of the rollout engine {words}" in output.splitlines()[-1], output
    assert "Traceback" not in output
    _, left = psutil.wait_procs(others, timeout=LEFT_S)  # Python's resource tracker ends after the trainer
    assert left == []


MOMENTS = ("step 2: rollout", "step 3: sync", "step 4: rollout")
"""Lines of the log at which an engine is killed."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_a_run_whose_engines_are_killed_ends_as_one_whose_engine_lives(
    make_config: Callable[..., Config], read_run, temporary, tmp_path, mode
):
    """The kills hit the engine while it generates or copies weights, a tenth of a second after the phase has begun."""
    results = []
    for name, moments in {"undisturbed": (), "disturbed": MOMENTS}.items():
        rollout = {"engine": "vllm", "max_response_tokens": 40, "restarts": len(MOMENTS)}
        (tmp_path / name).mkdir()
        config = make_config(tmp_path / name, rollout=rollout, sync={"mode": mode}, run={"num_steps": 5})
        run_and_kill(config, moments)
        run = read_run(config)
        assert run.metrics[-1]["rollout/restarts"] == len(moments)
        for row in run.metrics:
            del row["rollout/restarts"]
        results.append(run)
    assert results[0] == results[1]


def run_and_kill(config: Config, moments: Sequence[str]) -> None:
    """Run the command to its end, and kill its engine a moment after each of these lines of its log."""
    settings, output = Path(config.run.dir) / "settings.yaml", Path(config.run.dir) / "output.txt"
    settings.write_text(yaml.safe_dump(as_dict(config)))
    with output.open("w") as streams:
        process = subprocess.Popen(
            [sys.executable, "launch/colocated.py", "--config", str(settings)],
            cwd=ROOT,
            env={**os.environ, **PATHS},
            stdout=streams,
            stderr=subprocess.STDOUT,
        )
    try:
        killed = [kill_engine_at(moment, process, config) for moment in moments]
        assert process.wait() == 0, output.read_text()
    finally:
        process.kill()
    assert all(f"process {pid} of the rollout engine was killed by SIGKILL" in output.read_text() for pid in killed)


def kill_engine_at(moment: str, process: subprocess.Popen, config: Config) -> int:
    """Kill the engine a moment after a line of the log; return its process id."""
    log = config.run_dir / "log.txt"
    while not (log.exists() and moment in log.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.1)
    engine = engine_of(process)
    assert engine is not None
    engine.kill()
    return engine.pid
