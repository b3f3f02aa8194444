"""Runs on environments: equalities with transformers' engine; tokens, log-probs and times with real vLLM."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import Prompt
from hybrid_rl.config import EnvironmentConfig, PromptsConfig, RolloutConfig
from hybrid_rl.conversations import loop
from hybrid_rl.conversations.loop import collect_conversations
from hybrid_rl.conversations.setup import Environments
from hybrid_rl.data.template import Template
from hybrid_rl.data.tool_calls import ToolFormat
from hybrid_rl.data.turns import TurnEncoder
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.models.tokenizer import load_tokenizer
from tests.conftest import policy_tensors, sync_weights

THREE_TURNS = """
class Counting:
    def reset(self, row):
        self.turn, self.right = 0, row["answer"]

    def step(self, response):
        self.turn += 1
        return f"+{self.turn}=", float(self.right in response), self.turn == 3, {}
"""
ONE_TURN = """
class Silent:
    def reset(self, row):
        return None

    def step(self, response):
        return "", 0.0, True, {}
"""
SLEEPS = """
import asyncio

class Slow:
    async def reset(self, row):
        self.row, self.turn = row, 0
        await asyncio.sleep(row["seed"] % 500 / 1000)

    async def step(self, response):
        self.turn += 1
        await asyncio.sleep((self.row["seed"] >> self.turn) % 500 / 1000)
        return "=", 0.0, self.turn == 3, {}
"""


def write(folder: Path, source: str) -> str:
    path = folder / "environment_file.py"
    path.write_text(source)
    return f"{path}:{source.split('class ')[1].split(':')[0]}"


def without(row: dict, *names: str) -> dict:
    return {name: value for name, value in row.items() if not name.startswith(names)}


def test_conversations_of_one_turn_train_as_responses_do(make_config, train_here, tmp_path):
    """Bit for bit: metrics, rollouts, checkpoint and weights."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "turns").mkdir()
    run = {"deterministic": True, "eval_function": "exact_match"}
    plain = train_here(make_config(tmp_path / "plain", run=run))
    environment = {"name": write(tmp_path, ONE_TURN)}
    turns = train_here(make_config(tmp_path / "turns", run=run, environment=environment))
    assert [without(row, "environment/", "reward/environment") for row in turns.metrics] == plain.metrics
    assert all(row["environment/turns"] == 1 for row in turns.metrics)
    for name, weights in plain.weights.items():
        assert all(torch.equal(turns.weights[name][key], weight) for key, weight in weights.items())


def test_a_run_on_an_environment_resumes_as_if_it_had_never_stopped(make_config, train_here, tmp_path):
    def config(name: str, **run):
        (tmp_path / name).mkdir(exist_ok=True)
        return make_config(
            tmp_path / name,
            run={"deterministic": True, **run},
            reward={"functions": []},
            environment={"name": write(tmp_path, THREE_TURNS), "max_turn_tokens": 3},
            rollout={"engine": "hf", "rollout_batch_size": 4, "group_size": 2, "max_response_tokens": 20},
            models={"actor": make_config(tmp_path).models.actor},
            update={"mini_batch_size": 4, "micro_batch_tokens": 48},
        )

    whole = train_here(config("whole", num_steps=4))
    train_here(config("parts", num_steps=2))
    parts = train_here(config("parts", num_steps=4))
    for one, other in zip(whole.metrics, parts.metrics, strict=True):
        assert without(one, "environment/seconds") == without(other, "environment/seconds")
    for name, weights in whole.weights.items():
        assert all(torch.equal(parts.weights[name][key], weight) for key, weight in weights.items())
    assert all(len(row["turns"]) == 5 for step in whole.rollouts for row in step)
    assert {row["environment/turns"] for row in whole.metrics} == {3.0}


def no_tools() -> ToolFormat:
    raise AssertionError("these conversations have no tools")


@pytest.fixture(scope="module")
def converse(copy_engine: VllmEngine, tiny: Path, tmp_path_factory) -> Callable[..., list]:
    """Return a function that generates conversations with the tiny policy on real vLLM."""
    tokenizer = load_tokenizer(str(tiny / "policy"))

    sync_weights(copy_engine, policy_tensors(tiny))

    def generate(source: str, num_prompts: int, config: RolloutConfig, **settings) -> list:
        name = write(tmp_path_factory.mktemp("environment"), source)
        environment = EnvironmentConfig(name=name, **settings)
        encoder = TurnEncoder(tokenizer, PromptsConfig(), Template(), make_tool_format=no_tools)
        prompts = [Prompt(prompt_id=i, text="3+4=", token_ids=[5, 12, 6, 13], answer="7") for i in range(num_prompts)]
        with EnvironmentPool(name, timeout_s=60.0, num_workers=1) as pool:
            environments = Environments(pool=pool, encoder=encoder, config=environment)
            return collect_conversations(
                prompts, copy_engine, environments, config, stop_token_ids=[0], run_seed=1, step=1
            )

    return generate


CONFIG = RolloutConfig(temperature=0.0, group_size=1, max_response_tokens=16, stop_strings=["<eos>"])


def test_the_tokens_of_three_turns_are_those_of_a_transcript_made_by_hand(converse, copy_engine, tiny):
    tokenizer = load_tokenizer(str(tiny / "policy"))
    (rollout,) = converse(THREE_TURNS, 1, CONFIG, max_turn_tokens=3)
    transcript = [5, 12, 6, 13]
    for said in ("+1=", "+2=", None):
        sampling = Sampling(temperature=0.0, max_tokens=3, stop_token_ids=(0,))
        (turn,) = copy_engine.generate([transcript], sampling, None)
        transcript += turn.token_ids
        transcript += tokenizer(said)["input_ids"] if said else []
    assert rollout.response_ids == transcript[4:]


def test_a_conversation_goes_on_at_once_when_its_environment_answers(converse, copy_engine, monkeypatch):
    """64 environments answer after 0 to 500 ms; no conversation waits for another one."""
    answered, waits = {}, []
    take, submit = loop._Loop._take, loop._Loop._submit

    def timed_take(self, answer):
        answered[answer.key] = time.monotonic()
        take(self, answer)

    def timed_submit(self):
        keys = [self._requests[request.number] for request in self._ready]
        submit(self)
        waits.extend(time.monotonic() - answered[key] for key in keys)

    monkeypatch.setattr(loop._Loop, "_take", timed_take)
    monkeypatch.setattr(loop._Loop, "_submit", timed_submit)
    config = replace(CONFIG, temperature=1.0, stop_strings=[])
    start = time.monotonic()
    rollouts = converse(SLEEPS, 64, config, max_turn_tokens=4)
    assert {rollout.counts["environment/turns"] for rollout in rollouts} == {3}
    assert len(waits) == 3 * 64
    sampling = Sampling(temperature=1.0, max_tokens=16, stop_token_ids=())
    before = time.monotonic()
    copy_engine.generate([[5, 12, 6, 13]] * 64, sampling, list(range(64)))
    decode_step_s = (time.monotonic() - before) / 16
    # In rounds, half of the conversations would wait for more than 200 ms. A few may wait for the cores of the machine.
    assert sorted(waits)[len(waits) // 2] < decode_step_s + 0.02, (waits, decode_step_s)
    assert before - start < 30


def test_engine_and_trainer_agree_on_the_sampled_tokens_of_every_turn(make_config, lent_engine, train_here, tmp_path):
    config = make_config(
        tmp_path,
        run={"num_steps": 1},
        environment={"name": write(tmp_path, THREE_TURNS), "max_turn_tokens": 2},
        rollout={
            "engine": "vllm",
            "stop_strings": ["<eos>"],
            "rollout_batch_size": 4,
            "group_size": 2,
            "max_response_tokens": 12,
        },
        update={"mini_batch_size": 4, "micro_batch_tokens": 48},
        sync={"mode": "copy"},
    )
    (row,) = train_here(config).metrics
    assert row["environment/turns"] == 3 and 0 < row["environment/sampled_share"] < 1
    assert row["rollout/logprob_gap"] < 1e-4


@pytest.mark.slow
def test_one_engine_over_two_ranks_has_the_conversations_of_an_engine_on_one(
    make_config, lent_engine, train_here, launch, read_run, tmp_path
):
    """Three prompts, so that one rank has two of them; the environments of the first rank answer both."""

    def config(size: int):
        (tmp_path / str(size)).mkdir()
        return make_config(
            tmp_path / str(size),
            reward={"functions": []},
            environment={"name": write(tmp_path, THREE_TURNS), "max_turn_tokens": 3},
            rollout={
                "engine": "vllm",
                "tensor_parallel_size": size,
                "rollout_batch_size": 3,
                "group_size": 2,
                "max_response_tokens": 20,
            },
            update={"mini_batch_size": 6, "micro_batch_tokens": 48},
            sync={"mode": "copy"},
        )

    one, two = config(1), config(2)
    ended = launch(two, "--num_processes", "2")
    assert ended.code == 0, ended.output
    assert not ended.survivors
    expected, found = train_here(one), read_run(two)
    for rows, wanted in zip(found.rollouts, expected.rollouts, strict=True):
        assert [(row["prompt_id"], row["turns"]) for row in rows] == [
            (row["prompt_id"], row["turns"]) for row in wanted
        ]
    for row, wanted in zip(found.metrics, expected.metrics, strict=True):
        assert row["environment/turns"] == 3 and row["rollout/logprob_gap"] < 1e-4
        shown = without(row, "environment/seconds")
        assert shown == pytest.approx(without(wanted, "environment/seconds"), rel=1e-3, abs=1e-5)
