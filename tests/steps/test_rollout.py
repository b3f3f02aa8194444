"""Seeds of requests, and rollouts of transformers' generation."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import Prompt
from hybrid_rl.config import ModelsConfig, RolloutConfig
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.steps.rollout import collect_rollouts, generate_greedy, request_seed
from tests.conftest import sync_weights

CPU = torch.device("cpu")
CONFIG = RolloutConfig(engine="hf", group_size=3, max_response_tokens=6)


@pytest.fixture(scope="module")
def engine(tiny: Path) -> HuggingFaceEngine:
    """An engine that has received the weights of the tiny policy."""
    engine = HuggingFaceEngine(str(tiny / "policy"), dtype=torch.float32, device=CPU)
    tensors = {n: p.detach() for n, p in load_actor(str(tiny / "policy"), ModelsConfig(), CPU).model.named_parameters()}
    sync_weights(engine, tensors)
    return engine


@pytest.fixture(scope="module")
def tokenizer(tiny: Path):
    return load_tokenizer(str(tiny / "policy"))


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[Prompt]:
    texts = ["3+4=", "1+1=", "12+3=", "a", "9+9="]
    return [Prompt(prompt_id=10 + i, text=text, token_ids=tokenizer(text)["input_ids"]) for i, text in enumerate(texts)]


def collect(prompts, engine, tokenizer, *, config=CONFIG, step=4):
    return collect_rollouts(prompts, engine, tokenizer, config, stop_token_ids=[0], run_seed=5, step=step)


def test_request_seeds_are_distinct_repeatable_and_fit():
    places = [(run, step, i) for run in (0, 1) for step in (1, 2, 11, 12) for i in range(500)]
    seeds = {place: request_seed(*place) for place in places}
    assert len(set(seeds.values())) == len(places)
    assert all(0 <= seed < 2**32 for seed in seeds.values())
    assert seeds == {place: request_seed(*place) for place in places}
    assert request_seed(1, 1, 12) != request_seed(1, 11, 2) != request_seed(11, 1, 2)


@pytest.mark.parametrize("greedy", [False, True])
def test_stop_strings_of_the_settings_end_responses_and_stay_in_their_text(engine, tokenizer, prompts, greedy):
    def generate(config):
        if greedy:
            return generate_greedy(prompts, engine, tokenizer, config, stop_token_ids=[0])
        return collect(prompts, engine, tokenizer, config=config)

    free = generate(CONFIG)
    string = free[0].text[:3]  # two characters and the space that the tokenizer puts between them
    stopped = generate(replace(CONFIG, stop_strings=[string]))
    assert stopped[0].text == string and stopped[0].response_ids == free[0].response_ids[:2]
    for before, after in zip(free, stopped, strict=True):
        assert after == before if string not in before.text else after.text.endswith(string) and not after.is_truncated


def test_rollouts_are_grouped_and_numbered(engine, tokenizer, prompts):
    rollouts = collect(prompts, engine, tokenizer)
    assert [r.prompt.prompt_id for r in rollouts] == [p.prompt_id for p in prompts for _ in range(3)]
    assert [r.sequence_id for r in rollouts] == list(range(30, 45))
    assert [r.prompt for r in rollouts[::3]] == prompts
    for rollout in rollouts:
        assert 1 <= len(rollout.response_ids) <= 6
        assert len(rollout.rollout_logprobs) == len(rollout.response_ids)
        assert all(value <= 0 for value in rollout.rollout_logprobs)
        assert rollout.is_truncated == (rollout.response_ids[-1] != 0)
        assert 0 not in rollout.response_ids[:-1]  # nothing after the EOS, and the EOS is kept
        assert rollout.text == tokenizer.decode(rollout.response_ids, skip_special_tokens=True)
    assert any(len({tuple(r.response_ids) for r in rollouts[i : i + 3]}) > 1 for i in range(0, 15, 3))


def test_rollouts_do_not_depend_on_rank_or_batching(engine, tokenizer, prompts):
    together = {r.sequence_id: r for r in collect(prompts, engine, tokenizer)}
    ranks = [collect(prompts[rank::2], engine, tokenizer) for rank in range(2)]
    apart = {r.sequence_id: r for rollouts in ranks for r in rollouts}
    assert apart.keys() == together.keys()
    for i, rollout in together.items():
        assert apart[i].response_ids == rollout.response_ids
        assert apart[i].rollout_logprobs == pytest.approx(rollout.rollout_logprobs, abs=1e-5)


def test_every_step_samples_other_responses(engine, tokenizer, prompts):
    first, again, second = (collect(prompts, engine, tokenizer, step=step) for step in (1, 1, 2))
    assert [r.response_ids for r in first] == [r.response_ids for r in again]
    assert [r.response_ids for r in first] != [r.response_ids for r in second]


def test_samples_repeat_with_the_engines_own_generator(engine, tokenizer, prompts):
    config = RolloutConfig(engine="hf", group_size=2, max_response_tokens=6, seed_per_request=False)
    first, again, second = (collect(prompts, engine, tokenizer, config=config, step=step) for step in (1, 1, 2))
    assert [r.response_ids for r in first] == [r.response_ids for r in again]
    assert [r.response_ids for r in first] != [r.response_ids for r in second]


@pytest.mark.parametrize("seed_per_request", [True, False])
def test_no_prompts_give_no_rollouts(engine, tokenizer, seed_per_request):
    config = RolloutConfig(engine="hf", seed_per_request=seed_per_request)
    assert collect([], engine, tokenizer, config=config) == []


def test_greedy_takes_one_response_each_without_logprobs(engine, tokenizer, prompts):
    first, again = (generate_greedy(prompts, engine, tokenizer, CONFIG, stop_token_ids=[0]) for _ in range(2))
    assert first == again
    assert [r.prompt for r in first] == prompts
    assert [r.sequence_id for r in first] == [p.prompt_id for p in prompts]
    assert all(r.rollout_logprobs == [] for r in first)
    alone = [generate_greedy([p], engine, tokenizer, CONFIG, stop_token_ids=[0])[0] for p in prompts]
    assert [r.response_ids for r in alone] == [r.response_ids for r in first]
