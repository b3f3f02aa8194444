"""A run that was stopped and continued is the run that was never stopped, bit for bit."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hybrid_rl import evaluation
from hybrid_rl.config import ConfigError, as_dict
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.engines.vllm.engine import VllmEngine
from launch import colocated

SIGNALLED = """
import os, signal
from hybrid_rl import trainer
from hybrid_rl.checkpoints import saver as checkpoint
from hybrid_rl.steps import rollout
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.checkpoints.snapshot import Snapshot
from launch.colocated import main, parse

def signal_in(owner, name, calls):
    original = getattr(owner, name)
    def counted(*arguments, **named):
        nonlocal calls
        calls -= 1
        if calls == 0:
            os.kill(os.getpid(), signal.{signal})
        return original(*arguments, **named)
    setattr(owner, name, counted)

if __name__ == "__main__":
    signal_in({owner}, "{name}", {calls})
    {run}
"""

# Owner, function, the call in which to die, and how often the run that goes on may generate. Each step generates an
# evaluation and its responses: those of step 3 are calls 5 and 6, the last evaluation is call 9. A checkpoint of three
# parts is written beside what follows it: the kill may come before or after that evaluation.
PLACES = [
    ("HuggingFaceEngine", "generate", 5, {5}),
    ("HuggingFaceEngine", "generate", 6, {4}),
    ("trainer", "score_responses", 3, {3}),
    ("trainer", "compute_advantages", 3, {3}),
    ("trainer", "update_critic", 3, {3}),
    ("trainer", "update_actor", 3, {3}),
    ("Snapshot", "write", 4, {0, 1}),
    ("checkpoint", "_publish", 2, {0, 1}),
    ("checkpoint", "write_atomically", 4, {0, 1}),  # a save replaces state.json and latest
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the processes have that are killed: on AMD's processors MKL sums in another order with another number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def four_steps(make_config, train_here, tmp_path_factory):
    """What four steps without a stop leave. Their third is a short batch that ends the epoch of ten prompts."""
    return train_here(make_config(tmp_path_factory.mktemp("whole"), run={"num_steps": 4}))


def assert_same(run, expected) -> None:
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert run.metrics == expected.metrics
    assert run.rollouts == expected.rollouts
    assert run.state == expected.state
    for name in ("actor", "critic"):
        for key, weight in expected.weights[name].items():
            assert torch.equal(run.weights[name][key], weight), (name, key)


def test_the_uninterrupted_run_is_worth_comparing_with(four_steps, tiny: Path):
    assert [len(rows) for rows in four_steps.rollouts] == [8, 8, 4, 8]
    assert sorted({row["prompt_id"] for rows in four_steps.rollouts[:3] for row in rows}) == list(range(10))
    assert len({tuple(sorted(row.items())) for row in four_steps.metrics}) == 4
    assert all(row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in four_steps.metrics)
    place = four_steps.state["loader"]
    assert (four_steps.state["step"], place["epoch"], place["position"]) == (4, 1, 4)


def test_two_steps_and_two_more_are_four(four_steps, make_config, train_here, tmp_path):
    first = train_here(make_config(tmp_path, run={"num_steps": 2}))
    assert len(first.metrics) == 2
    assert any(not torch.equal(w, four_steps.weights["actor"][name]) for name, w in first.weights["actor"].items())
    assert_same(train_here(make_config(tmp_path, run={"num_steps": 4, "resume": "must"})), four_steps)


def test_a_run_that_ends_early_goes_on_from_its_last_step(four_steps, make_config, train_here, tmp_path, monkeypatch):
    measure_accuracy, evaluations = evaluation.measure_accuracy, []

    def third_is_right(*arguments):
        evaluations.append(measure_accuracy(*arguments))
        return evaluations[-1] | ({"accuracy": 1.0} if len(evaluations) == 3 else {})

    settings = {"num_steps": 4, "stop_at_accuracy": 1.0}
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "measure_accuracy", third_is_right)
        stopped = train_here(make_config(tmp_path, run=settings, checkpoint={"every_steps": 10}))
    assert (len(stopped.metrics), stopped.state["step"]) == (2, 2)
    assert_same(train_here(make_config(tmp_path, run=settings | {"resume": "must"})), four_steps)


def test_all_that_has_a_state_goes_on(make_config, train_here, tmp_path):
    """Moving reference, average, second data set, adaptive KL and running norm: two steps and two more are four."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["1+2=3", "4+4=8", "7+1=8", "2+2=4", "9"]))

    def config(folder: Path, num_steps: int):
        folder.mkdir(exist_ok=True)
        return make_config(
            folder,
            run={"num_steps": num_steps},
            models={"reference_sync_steps": 1, "reference_mixup_alpha": 0.5, "ema_decay": 0.9},
            reward={"normalize": True, "clip": 5.0},
            advantage={"kl_target": 0.01, "kl_horizon": 50},
            ptx={"path": str(texts), "batch_size": 3, "max_tokens": 16},
        )

    whole = train_here(config(tmp_path / "whole", 4))
    train_here(config(tmp_path / "parts", 2))
    assert_same(train_here(config(tmp_path / "parts", 4)), whole)
    assert len({row["kl_coef"] for row in whole.metrics}) == 4  # it adapts
    assert all(row["actor/ptx_loss"] > 0 for row in whole.metrics)
    files = sorted((tmp_path / "whole/run/checkpoints/step_000004").rglob("*.safetensors"))
    assert [file.parent.name for file in files] == ["actor", "critic", "ema", "random_state", "reference"]
    for file in files:
        ours, theirs = load_file(file), load_file(tmp_path / "parts" / file.relative_to(tmp_path / "whole"))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())


def train_until_signal(run, config, *place, number: str, command: str):
    """Train in another process, which sends itself a signal in a call of a function."""
    settings, program = Path(config.run.dir) / "settings.yaml", Path(config.run.dir) / "die.py"
    settings.write_text(yaml.safe_dump(as_dict(config)))
    owner, name, calls = place
    program.write_text(SIGNALLED.format(owner=owner, name=name, calls=calls, signal=number, run=command))
    return run(str(program), "--config", str(settings))


def kill(run, config, owner: str, name: str, calls: int) -> None:
    """Train in another process until it kills itself."""
    command = "trainer.train(parse()[0])"
    ended = train_until_signal(run, config, owner, name, calls, number="SIGKILL", command=command)
    assert ended.code == -signal.SIGKILL, ended.output
    assert not ended.survivors


@pytest.mark.slow
@pytest.mark.parametrize("owner, name, calls, again", PLACES, ids=[f"{name}-{calls}" for _, name, calls, _ in PLACES])
def test_a_run_killed_anywhere_goes_on_and_generates_nothing_twice(
    four_steps, make_config, train_here, run_forked, tmp_path, monkeypatch, owner, name, calls, again
):
    config = make_config(tmp_path, run={"num_steps": 4}, checkpoint={"phase_log": True})
    kill(run_forked, config, owner, name, calls)

    generated, generate = [], HuggingFaceEngine.generate
    monkeypatch.setattr(HuggingFaceEngine, "generate", lambda *a: generated.append(len(a[1])) or generate(*a))
    assert_same(train_here(config), four_steps)
    assert len(generated) in again
    assert not list((config.run_dir / "phase_log").glob("step_*"))


@pytest.mark.slow
def test_a_run_with_vllm_killed_in_an_update_takes_its_rollouts_from_the_log(
    make_config, train_here, run_python, lent_engine, tmp_path, monkeypatch
):
    """No checkpoint is there yet: three steps are learned from the log, and only the last evaluation is generated.

    It is compared with what the killed run left: two runs of vLLM need not batch, and so round, alike.
    """
    checkpoints = {"every_steps": 4, "phase_log": True, "export": False}
    sections = {"run": {"num_steps": 3}, "rollout": {"engine": "vllm"}, "sync": {"mode": "copy"}}
    config = make_config(tmp_path, **sections, checkpoint=checkpoints)
    kill(run_python, config, "trainer", "update_actor", 3)
    paths = [config.run_dir / "rollouts" / f"step_{step:06d}.jsonl" for step in (1, 2)]
    left = [path.read_text() for path in paths]
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]

    generated, generate = [], VllmEngine.generate
    monkeypatch.setattr(VllmEngine, "generate", lambda *a: generated.append(len(a[1])) or generate(*a))
    found = train_here(config)
    assert len(generated) == 1
    assert len(left) == 2 and [path.read_text() for path in paths] == left
    assert [row["step"] for row in found.metrics] == [1, 2, 3]
    for before, after in zip(rows, found.metrics, strict=False):
        assert after["actor/grad_norm"] == pytest.approx(before["actor/grad_norm"], rel=1e-3)
        assert after["reward"] == before["reward"] and after["rollout/logprob_gap"] < 1e-4


@pytest.mark.slow
def test_a_run_killed_without_a_log_generates_again_and_is_the_same(
    four_steps, make_config, train_here, run_forked, tmp_path
):
    config = make_config(tmp_path, run={"num_steps": 4})
    kill(run_forked, config, "trainer", "update_actor", 3)
    assert_same(train_here(config), four_steps)


# Owner, function, the call with the signal, and the step of the checkpoint: the third step is given up before its
# responses are scored, and finished after that.
PREEMPTED = [
    ("trainer", "train_step", 3, 2),
    ("HuggingFaceEngine", "generate", 6, 2),
    ("trainer", "score_responses", 3, 2),
    ("trainer", "make_batch", 3, 3),
    ("trainer", "compute_advantages", 3, 3),
    ("trainer", "update_critic", 3, 3),
    ("trainer", "update_actor", 3, 3),
    ("trainer", "save", 3, 3),
    ("trainer", "score_responses", 1, 0),
]


def preempt(run, config, owner: str, name: str, calls: int, step: int) -> None:
    """Train with the real command until it gets SIGTERM."""
    ended = train_until_signal(run, config, owner, name, calls, number="SIGTERM", command="main()")
    assert ended.code == 75 and not ended.survivors, ended.output
    kept = f"the checkpoint of step {step} is complete" if step else "no step is finished"
    lines = [line for line in ended.output.splitlines() if line.startswith(("error", "SIGTERM", "warning"))]
    assert lines == [
        "SIGTERM: the run ends with a checkpoint within checkpoint.grace_s = 200 s",
        f"error: preempted by SIGTERM: {kept}, and the same command continues the run",
    ]


def check_preempted(run, train_here, config, place, expected) -> None:
    """Check that a run that goes on after SIGTERM is the run that was never stopped."""
    preempt(run, config, *place)
    assert_same(train_here(config), expected)


def test_a_preempted_run_goes_on_from_its_last_step(four_steps, make_config, train_here, run_forked, tmp_path):
    checkpoints = {"every_steps": 10, "on_sigterm": True, "grace_s": 200.0, "export": False}
    config = make_config(tmp_path, run={"num_steps": 4}, checkpoint=checkpoints)
    check_preempted(run_forked, train_here, config, ("trainer", "score_responses", 3, 2), four_steps)


@pytest.mark.slow
@pytest.mark.parametrize("place", PREEMPTED, ids=[f"{name}-{calls}" for _, name, calls, _ in PREEMPTED])
def test_a_run_preempted_anywhere_goes_on_from_its_last_step(
    four_steps, make_config, train_here, run_forked, tmp_path, place
):
    """Without periodic checkpoints: the one of SIGTERM is the only one."""
    checkpoints = {"every_steps": 0, "on_sigterm": True, "grace_s": 200.0, "export": False}
    config = make_config(tmp_path, run={"num_steps": 4}, checkpoint=checkpoints)
    preempt(run_forked, config, *place)
    every_two = {**checkpoints, "every_steps": 2}
    assert_same(train_here(make_config(tmp_path, run={"num_steps": 4}, checkpoint=every_two)), four_steps)


@pytest.mark.slow
def test_a_preempted_run_with_a_log_generates_nothing_twice(
    four_steps, make_config, train_here, run_forked, tmp_path, monkeypatch
):
    checkpoints = {"every_steps": 10, "phase_log": True, "on_sigterm": True, "grace_s": 200.0, "export": False}
    config = make_config(tmp_path, run={"num_steps": 4}, checkpoint=checkpoints)
    preempt(run_forked, config, "HuggingFaceEngine", "generate", 6, 2)
    generated, generate = [], HuggingFaceEngine.generate
    monkeypatch.setattr(HuggingFaceEngine, "generate", lambda *a: generated.append(len(a[1])) or generate(*a))
    assert_same(train_here(config), four_steps)
    assert len(generated) == 3  # the fourth step and the last evaluation


@pytest.mark.slow
def test_a_moving_reference_moves_once_in_a_step_that_is_given_up(make_config, train_here, run_forked, tmp_path):
    """The reference, the average, the running norm and the KL coefficient are those of the last finished step."""
    checkpoints = {"every_steps": 10, "on_sigterm": True, "grace_s": 200.0, "export": False}

    def config(folder: Path):
        folder.mkdir(exist_ok=True)
        return make_config(
            folder,
            run={"num_steps": 4},
            models={"reference_sync_steps": 1, "reference_mixup_alpha": 0.5, "ema_decay": 0.9},
            reward={"normalize": True},
            advantage={"kl_target": 0.01, "kl_horizon": 50},
            checkpoint=checkpoints,
        )

    whole = train_here(config(tmp_path / "whole"))
    place = ("trainer", "score_responses", 3, 2)
    check_preempted(run_forked, train_here, config(tmp_path / "parts"), place, whole)


@pytest.mark.slow
def test_two_ranks_of_which_one_gets_the_signal_end_together_and_go_on(
    make_config, launch, run_forked, read_run, tmp_path
):
    def config(name: str):
        (tmp_path / name).mkdir()
        checkpoints = {"every_steps": 10, "on_sigterm": True, "grace_s": 200.0, "export": False}
        return make_config(tmp_path / name, run={"num_steps": 4}, checkpoint=checkpoints)

    whole, parts = config("whole"), config("parts")
    assert launch(whole, "--num_processes", "2").code == 0
    settings, program = tmp_path / "settings.yaml", tmp_path / "program.py"
    settings.write_text(yaml.safe_dump(as_dict(parts)))
    text = SIGNALLED.format(owner="trainer", name="score_responses", calls=3, signal="SIGTERM", run="main()")
    # Every rank imports the program, and the second one signals itself.
    text = text.replace("if calls == 0:", "if calls == 0 and os.environ.get('RANK') == '1':")
    text = text.replace('if __name__ == "__main__":\n    signal_in', "signal_in")
    program.write_text(text.replace("    main()", 'if __name__ == "__main__":\n    main()'))
    ended = run_forked(str(program), "--config", str(settings), "--num_processes", "2")
    assert ended.code == 75 and not ended.survivors, ended.output
    assert "Traceback" not in ended.output
    errors = [line for line in ended.output.splitlines() if line.startswith(("error", "SIGTERM"))]
    kept = "preempted by SIGTERM: the checkpoint of step 2 is complete, and the same command continues the run"
    assert errors == [f"error: {kept}"]
    assert launch(parts, "--num_processes", "2").code == 0
    assert read_run(parts) == read_run(whole)


def test_a_finished_run_has_nothing_left_to_do(four_steps, make_config, train_here, tmp_path):
    config = make_config(tmp_path)
    first = train_here(config)
    again = train_here(config)
    assert again.metrics == first.metrics and again.rollouts == first.rollouts
    for name in ("actor", "critic"):
        assert all(torch.equal(again.weights[name][key], weight) for key, weight in first.weights[name].items())


def refused(config, tmp_path, monkeypatch, capsys) -> str:
    """Return what the command prints before it ends with code 2."""
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump(as_dict(config)))
    monkeypatch.setattr(sys, "argv", ["colocated.py", "--config", str(settings)])
    monkeypatch.setattr(colocated, "handle_signals", lambda: None)  # the handlers of pytest stay
    with pytest.raises(SystemExit) as ended:
        colocated.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_must_resume_without_a_checkpoint(make_config, tmp_path, monkeypatch, capsys):
    config = make_config(tmp_path, run={"resume": "must"})
    sentence = refused(config, tmp_path, monkeypatch, capsys)
    assert sentence == f"error: run.resume = must: {config.run_dir} has no checkpoint; use auto\n"


def test_other_data_is_refused_before_a_model_loads(make_config, train_here, tiny, tmp_path):
    train_here(make_config(tmp_path))
    other = tmp_path / "other.jsonl"
    other.write_text((tiny / "prompts.jsonl").read_text().replace("9+0=", "9+1="))
    with pytest.raises(ConfigError, match=r"the data set is not the checkpoint's: the hash of its token ids"):
        train_here(make_config(tmp_path, run={"num_steps": 3}, prompts={"path": str(other)}))


def test_a_finished_run_says_so(make_config, train_here, launch, tmp_path):
    config = make_config(tmp_path, run={"num_steps": 1})
    train_here(config)
    ended = launch(config)
    assert ended.code == 0, ended.output
    assert f"all 1 steps of {config.run_dir} are done: nothing to train" in ended.output
