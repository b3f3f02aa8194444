"""Several ranks train what one rank trains, however uneven their batches; a rank that fails ends all."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybrid_rl.config import Config, ConfigError, as_dict
from tests.programs import PATHS, ForkServer

UNEVEN = {
    # 5 of 10 prompts: 3 for rank 0, 2 for rank 1. Mini-batches of 2 responses, so that a rank may hold none of one.
    2: {"rollout_batch_size": 5},
    # 3, 3, 3, 1: the last batch of the epoch leaves rank 1 without a prompt.
    3: {"rollout_batch_size": 3},
}

FAILS_FOR_ONE_PROMPT = """
from pathlib import Path

def raises(prompt, response):
    if prompt.prompt_id == 7:
        Path(__file__).with_name("failed").touch()
        raise ValueError("seven is refused")
    return 1.0
"""


def assert_close(left, expected) -> None:
    """Compare prompts and responses exactly, rewards and metrics up to the order in which numbers are added."""
    for rows, wanted in zip(left.rollouts, expected.rollouts, strict=True):
        assert [(r["prompt_id"], r["response"], r["num_tokens"]) for r in rows] == [
            (r["prompt_id"], r["response"], r["num_tokens"]) for r in wanted
        ]
        assert [r["reward"] for r in rows] == pytest.approx([r["reward"] for r in wanted], rel=1e-4, abs=1e-6)
    for row, wanted in zip(left.metrics, expected.metrics, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.fixture
def assert_ranks_train_alike(make_config, train_here, read_run, launch, tmp_path):
    """Train with some settings here, and with changed ones of `update` on several ranks; return the latter's output."""

    def check(num_ranks: int, settings: dict, changes: dict) -> str:
        folders = [tmp_path / name for name in ("one", "more")]
        for folder in folders:
            folder.mkdir()
        one = make_config(folders[0], **settings)
        more = make_config(folders[1], **settings | {"update": settings["update"] | changes})
        ended = launch(more, "--num_processes", str(num_ranks))
        assert ended.code == 0, ended.output
        assert not ended.survivors
        assert_close(read_run(more), train_here(one))
        return ended.output

    return check


SHARDED = {"shard_frozen": "true", "reference_sync_steps": 1, "reference_mixup_alpha": 0.5, "ema_decay": 0.9}
"""Settings of `models` with which frozen models are shards, and the reference moves."""


def sections(zero_stage: int) -> dict:
    return {
        "rollout": UNEVEN[zero_stage],
        "update": {"mini_batch_size": 2, "zero_stage": zero_stage},
        "checkpoint": {"every_steps": 1},
    }


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def one(request, make_config, train_here, tmp_path_factory):
    """A ZeRO stage, and four steps of one rank."""
    folder = tmp_path_factory.mktemp(f"one{request.param}")
    sharded = make_config(folder, run={"num_steps": 4}, models=SHARDED, **sections(request.param))
    whole = replace(sharded, models=replace(sharded.models, shard_frozen="false"))
    return request.param, train_here(whole)


def test_two_ranks_train_what_one_does(one, make_config, read_run, launch, tmp_path):
    """Two ranks hold reference and reward model as shards, and with ZeRO-3 all models; one rank holds whole models."""
    zero_stage, expected = one
    config = make_config(tmp_path, run={"num_steps": 4}, models=SHARDED, **sections(zero_stage))
    ended = launch(config, "--num_processes", "2")
    assert ended.code == 0, ended.output
    assert not ended.survivors
    assert_close(read_run(config), expected)
    assert (config.run_dir / "timeline_rank1.json").exists()


@pytest.mark.slow
def test_another_number_of_ranks_goes_on(one, make_config, train_here, read_run, launch, tmp_path):
    """A step on one rank, two more on two and the last on one, against four on one."""
    zero_stage, expected = one
    for num_ranks, last in ((1, 1), (2, 3), (1, 4)):
        config = make_config(tmp_path, run={"num_steps": last}, models=SHARDED, **sections(zero_stage))
        if num_ranks == 1:
            train_here(config)
        else:
            ended = launch(config, "--num_processes", "2")
            assert ended.code == 0, ended.output
        assert (read_run(config).state["world_size"], read_run(config).state["step"]) == (num_ranks, last)
    assert_close(read_run(config), expected)


@pytest.mark.slow
def test_four_ranks_train_what_one_does(assert_ranks_train_alike):
    """Five prompts for four ranks, so that one has two of them, in groups of two whose baselines need both."""
    settings = {
        "run": {"num_steps": 3},
        "rollout": {"rollout_batch_size": 5},
        "update": {"mini_batch_size": 5, "zero_stage": 3},
        "advantage": {"estimator": "rloo"},
    }
    assert_ranks_train_alike(4, settings, {})


@pytest.mark.slow
def test_sequence_parallel_ranks_train_what_one_does(assert_ranks_train_alike):
    """Each pair of four ranks has the same sequences; every rank samples, scores and records its own prompts."""
    settings = {"run": {"num_steps": 3}, "rollout": UNEVEN[2], "update": {"mini_batch_size": 5}}
    assert_ranks_train_alike(4, settings, {"sequence_parallel_size": 2})


def test_sequence_parallelism_needs_several_ranks(make_config, train_here, tmp_path):
    config = make_config(tmp_path, update={"sequence_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"update.sequence_parallel_size = 2: must divide the number of ranks, 1$"):
        train_here(config)


@pytest.fixture(scope="module")
def two_key_heads(tiny, tmp_path_factory) -> dict[str, str]:
    """Policy and reward model as settings of `models`, with one more key head than the tiny ones."""
    root = tmp_path_factory.mktemp("two_key_heads")
    torch.manual_seed(1)
    for name, kind in {"policy": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification}.items():
        config = AutoConfig.from_pretrained(tiny / name)
        config.num_key_value_heads = 2
        model = kind.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.data.mul_(8)
        model.save_pretrained(root / name)
        AutoTokenizer.from_pretrained(tiny / name).save_pretrained(root / name)
    return {"actor": str(root / "policy"), "reward": str(root / "reward")}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, zero_stage, engine", [(4, 1, "hf"), (2, 0, "vllm")])
def test_tensor_parallel_ranks_train_what_one_does(
    assert_ranks_train_alike, two_key_heads, num_ranks, zero_stage, engine
):
    """Actor and critic are sharded, reference and reward model are not; the engines get the whole actor."""
    settings = {
        "run": {"num_steps": 3},
        "models": two_key_heads,
        "rollout": UNEVEN[2] | {"engine": engine},
        "sync": {"num_verified": 99},
        "update": {"mini_batch_size": 5, "zero_stage": zero_stage},
    }
    output = assert_ranks_train_alike(num_ranks, settings, {"tensor_parallel_size": 2})
    assert "update.tensor_parallel_size = 2 shards the trainer's weights" in output or engine == "hf"


@pytest.mark.slow
def test_tensor_parallelism_that_does_not_divide_the_heads_is_refused(make_config, launch, tmp_path):
    """The tiny policy has one key head."""
    config = make_config(tmp_path, update={"tensor_parallel_size": 2})
    ended = launch(config, "--num_processes", "2")
    assert ended.code == 2
    expected = "error: update.tensor_parallel_size = 2: must divide the 1 num_key_value_heads of LlamaForCausalLM\n"
    assert expected in ended.output


@dataclass(frozen=True)
class Running:
    """A run on two ranks that has done a step."""

    config: Config
    server: ForkServer
    processes: list[psutil.Process]
    """The launcher, the ranks and what they have started."""

    def rank(self, rank: int) -> psutil.Process:
        name = "heartbeat.json" if rank == 0 else f"heartbeat_rank{rank}.json"
        return psutil.Process(json.loads((self.config.run_dir / name).read_text())["pid"])

    def end(self) -> tuple[int, list[str]]:
        """Return exit code and errors of the command; nothing that it started lives on, and nothing shows a trace."""
        ended = self.server.wait(100)
        _, alive = psutil.wait_procs(self.processes, timeout=15)
        assert not alive
        assert "Traceback" not in ended.output, ended.output
        return ended.code, [line for line in ended.output.splitlines() if line.startswith("error: ")]


@pytest.fixture
def running(make_config, fork_servers, tmp_path) -> Iterator[Running]:
    """A run on two ranks that goes on until a test ends it."""
    run = {"num_steps": 1000, "eval_every_steps": 0, "stall_timeout_s": 10.0}
    config = make_config(tmp_path, run=run, checkpoint={"every_steps": 0, "export": False})
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump(as_dict(config)))
    arguments = ("launch/colocated.py", "--config", str(settings), "--num_processes", "2")
    fork_servers[0].start(*arguments, environment={**os.environ, **PATHS, "OMP_NUM_THREADS": "1"})
    program, metrics, deadline = fork_servers[0].program(), config.run_dir / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size):
        assert program.is_running() and time.monotonic() < deadline
        time.sleep(0.1)
    processes = [program, *program.children(recursive=True)]
    yield Running(config, fork_servers[0], processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def listening_addresses(processes: list[psutil.Process]) -> set[str]:
    """Return the addresses at which processes listen, IPv4 and IPv6."""
    connections = [connection for process in processes for connection in process.net_connections(kind="tcp")]
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_no_process_of_a_run_can_be_reached_from_another_machine(running):
    """SIGTERM then ends the run in one sentence."""
    assert listening_addresses(running.processes) == {"127.0.0.1"}
    running.processes[0].terminate()
    assert running.end() == (143, ["error: ended by SIGTERM"])


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_with_one_sentence(running):
    rank = running.rank(1)
    rank.kill()
    killed = time.monotonic()
    assert running.end() == (6, [f"error: rank 1 (pid {rank.pid}) was killed by SIGKILL"])
    assert time.monotonic() - killed < 30


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_after_the_limit(running):
    rank = running.rank(1)
    rank.suspend()
    stopped = time.monotonic()
    code, (sentence,) = running.end()
    assert code == 6
    assert sentence.startswith(f"error: rank 1 (pid {rank.pid} on {socket.gethostname()}) has made no progress for ")
    assert "run.stall_timeout_s = 10 s: it is stopped; rank 0 waits for it in " in sentence
    assert time.monotonic() - stopped < 40


@pytest.mark.slow
def test_a_function_that_fails_on_one_rank_ends_all_with_its_sentence(make_config, launch, tmp_path):
    (tmp_path / "scorer.py").write_text(FAILS_FOR_ONE_PROMPT)
    config = make_config(
        tmp_path,
        run={"eval_every_steps": 0},
        rollout={"rollout_batch_size": 10},
        reward={"functions": [f"{tmp_path / 'scorer.py'}:raises"]},
        update={"mini_batch_size": 20},
    )
    ended = launch(config, "--num_processes", "2")
    assert ended.code == 2 and "Traceback" not in ended.output, ended.output
    assert not ended.survivors
    (sentence,) = [line for line in ended.output.splitlines() if line.startswith("error: ")]
    assert sentence.startswith("error: reward.functions: prompt_id 7, ")
    assert "ValueError: seven is refused (scorer.py, line 7: " in sentence


@pytest.mark.slow
def test_a_setting_that_cannot_work_ends_with_its_sentence(make_config, launch, tmp_path):
    config = make_config(tmp_path, run={"resume": "must"})
    ended = launch(config, "--num_processes", "2")
    assert ended.code == 2
    assert f"error: run.resume = must: {config.run_dir} has no checkpoint; use auto\n" in ended.output
    assert "Traceback" not in ended.output
