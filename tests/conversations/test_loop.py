"""Conversations with real environment processes: tokens, limits, failures, and equality with single responses."""

import os
import signal
import time
from dataclasses import replace

import pytest

from hybrid_rl.config import ConfigError, RolloutConfig
from hybrid_rl.conversations.loop import collect_conversations
from hybrid_rl.steps.rollout import collect_rollouts

CONFIG = RolloutConfig(engine="hf", group_size=2, max_response_tokens=40)
THREE_TURNS = """
class E:
    def reset(self, row):
        self.turn = 0

    def step(self, response):
        self.turn += 1
        return f"+{self.turn}=", self.turn / 8, self.turn == 3, {"length": len(response)}
"""
ONE_TURN = """
class E:
    async def reset(self, row):
        return None

    async def step(self, response):
        return "", 0.0, True, {}
"""


def collect(prompts, engine, environments, config=CONFIG, **options):
    return collect_conversations(
        prompts, engine, environments, config, stop_token_ids=[0], run_seed=5, step=4, **options
    )


def test_what_the_engine_sampled_and_the_environment_said_stands_in_order(hf_engine, tokenizer, text_prompts, start):
    environments = start(THREE_TURNS, max_turn_tokens=5)
    found = collect(text_prompts, hf_engine, environments)
    assert [r.sequence_id for r in found] == [0, 1, 2, 3, 4, 5]
    for rollout in found:
        assert [turn.role for turn in rollout.turns] == ["assistant", "user", "assistant", "user", "assistant"]
        position, before = 0, list(rollout.prompt.token_ids)
        for turn, said in zip(rollout.turns, ["", "+1=", "", "+2=", ""], strict=True):
            ids = rollout.response_ids[position : position + turn.num_tokens]
            if not turn.is_sampled:
                assert ids == tokenizer(said)["input_ids"] and turn.text == said
            else:  # greedy decoding of the same tokens from the transcript gives them their log-probs again
                assert 1 <= len(ids) <= 5
            before += ids
            position += turn.num_tokens
        assert position == len(rollout.response_ids)
        assert [turn.reward for turn in rollout.turns if turn.is_sampled] == [1 / 8, 2 / 8, 3 / 8]
        assert len(rollout.rollout_logprobs) == rollout.num_sampled
        assert rollout.counts["environment/turns"] == 3 and not rollout.is_truncated
        assert rollout.counts["environment/info/length"] == len(rollout.turns[-1].text)


def test_each_turn_is_sampled_from_the_whole_transcript(hf_engine, text_prompts, start):
    """Asked for the transcript before a turn, with the turn's seed, the engine samples the same tokens."""
    environments = start(THREE_TURNS, max_turn_tokens=5)
    (rollout, *_) = collect(text_prompts[:1], hf_engine, environments, replace(CONFIG, temperature=0.0))
    assert rollout.rollout_logprobs == []
    position = 0
    for turn in rollout.turns:
        if turn.is_sampled:
            before = [*rollout.prompt.token_ids, *rollout.response_ids[:position]]
            prompt = replace(rollout.prompt, token_ids=before)
            config = replace(CONFIG, group_size=1, temperature=0.01, max_response_tokens=5)
            (again,) = collect_rollouts(
                [prompt], hf_engine, environments.encoder._tokenizer, config, stop_token_ids=[0], run_seed=0, step=0
            )
            assert again.response_ids == rollout.response_ids[position : position + turn.num_tokens]
        position += turn.num_tokens


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_conversations_of_one_turn_are_the_responses_without_environments(
    hf_engine, tokenizer, text_prompts, start, temperature
):
    config = replace(CONFIG, temperature=temperature, max_response_tokens=12)
    found = collect(text_prompts, hf_engine, start(ONE_TURN), config)
    if temperature:
        expected = collect_rollouts(text_prompts, hf_engine, tokenizer, config, stop_token_ids=[0], run_seed=5, step=4)
        assert [r.rollout_logprobs for r in found] == [r.rollout_logprobs for r in expected]
    else:
        ids = hf_engine.generate([p.token_ids for p in text_prompts for _ in range(2)], _greedy(12), None)
        assert [r.response_ids for r in found] == [g.token_ids for g in ids]
        return
    assert [replace(r, turns=[], counts={}) for r in found] == expected


def _greedy(max_tokens):
    from hybrid_rl.engines import Sampling

    return Sampling(temperature=0.0, max_tokens=max_tokens, stop_token_ids=(0,))


def test_the_limits_of_a_conversation(hf_engine, text_prompts, start):
    forever = THREE_TURNS.replace("self.turn == 3", "False")
    two = collect(text_prompts[:1], hf_engine, start(forever, max_turns=2, max_turn_tokens=3))
    for rollout in two:
        assert rollout.counts["environment/turns"] == 2 and rollout.turns[-1].is_sampled
        assert rollout.counts["environment/truncated_by_turns"] == 1 and not rollout.is_truncated
        assert [turn.reward for turn in rollout.turns if turn.is_sampled] == [1 / 8, 2 / 8]
    config = replace(CONFIG, max_response_tokens=14)
    for rollout in collect(text_prompts[:1], hf_engine, start(forever, max_turns=50, max_turn_tokens=4), config):
        assert len(rollout.response_ids) <= 14 and rollout.turns[-1].is_sampled
        assert rollout.is_truncated and rollout.counts["environment/truncated_by_tokens"] == 1


@pytest.mark.parametrize("limit", [None, 1])
def test_a_group_meets_the_same_environment(hf_engine, text_prompts, start, limit):
    said = "class E:\n    def reset(self, row):\n        return '1' * (1 + row['seed'] % 30)\n" + (
        "    def step(self, response):\n        return '', float(len(response)), True, {}\n"
    )
    environments = start(said, max_concurrent=limit)
    prompts = [r.prompt.text for r in collect(text_prompts, hf_engine, environments)]
    assert prompts[0::2] == prompts[1::2] and len(set(prompts)) > 1
    assert [r.prompt.text for r in collect(text_prompts, hf_engine, environments)] == prompts
    assert environments.pool.process_ids and len(environments.pool.process_ids) == 1


FAILS_IN_TURN_2 = """
class E:
    def reset(self, row):
        self.row, self.turn = row, 0

    def step(self, response):
        self.turn += 1
        if self.turn == 2 and self.row["answer"] == "1":
            raise LookupError("no such room")
        return "2", 0.5, self.turn == 2, {}
"""


def test_a_failing_environment_ends_the_run_or_its_conversation(hf_engine, text_prompts, start):
    sentence = r"the environment of prompt 1 fails in turn 2: .*no such room.*environment.on_error = zero"
    with pytest.raises(ConfigError, match=sentence):
        collect(text_prompts, hf_engine, start(FAILS_IN_TURN_2, max_turn_tokens=4))
    found = collect(text_prompts, hf_engine, start(FAILS_IN_TURN_2, max_turn_tokens=4, on_error="zero"))
    assert [r.counts["environment/failed"] for r in found] == [0, 0, 1, 1, 0, 0]
    assert [sum(turn.reward for turn in r.turns) for r in found] == [1, 1, 0.5, 0.5, 1, 1]
    assert all(r.turns[-1].is_sampled for r in found)


DIES_ONCE = """
import os, pathlib, signal

class E:
    def __init__(self, folder):
        self.mark = pathlib.Path(folder, "died")

    def reset(self, row):
        self.row, self.turn = row, 0

    def step(self, response):
        self.turn += 1
        if self.turn == 2 and self.row["answer"] == "1" and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "2", 0.5, self.turn == 2, {}
"""


def test_conversations_whose_process_is_killed_start_again_and_are_counted(hf_engine, text_prompts, start, tmp_path):
    environments = start(DIES_ONCE, max_turn_tokens=4, arguments={"folder": str(tmp_path)})
    found = collect(text_prompts, hf_engine, environments)
    restarts = [r.counts["environment/restarts"] for r in found]
    assert set(restarts) == {0, 1} or set(restarts) == {1}
    (tmp_path / "died").touch()
    undisturbed = collect(text_prompts, hf_engine, environments)
    assert [r.response_ids for r in undisturbed] == [r.response_ids for r in found]
    assert environments.pool.num_lost_processes == 1


def test_an_environment_that_always_dies_is_given_up(hf_engine, text_prompts, start):
    source = f"import os\nclass E:\n    def reset(self, row):\n        os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    source += "    def step(self, response):\n        return '', 0.0, True, {}\n"
    environments = start(source, max_restarts=1, on_error="zero")
    found = collect(text_prompts[:1], hf_engine, environments)
    assert [r.counts["environment/failed"] for r in found] == [1, 1] and [r.response_ids for r in found] == [[], []]
    assert os.getpid() not in environments.pool.process_ids


HANGS = """
import asyncio, time

class E:
    async def reset(self, row):
        self.row = row

    async def step(self, response):
        if self.row["answer"] == "1":
            await asyncio.sleep(600)
        return "", 1.0, True, {}
"""
BLOCKS = HANGS.replace("async def", "def").replace("await asyncio.sleep", "time.sleep")


@pytest.mark.parametrize("source, restarts", [(HANGS, 0), (BLOCKS, 1)])
def test_a_hung_environment_costs_its_limit_and_nothing_else(hf_engine, text_prompts, start, source, restarts):
    """Others of a process that is killed start again; asynchronous ones go on."""
    environments = start(source, timeout_s=1.0, on_error="zero")
    begin = time.monotonic()
    found = collect(text_prompts, hf_engine, environments, replace(CONFIG, group_size=1))
    assert time.monotonic() - begin < 25
    assert [r.counts["environment/failed"] for r in found] == [0, 1, 0]
    assert [sum(turn.reward for turn in r.turns) for r in found] == [1, 0, 1]
    assert max(r.counts["environment/restarts"] for r in found) == restarts
