"""The stages of a real start: on the plain display, and in the timeline of every rank."""

import json
import re
from pathlib import Path

import pytest

LINE = re.compile(r"^start: (.+) (\d+\.\d) s$", re.MULTILINE)


def read_timeline(path: Path) -> tuple[dict[str, float], float]:
    """Return stage of the start -> seconds, and the seconds from the first stage to the first phase."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    stages = [e for e in events if e["cat"] == "start"]
    first_phase = min(e["ts"] for e in events if e["cat"] == "sync")
    return {e["name"]: e["dur"] / 1e6 for e in stages}, (first_phase - min(e["ts"] for e in stages)) / 1e6


def check_timeline(path: Path) -> dict[str, float]:
    """Return stage -> seconds; the sum of the stages, without their parts, is close to the time of the start."""
    stages, total = read_timeline(path)
    whole = sum(seconds for name, seconds in stages.items() if ": " not in name)
    assert 0.85 * total - 0.3 < whole <= total + 0.01, (whole, total, stages)
    return stages


EXPECTED = {
    *("imports and settings", "ranks", "checks", "checks: dataset", "checks: engines"),
    *("models.actor", "rollout engine"),
    *("optimizer of the actor", "parameters of the actor", "models.critic", "optimizer of the critic"),
    *("parameters of the critic", "models.reference", "models.reward"),
    *("record of the run", "garbage collection"),
}


def test_a_start_shows_its_stages_which_add_up_to_its_time(make_config, launch, tmp_path):
    config = make_config(tmp_path, run={"num_steps": 1})
    ended = launch(config)
    assert ended.code == 0, ended.output
    stages = check_timeline(config.run_dir / "timeline.json")
    assert stages.keys() == EXPECTED
    lines = LINE.findall(ended.output)
    assert {name for name, _ in lines} == EXPECTED and len(lines) == len(EXPECTED)
    assert all(float(shown) == pytest.approx(stages[name], abs=0.051) for name, shown in lines)
    assert ended.output.index("start: garbage collection") < ended.output.index("step 1/1")


@pytest.mark.slow
def test_rank_0_shows_the_stages_and_every_rank_has_its_own_in_its_timeline(make_config, launch, tmp_path):
    config = make_config(tmp_path, run={"num_steps": 1})
    ended = launch(config, "--num_processes", "2")
    assert ended.code == 0, ended.output
    for name in ("timeline.json", "timeline_rank1.json"):
        assert check_timeline(config.run_dir / name).keys() == EXPECTED
    lines = LINE.findall(ended.output)
    assert len(lines) == len(EXPECTED) and {name for name, _ in lines} == EXPECTED


@pytest.mark.slow
def test_the_engine_has_stages_of_its_own(make_config, launch, tmp_path):
    config = make_config(tmp_path, run={"num_steps": 1}, rollout={"engine": "vllm"})
    ended = launch(config)
    assert ended.code == 0, ended.output
    stages = check_timeline(config.run_dir / "timeline.json")
    parts = {name.removeprefix("rollout engine: "): seconds for name, seconds in stages.items() if name not in EXPECTED}
    assert list(parts) == ["import of vLLM", "processes", "device", "model", "memory profile", "KV cache", "warm-up"]
    assert 0.8 * stages["rollout engine"] < sum(parts.values()) <= stages["rollout engine"] + 0.01, stages
    assert {name for name, _ in LINE.findall(ended.output)} == stages.keys()
