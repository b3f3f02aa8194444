"""HuggingFaceEngine generates the responses of transformers, with the weights of the last weight sync."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl.engines import Sampling
from hybrid_rl.engines.huggingface import HuggingFaceEngine, nucleus
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.weights.checksum import checksum
from tests.conftest import sync_weights

CPU = torch.device("cpu")
PROMPTS = [[2, 12, 3, 13], [4], [4, 12, 4, 13], [7, 7, 7, 7, 7, 7], [9]]
SAMPLED = Sampling(temperature=1.3, max_tokens=8, stop_token_ids=(0, 5))


@pytest.fixture(scope="module")
def model(tiny: Path):
    return AutoModelForCausalLM.from_pretrained(tiny / "policy").eval()


@pytest.fixture
def engine(tiny: Path, model) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(str(tiny / "policy"), dtype=torch.float32, device=CPU)
    sync_weights(engine, {name: p.detach() for name, p in model.named_parameters()})
    return engine


def test_greedy_decoding_equals_that_of_transformers(engine, model):
    stops = [0, 5, 20]
    found = engine.generate(PROMPTS, Sampling(temperature=0.0, max_tokens=10, stop_token_ids=tuple(stops)), None)
    for prompt, generation in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, eos_token_id=stops
        )
        assert generation.token_ids == output[0, len(prompt) :].tolist()
        assert generation.is_truncated == (generation.token_ids[-1] not in stops)
        assert generation.logprobs == []


def test_seeded_sampling_is_repeatable_and_independent_of_the_batch(engine):
    seeds = [11, 12, 13, 14, 15]
    together = engine.generate(PROMPTS, SAMPLED, seeds)
    assert engine.generate(PROMPTS, SAMPLED, seeds) == together
    order = [3, 0, 4]
    fewer = engine.generate([PROMPTS[i] for i in order], SAMPLED, [seeds[i] for i in order])
    assert [g.token_ids for g in fewer] == [together[i].token_ids for i in order]
    alone = [engine.generate([p], SAMPLED, [seed])[0].token_ids for p, seed in zip(PROMPTS, seeds, strict=True)]
    assert alone == [g.token_ids for g in together]
    assert [g.token_ids for g in engine.generate(PROMPTS, SAMPLED, [s + 50 for s in seeds])] != alone
    same_prompt = engine.generate([PROMPTS[0]] * 6, SAMPLED, list(range(6)))
    assert len({tuple(g.token_ids) for g in same_prompt}) > 1


def test_the_own_generator_follows_its_seed(engine):
    def draw(seed: int) -> list[list[int]]:
        engine.seed(seed)
        return [g.token_ids for g in engine.generate(PROMPTS, SAMPLED, None)]

    assert draw(1) == draw(1) != draw(2)


@torch.no_grad()
def test_logprobs_belong_to_the_distribution_that_is_sampled_from(engine, model):
    for prompt, generation in zip(PROMPTS, engine.generate(PROMPTS, SAMPLED, [1, 2, 3, 4, 5]), strict=True):
        ids = torch.tensor([prompt + generation.token_ids])
        table = (model(ids).logits[0, len(prompt) - 1 : -1] / 1.3).log_softmax(-1)
        expected = table.gather(-1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        assert generation.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_stop_token_ends_the_response_and_is_kept(engine):
    prompts = [PROMPTS[i % 5] for i in range(40)]
    ends = [g.token_ids for g in engine.generate(prompts, SAMPLED, list(range(40)))]
    assert {ids[-1] for ids in ends if len(ids) < 8} == {0, 5}
    assert not any({0, 5} & set(ids[:-1]) for ids in ends)
    assert any(len(ids) == 8 for ids in ends)
    unstopped = Sampling(temperature=1.3, max_tokens=8, stop_token_ids=())
    assert all(len(g.token_ids) == 8 and g.is_truncated for g in engine.generate(prompts, unstopped, list(range(40))))


def test_a_response_that_stops_at_the_limit_is_not_truncated(engine):
    prompts, one = [PROMPTS[1]] * 60, Sampling(temperature=1.3, max_tokens=1, stop_token_ids=tuple(range(19)))
    generations = engine.generate(prompts, one, list(range(60)))
    assert {g.is_truncated for g in generations} == {True, False}
    assert all(g.is_truncated == (g.token_ids[0] >= 19) for g in generations)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(engine, tiny, temperature):
    """Responses equal those without stop strings, up to the first stop string, which may be a special token."""
    tokenizer = load_tokenizer(str(tiny / "policy"))
    prompts, seeds = [PROMPTS[i % 5] for i in range(30)], list(range(30))
    free = Sampling(temperature=temperature, max_tokens=12, stop_token_ids=())
    whole = engine.generate(prompts, free, seeds)
    strings = (tokenizer.decode(whole[0].token_ids[3:5]), tokenizer.decode(whole[1].token_ids[5:8]), "<eos>")
    found = engine.generate(prompts, replace(free, stop_strings=strings), seeds)
    for generation, full in zip(found, whole, strict=True):
        ids = generation.token_ids
        assert ids == full.token_ids[: len(ids)] and generation.logprobs == full.logprobs[: len(generation.logprobs)]
        assert len(generation.logprobs) == (len(ids) if temperature else 0)
        is_stopped = any(string in tokenizer.decode(ids) for string in strings)
        assert not any(string in tokenizer.decode(ids[:-1]) for string in strings)
        assert generation.is_truncated == (not is_stopped) and (is_stopped or len(ids) == 12)
    assert {g.is_truncated for g in found} == {True, False}
    assert temperature == 0 or any(g.token_ids[-1] == 0 for g in found)


def test_a_stop_string_in_the_prompt_ends_nothing(engine, tiny):
    tokenizer = load_tokenizer(str(tiny / "policy"))
    sampling = Sampling(temperature=0.0, max_tokens=1, stop_token_ids=(), stop_strings=(tokenizer.decode(PROMPTS[0]),))
    assert engine.generate(PROMPTS[:1], sampling, None)[0].is_truncated


def test_no_prompts_give_no_generations(engine):
    assert engine.generate([], SAMPLED, []) == []


def test_generate_is_refused_without_the_trainers_weights(tiny, model):
    engine = HuggingFaceEngine(str(tiny / "policy"), dtype=torch.float32, device=CPU)
    with pytest.raises(RuntimeError, match="sync the trainer's first"):
        engine.generate(PROMPTS, SAMPLED, None)
    assert engine.weights_version == 0
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    sync_weights(engine, tensors)
    assert engine.weights_version == 1
    engine.unmap("kv_cache")
    engine.map("kv_cache")
    assert len(engine.generate(PROMPTS, SAMPLED, None)) == 5
    engine.unmap("weights")
    engine.map("weights")  # mapped again, without contents
    with pytest.raises(RuntimeError, match="sync the trainer's first"):
        engine.generate(PROMPTS, SAMPLED, None)
    sync_weights(engine, tensors)
    assert len(engine.generate(PROMPTS, SAMPLED, None)) == 5 and engine.weights_version == 2


def test_generate_is_refused_in_the_middle_of_a_sync(engine):
    engine.load_bucket(0)
    with pytest.raises(RuntimeError, match="sync the trainer's first"):
        engine.generate(PROMPTS, SAMPLED, None)


def test_the_engine_holds_the_weights_of_the_last_sync(engine, model):
    changed = copy.deepcopy(model).requires_grad_(False)
    changed.model.layers[0].mlp.up_proj.weight *= 2
    tensors = dict(changed.named_parameters())
    sync_weights(engine, tensors)
    (held,) = engine.checksums(list(tensors))
    assert {name: slices[0][1] for name, slices in held.items()} == {n: checksum(t) for n, t in tensors.items()}


def test_a_tensor_without_a_parameter_is_named(engine, model):
    with pytest.raises(RuntimeError, match=r"takes these trainer tensors: base_layer\.weight"):
        sync_weights(engine, {"base_layer.weight": torch.ones(3)})


@pytest.mark.parametrize(
    "top_p, kept",
    [
        (0.3, [0, 1, 0, 0]),  # at least the likeliest
        (0.5, [0, 1, 0, 0]),
        (0.51, [0, 1, 1, 0]),
        (0.8, [0, 1, 1, 0]),
        (0.81, [1, 1, 1, 0]),
        (1.0, [1, 1, 1, 1]),
    ],
)
def test_a_nucleus_is_the_fewest_likeliest_tokens_that_reach_top_p(top_p, kept):
    probabilities = torch.tensor([[0.15, 0.5, 0.3, 0.05]])
    mask = torch.tensor([kept])
    found = nucleus(probabilities.double().log(), top_p).exp()
    expected = probabilities * mask / (probabilities * mask).sum()
    torch.testing.assert_close(found, expected.double(), atol=1e-6, rtol=0)


def test_sampling_from_a_nucleus_takes_no_other_tokens(engine, model):
    prompt, draws = PROMPTS[0], 200
    probabilities = (model(torch.tensor([prompt])).logits[0, -1] / 1.3).softmax(-1)
    order = probabilities.argsort(descending=True)
    number = int((probabilities[order].cumsum(0) < 0.4).sum()) + 1
    allowed = set(order[:number].tolist())
    assert 1 < number < 20
    one = replace(SAMPLED, max_tokens=1, top_p=0.4)
    found = [g.token_ids[0] for g in engine.generate([prompt] * draws, one, list(range(draws)))]
    assert set(found) == allowed
    everything = engine.generate([prompt] * draws, replace(one, top_p=1.0), list(range(draws)))
    assert not {g.token_ids[0] for g in everything} <= allowed


def test_a_nucleus_of_one_token_is_greedy_decoding(engine):
    greedy = engine.generate(PROMPTS, Sampling(temperature=0.0, max_tokens=8, stop_token_ids=(0, 5)), None)
    narrow = engine.generate(PROMPTS, replace(SAMPLED, top_p=1e-6), [1, 2, 3, 4, 5])
    assert [g.token_ids for g in narrow] == [g.token_ids for g in greedy]
