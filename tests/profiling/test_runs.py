"""What the benchmarks of whole runs make of a run's folder: hand-worked numbers on files of the real writers."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from hybrid_rl.memory.phases import MemoryManager
from hybrid_rl.memory.residency import RESIDENCY, Phase
from hybrid_rl.memory.tenants import Resident
from hybrid_rl.monitoring.metrics import MetricsWriter, write_rollouts
from hybrid_rl.monitoring.timeline import Timeline

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "profiling"))

import bench_iteration  # noqa: E402
import bench_rollout  # noqa: E402
import bench_scaling  # noqa: E402
import plot_memory  # noqa: E402
import random_model  # noqa: E402
from colocated_run import RunResult  # noqa: E402
from even_words import even_words  # noqa: E402

GIB = 1 << 30
SYNC, ROLLOUT, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = Phase
PLAN = {"actor_parameters": 3, "actor_optimizer": 12, "actor backward of head or layer": 2, "trainer context": 1}
PLAN |= {"engine_kv_cache": 4, "engine_weights": 3, "engine context": 2, "engine activations": 1, "reference": 3}


@pytest.fixture
def left(tmp_path: Path) -> RunResult:
    """A run of two steps: device memory in UPDATE_ACTOR and SCORE, which is opened twice."""
    timeline = Timeline()
    manager = MemoryManager(RESIDENCY, torch.device("cpu"), timeline)
    manager.admit("reference", Resident())
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        for phase, used in ((SYNC, None), (SCORE, 8), (SCORE, 9), (UPDATE_ACTOR, 20)):
            with manager.phase(phase, step):
                if used is None:
                    continue
                timeline.counter("device_memory_plan", **{name: gib * GIB for name, gib in PLAN.items()})
                timeline.counter("device_memory", used=(used - 1) * GIB, trainer=4 * GIB)
                timeline.counter("device_memory", used=(used + step) * GIB, trainer=5 * GIB)
        peak = {"memory/score_bytes": 8 * GIB, "memory/score_peak_bytes": 11 * GIB, "memory/score_plan_error": 0.1}
        writer.write(step, {"time/step": 10.0, "time/score": 4.0, "tokens_per_s": 5.0} | peak)
    timeline.write(tmp_path / "timeline.json")
    (tmp_path / "environment.json").write_text(json.dumps({"device": "none"}))
    return RunResult(tmp_path)


def test_every_row_of_a_plan_has_an_owner():
    assert plot_memory.planned(PLAN) == {
        "actor": 15,
        "activations and buffers": 2,
        "contexts": 3,
        "engine KV cache": 4,
        "engine weights": 3,
        "engine, other": 1,
        "frozen models": 3,
    }
    assert set(plot_memory.planned(PLAN)) <= set(plot_memory.COLORS)


def test_owners_add_up_to_what_is_used():
    device = {"used": 20.0, "trainer": 9.0}
    assert plot_memory.measured(device, None) == {"trainer's tensors": 9.0, "engine and contexts": 11.0}
    told = plot_memory.measured(device, {"trainer": 10.5, "engine_12": 6.0, "engine_13": 2.0})
    assert told == {"trainer's tensors": 9.0, "contexts": 1.5, "engine": 8.0, "other processes": 1.5}


def test_memory_of_a_step_is_its_highest_look(left):
    assert plot_memory.last_step(left) == 2
    memory = plot_memory.memory_of(left, 2)
    assert memory["update_actor"]["measured"] == {"trainer's tensors": 5 * GIB, "engine and contexts": 17 * GIB}
    assert memory["score"]["measured"] == {"trainer's tensors": 5 * GIB, "engine and contexts": 6 * GIB}
    assert memory["score"]["plan"] == {owner: n * GIB for owner, n in plot_memory.planned(PLAN).items()}
    assert "sync" not in memory


def test_the_plot_is_written_beside_its_numbers(left, tmp_path):
    command = [sys.executable, "profiling/plot_memory.py", str(left.folder), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "out" / f"{left.folder.name}_memory.csv"
    first, *lines = path.read_text().splitlines()
    assert first == f"# device none, step 2, command: {' '.join(command[1:])}"
    assert path.with_suffix(".png").stat().st_size > 1000
    rows = [row for row in csv.DictReader(lines) if row["phase"] == "update_actor" and row["kind"] == "measured"]
    assert {row["owner"]: int(row["bytes"]) // GIB for row in rows} == {
        "trainer's tensors": 5,
        "engine and contexts": 17,
    }
    done = subprocess.run([*command, "--step", "9"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "has no device memory of step 9" in done.stderr


def test_transitions_are_the_sync_phase_and_what_precedes_other_bodies(left):
    spans = [e["dur"] for e in left.spans("transition", 2) if e["args"]["phase"] != "sync"]
    assert len(spans) == 3
    expected = (sum(spans) + left.spans("sync", 2)[0]["dur"]) / 1e6
    assert bench_iteration.transitions_s(left, 2) == pytest.approx(expected)
    rows = bench_iteration.time_rows(left)
    assert rows[1]["share_percent"] == pytest.approx(100 * expected / 10) and rows[1]["score"] == 4.0
    moves = [(row["phase"], row["move"]) for row in bench_iteration.move_rows(left)]
    assert (
        moves
        == [("sync", "release reference"), ("score", "restore reference"), ("update_actor", "release reference")][1:]
    )


def test_peak_is_held_against_the_plan(left):
    (row,) = bench_iteration.memory_rows(left)
    assert row["phase"] == "score" and row["plan_gib"] == pytest.approx(10) and row["peak_gib"] == 11
    assert row["over_plan_percent"] == pytest.approx(10) and row["entry_gib"] == 8


def scaled(folder: Path, seconds: float, rewards: list[float]) -> RunResult:
    """A run of two steps of four responses, the first step slower."""
    writer = MetricsWriter(folder)
    for step in (1, 2):
        values = {"time/step": seconds * (3 - step), "time/rollout": seconds / 2, "rollout/response_length": 6.0}
        writer.write(step, values | {"reward": sum(rewards) / 4, "actor/loss": 0.25 * rewards[0]})
        rows = [{"prompt_id": i, "response": f"{i} {reward}", "reward": reward} for i, reward in enumerate(rewards)]
        write_rollouts(folder, step, rows)
    return RunResult(folder)


def test_efficiency_is_against_the_fewest_gpus(tmp_path):
    runs = {n: scaled(tmp_path / str(n), s, [0.0, 1.0, 0.0, 1.0 / n]) for n, s in ((1, 8.0), (2, 5.0))}
    speed = bench_scaling.speed_rows(runs, responses=4, prompt_tokens=14)
    step = {row["gpus"]: row for row in speed if row["phase"] == "step"}
    assert step[1]["tokens_per_s_per_gpu"] == 10 and step[1]["efficiency"] == 1  # 4 x (14 + 6) tokens in 8 s
    assert step[2]["tokens_per_s_per_gpu"] == 8 and step[2]["efficiency"] == pytest.approx(0.8)
    (row,) = bench_scaling.curve_rows(runs)
    assert row["max difference reward"] == pytest.approx(0.125) and row["max difference actor/loss"] == 0
    assert row["same responses, first step"] == 0.75
    # Of 0, 1, 0, 1 the standard deviation is 1 / sqrt(3), so the standard error of the mean is 1 / sqrt(12).
    assert row["reward, standard errors"] == pytest.approx(0.125 * 12**0.5)


def test_finished_runs_are_read_again(tmp_path, monkeypatch, capsys):
    started: list[Path] = []

    def run(settings, folder, *, num_ranks, **_):
        """Leave what the command leaves, as of the seconds that it took on so many GPUs."""
        left = scaled(folder, {1: 8.0, 2: 5.0}[num_ranks], [0.0, 1.0, 0.0, 1.0])
        (folder / "environment.json").write_text('{"device": "a card"}')
        folder.with_suffix(".yaml").write_text(yaml.safe_dump({**settings, "run": {"dir": "elsewhere"}}))
        started.append(folder)
        return left

    monkeypatch.setattr(bench_scaling, "run_colocated", run)
    options = ["--gpus", "2", "1", "--steps", "2", "--responses", "8", "--prompt-tokens", "4", "--reuse"]
    options += ["--work", str(tmp_path), "--out", str(tmp_path), "--model", "m", "--prompts", "p"]
    for more in ([], [], ["--zero-stage", "3"]):
        monkeypatch.setattr(sys, "argv", ["", *options, *more])
        with pytest.raises(SystemExit) as ended:
            bench_scaling.main()
        assert ended.value.code == 0
    assert [folder.name for folder in started] == ["scaling_1", "scaling_2"] * 2  # the second call reads the first's
    assert "max difference reward: 0" in capsys.readouterr().out
    environment, _, first, *_ = (tmp_path / "scaling.csv").read_text().splitlines()
    assert environment.startswith("# device a card") and first == "1,step,8.0,10.0,1.0"


def test_a_random_model_is_what_transformers_loads(tmp_path):
    random_model.write_prompts(tmp_path / "prompts.jsonl", 8)
    random_model.make_tokenizer(128).save_pretrained(tmp_path)
    random_model.shape_config("tiny").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(tokenizer) == 128 and {len(tokenizer(prompt)["input_ids"]) for prompt in prompts} == {8}
    assert tokenizer.decode([1, 2, 100, 101]) == "ab w100 w101"
    assert even_words(None, "ab w100 w27") == pytest.approx(2 / 3) and even_words(None, "") == 0


def test_links_are_timed_between_ranks(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--megabytes", "1", "--repeats", "3", "--out", str(tmp_path)]
    command = [sys.executable, *torchrun, str(ROOT / "profiling" / "bench_links.py"), *options]
    without_gpus = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # where two ranks may not share one
    subprocess.run(command, env=without_gpus, check=True, capture_output=True, timeout=120)
    lines = (tmp_path / "links.csv").read_text().splitlines()
    assert lines[0].startswith("# device CPU, ") and "num_ranks 2" in lines[0]
    rows = {row["what"]: row for row in csv.DictReader(lines[1:])}
    # Of two ranks each sends half of the bytes in a gather, all of them in a reduction.
    sent = {name: float(row["gb_per_s"]) * float(row["ms"]) for name, row in rows.items()}
    expected = {"all-reduce": 1.0, "all-gather": 0.5, "broadcast": 1.0}
    assert {name: sent[name] for name in expected} == pytest.approx(expected)


def test_work_that_overlaps_on_two_streams_is_counted_once():
    """From 0 to 6 and, with a part of it on another stream, from 10 to 14; nothing in between."""
    spans = [(10, 3), (0, 4), (12, 2), (2, 4), (11, 1)]
    events = [{"ts": start, "dur": length} for start, length in spans]
    assert bench_rollout.busy_and_wall(events) == (10, 14)
