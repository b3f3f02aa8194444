"""The files and the row of metrics that a step writes."""

import json
import re
from dataclasses import replace

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybrid_rl.batch import Turn, make_train_batch
from hybrid_rl.config import Config, ConfigError, ModelsConfig, PromptsConfig, RewardConfig, RunConfig, as_dict
from hybrid_rl.distributed import World
from hybrid_rl.errors import FileWriteError
from hybrid_rl.monitoring.recorder import Recorder
from tests.conftest import make_rollout
from tests.disks import a_full_disk

RUN_ID = "0123456789abcdef0123456789abcdef"
ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def write_steps(config: Config, first_step: int, last_step: int) -> list[dict[str, float]]:
    rollouts = [make_rollout(response_ids=[3]), make_rollout(response_ids=[3] * 3, prompt_id=1, is_truncated=True)]
    batch = make_train_batch(rollouts).with_fields(rewards=torch.tensor([1.0, 0.0]))
    with Recorder(config, ALONE, ALONE) as recorder:
        recorder.open(first_step, run_id=RUN_ID)
        with recorder.timeline.span("rollout", phase="rollout"):
            pass
        rows = [
            recorder.step(step, rollouts, batch, {"kl": 2.0, "reward/rule": 1.0}, {"accuracy": 0.25})
            for step in range(first_step, last_step + 1)
        ]
        recorder.summary({"accuracy": 0.25}, {"accuracy": 0.5})
    return rows


@pytest.fixture
def config(tmp_path) -> Config:
    return Config(run=RunConfig(name="r", dir=str(tmp_path), num_steps=3), models=ModelsConfig(actor="somewhere"))


def test_sums_become_means_over_responses_or_tokens(config: Config) -> None:
    row = write_steps(config, 1, 1)[0]
    assert row["reward"] == 0.5 and row["reward/rule"] == 0.5  # two responses
    assert row["kl"] == 0.5  # 2.0 over 1 + 3 tokens
    assert row["rollout/response_length"] == 2.0 and row["rollout/truncated"] == 0.5 and row["rollout/empty"] == 0.0
    assert row["accuracy"] == 0.25 and row["time/rollout"] >= 0


def test_files_of_a_run(config: Config) -> None:
    write_steps(config, 1, 2)
    folder = config.run_dir
    assert yaml.safe_load((folder / "config.yaml").read_text()) == json.loads(json.dumps(as_dict(config)))
    assert json.loads((folder / "environment.json").read_text())["torch"] == torch.__version__
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    rollouts = [json.loads(line) for line in (folder / "rollouts" / "step_000002.jsonl").read_text().splitlines()]
    assert [(r["prompt_id"], r["reward"], r["num_tokens"], r["is_truncated"]) for r in rollouts] == [
        (0, 1.0, 1, False),
        (1, 0.0, 3, True),
    ]
    assert json.loads((folder / "summary.json").read_text()) == {
        "before": {"accuracy": 0.25},
        "after": {"accuracy": 0.5},
    }
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert "rollout" in {event["name"] for event in events}
    assert list((folder / "tensorboard").iterdir())


def test_lengths_and_rewards_have_quantiles_in_the_row_and_histograms_in_tensorboard(config: Config) -> None:
    """Responses of 1 and 3 tokens to prompts of 1 token, with rewards 1 and 0."""
    row = write_steps(config, 1, 1)[0]
    expected = {"response_length": (1.0, 1.0, 3.0), "prompt_length": (1.0, 1.0, 1.0), "reward": (0.0, 0.0, 1.0)}
    for name, quantiles in expected.items():
        assert tuple(row[f"histogram/{name}/{part}"] for part in ("min", "p50", "max")) == quantiles
    events = EventAccumulator(str(config.run_dir / "tensorboard")).Reload()
    (event,) = events.Histograms("histogram/response_length")
    found = event.histogram_value
    assert (event.step, found.num, found.sum, found.sum_squares) == (1, 2, 4.0, 10.0)
    counted = dict(zip(found.bucket_limit, found.bucket, strict=True))
    assert (counted[1.5], counted[2.5], counted[3.5]) == (1, 0, 1)


@pytest.mark.parametrize("columns", ["20", "200"])
def test_a_finished_run_says_so_in_one_line(
    config: Config, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with Recorder(config, ALONE, ALONE) as recorder:
        recorder.open(4, run_id=RUN_ID)
    assert f"all 3 steps of {config.run_dir} are done: nothing to train\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given, expected",
    [
        (None, "accuracy on held.jsonl is judged by math (run.eval_function = null)"),
        ("last_number", "accuracy on held.jsonl is judged by last_number (run.eval_function)"),
    ],
)
def test_the_first_line_names_the_function_of_the_evaluation(config, given, expected, capsys):
    config = replace(
        config,
        run=replace(config.run, eval_function=given),
        prompts=PromptsConfig(path="p", eval_path="held.jsonl"),
        reward=RewardConfig(functions=["think_format", "math"]),
    )
    write_steps(config, 1, 1)
    assert capsys.readouterr().out.splitlines()[0] == expected


def test_a_resumed_run_writes_its_steps_once(config: Config) -> None:
    write_steps(config, 1, 3)
    write_steps(config, 2, 3)
    assert [json.loads(line)["step"] for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
    ]


def test_profiling_without_a_gpu_is_rejected(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"run.profile_steps = \[3, 4\]: there is no GPU"):
        Recorder(replace(config, run=replace(config.run, profile_steps=(3, 4))), ALONE, ALONE)


def test_rollouts_hold_the_turns_of_conversations(config: Config) -> None:
    turns = [
        Turn(role="assistant", num_tokens=2, text="a < 5?", reward=0.5),
        Turn(role="user", num_tokens=3, text="no"),
        Turn(role="assistant", num_tokens=1, text="7"),
    ]
    counts = {"environment/turns": 2.0}
    rollouts = [replace(make_rollout(response_ids=[3] * 6, turns=turns), counts=counts), make_rollout(prompt_id=1)]
    with Recorder(config, ALONE, ALONE) as recorder:
        recorder.open(1, run_id=RUN_ID)
        batch = make_train_batch(rollouts).with_fields(rewards=torch.tensor([1.0, 0.0]))
        row = recorder.step(1, rollouts, batch, {"kl": 2.0}, {})
    assert row["rollout/response_length"] == 2.0 and row["kl"] == 0.5  # over 3 + 1 sampled tokens
    lines = (config.run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    talked, plain = map(json.loads, lines)
    assert talked["num_tokens"] == 3 and talked["counts"] == counts
    assert "turns" not in plain and "counts" not in plain
    assert talked["turns"] == [
        {"role": "assistant", "text": "a < 5?", "num_tokens": 2, "reward": 0.5},
        {"role": "user", "text": "no", "num_tokens": 3},
        {"role": "assistant", "text": "7", "num_tokens": 1, "reward": 0.0},
    ]


@pytest.mark.parametrize("number, shown", [(8, ["step 1, prompt 7:", "step 3, prompt 7:"]), (0, [])])
def test_the_display_shows_a_conversation_every_few_steps(config: Config, number, shown, capsys) -> None:
    every = replace(config, run=replace(config.run, tracked_samples=number, tracked_samples_every_steps=2))
    turns = [Turn(role="assistant", num_tokens=1, text="7", reward=0.5)]
    rollouts = [make_rollout(), make_rollout(response_ids=[3], turns=turns, prompt_id=7)]
    batch = make_train_batch(rollouts).with_fields(rewards=torch.tensor([1.0, 0.0]))
    with Recorder(every, ALONE, ALONE) as recorder:
        recorder.open(1, run_id=RUN_ID)
        for step in (1, 2, 3):
            recorder.step(step, rollouts, batch, {}, {})
    assert re.findall(r"^step \d, prompt \d:", capsys.readouterr().out, re.MULTILINE) == shown


def test_rollouts_of_the_last_steps_stay(config: Config) -> None:
    write_steps(replace(config, run=replace(config.run, keep_rollouts=2)), 1, 3)
    names = sorted(path.name for path in (config.run_dir / "rollouts").iterdir())
    assert names == ["step_000002.jsonl", "step_000003.jsonl"]


def step_on_a_full_disk(config: Config, num_bytes: int) -> str:
    """Return the error of a second step, all of whose files end after some bytes."""
    with pytest.raises(FileWriteError) as failed, Recorder(config, ALONE, ALONE) as recorder:
        recorder.open(1, run_id=RUN_ID)
        rollouts = [make_rollout(response_ids=[3])]
        batch = make_train_batch(rollouts).with_fields(rewards=torch.tensor([1.0]))
        recorder.step(1, rollouts, batch, {}, {})
        with a_full_disk(num_bytes):
            recorder.step(2, rollouts, batch, {}, {})
    return str(failed.value)


def test_a_full_disk_is_one_sentence_with_the_file_and_leaves_whole_files(config: Config, caplog) -> None:
    """The rollouts come first; of 150 bytes they take 124, so that the metrics are the file that does not fit."""
    remedy = r"free space on its disk or set run\.dir to another one, and start the same command again"
    assert re.match(
        rf"\S+/rollouts/step_000002\.jsonl cannot be written \(File too large\): {remedy}",
        step_on_a_full_disk(config, 100),
    )
    assert re.match(
        rf"\S+/metrics\.jsonl cannot be written \(File too large\): {remedy}", step_on_a_full_disk(config, 300)
    )
    folder = config.run_dir
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1]
    assert not [path for path in folder.rglob("*") if path.name.endswith(".partial")]
    write_steps(config, 2, 3)
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
