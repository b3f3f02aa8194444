"""Packed and padded models compute for each sequence what they compute for it alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.config import ConfigError, ModelsConfig
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.packed import packed_inputs
from tests.conftest import make_rollout, sync_weights
from tests.models.families import (
    CPU,
    FAMILIES,
    PAD,
    PADDED,
    groupings,
    logprobs_alone,
    padded_batch,
    padded_logprobs,
    run_actor,
    save_random,
)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_logprobs_and_entropies_equal_padded_ones(policy, batch, side, temperature):
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    expected = padded_logprobs(policy, batch, side, temperature)
    assert expected[0].min() < -4.5  # uniform log-probs would be -3.7
    for name, groups in groupings(batch).items():
        found = torch.zeros_like(expected[0]), torch.zeros_like(expected[1])
        for rows in groups:
            packed = pack(batch, rows, CPU)
            for result, values in zip(found, run_actor(actor, packed, temperature), strict=True):
                packed.scatter(values, result)
        for result, oracle in zip(found, expected, strict=True):
            torch.testing.assert_close(result, oracle, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@torch.no_grad()
def test_packed_values_and_scores_equal_padded_ones(classifier, batch):
    model = load_value_model(str(classifier), ModelsConfig(), CPU, field="models.critic")
    oracle = AutoModelForSequenceClassification.from_pretrained(classifier, num_labels=1).eval()
    oracle.config.pad_token_id = PAD  # else it would read the token before an EOS at the end
    inputs = padded_batch(batch, "right")
    del inputs["starts"]
    expected_scores = oracle(**inputs).logits[:, 0]
    hidden = oracle.base_model(**inputs).last_hidden_state
    table = oracle.score(hidden)[..., 0]
    assert expected_scores.std() > 0.1
    for groups in groupings(batch).values():
        for rows in groups:
            packed = pack(batch, rows, CPU)
            scores = model(**packed_inputs(packed), index=packed.last_index)
            torch.testing.assert_close(scores, expected_scores[rows], atol=1e-5, rtol=0)
            values = model(**packed_inputs(packed), index=packed.response_index)
            places = batch.prompt_lengths[packed.token_rows] - 1 + packed.token_columns
            torch.testing.assert_close(values, table[packed.token_rows, places], atol=1e-5, rtol=0)


def test_gradients_of_packed_sequences_are_the_sum_of_those_alone(policy, batch):
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    packed = pack(batch, [4, 0, 5, 1, 3, 2], CPU)
    run_actor(actor, packed, 0.7)[0].sum().backward()
    oracle = AutoModelForCausalLM.from_pretrained(policy)
    for row, sequence in enumerate(batch.sequences):
        table = (oracle(sequence[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        table.gather(-1, sequence[1:, None])[batch.prompt_lengths[row] - 1 :].sum().backward()
    for (name, ours), theirs in zip(actor.model.named_parameters(), oracle.parameters(), strict=True):
        expected = theirs.grad if theirs.grad is not None else torch.zeros_like(theirs)
        scale = max(float(expected.abs().max()), 0.1)  # the gradient of a key's bias is 0 except for rounding
        torch.testing.assert_close(ours.grad / scale, expected / scale, atol=2e-5, rtol=0, msg=name)


@torch.no_grad()
def test_a_sequence_does_not_attend_to_its_neighbours(policy, batch):
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    packed = pack(batch, [0, 1, 3], CPU)
    before, _ = run_actor(actor, packed, 1.0)
    packed.input_ids[0, :9] = torch.arange(9) + 3  # replaces the first sequence
    after, _ = run_actor(actor, packed, 1.0)
    is_first = packed.token_rows == 0
    assert (before[is_first] - after[is_first]).abs().max() > 1e-2
    torch.testing.assert_close(before[~is_first], after[~is_first], atol=1e-5, rtol=0)


def test_bfloat16_models_return_float32(policy, classifier, batch):
    config = ModelsConfig(dtype="bfloat16")
    packed = pack(batch, [0, 3], CPU)
    actor = load_actor(str(policy), config, CPU)
    assert {p.dtype for p in actor.parameters()} == {torch.bfloat16}
    assert [x.dtype for x in run_actor(actor, packed, 1.0)] == [torch.float32] * 2
    critic = load_value_model(str(classifier), config, CPU, field="models.critic")
    assert critic(**packed_inputs(packed), index=packed.last_index).dtype == torch.float32


@torch.no_grad()
def test_every_family_computes_packed_what_it_computes_alone(family, batch):
    name, folder = family
    actor = load_actor(str(folder), ModelsConfig(), CPU)
    assert actor.is_padded == (name in PADDED)
    # Falcon's eager attention rounds its ALiBi to bfloat16; transformers' other implementations ignore Gemma 2's cap.
    expected = logprobs_alone(folder, batch, 0.6, "sdpa" if name == "falcon-alibi" else "eager")
    assert torch.cat(expected).std() > 0.2
    for groups in groupings(batch).values():
        for rows in groups:
            found, _ = run_actor(actor, pack(batch, rows, CPU), 0.6)
            torch.testing.assert_close(found, torch.cat([expected[r] for r in rows]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gemma2", "granite", "bloom"])
def test_gradients_of_capped_scaled_and_padded_models(tiny, tmp_path, batch, name):
    folder = save_random(AutoModelForCausalLM, (FAMILIES | PADDED)[name](), tmp_path, tiny / "policy")
    actor = load_actor(str(folder), ModelsConfig(), CPU)
    run_actor(actor, pack(batch, [4, 0, 5, 1, 3, 2], CPU), 0.7)[0].sum().backward()
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for row, sequence in enumerate(batch.sequences):
        table = (oracle(sequence[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        table.gather(-1, sequence[1:, None])[batch.prompt_lengths[row] - 1 :].sum().backward()
    for (parameter, ours), theirs in zip(actor.model.named_parameters(), oracle.parameters(), strict=True):
        scale = max(float(theirs.grad.abs().max()), 0.1)
        torch.testing.assert_close(ours.grad / scale, theirs.grad / scale, atol=2e-5, rtol=0, msg=parameter)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "bloom", "falcon-h1"])
def test_values_of_other_families_equal_those_alone(tiny, tmp_path, batch, name):
    config = (FAMILIES | PADDED)[name](num_labels=1)
    if name == "falcon-h1":  # transformers has no classifier of it
        config.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=r"models.critic = .*: transformers has no sequence classifier .* falc"):
            load_value_model(str(tmp_path), ModelsConfig(), CPU, field="models.critic")
        return
    folder = save_random(AutoModelForSequenceClassification, config, tmp_path, tiny / "policy")
    model = load_value_model(str(folder), ModelsConfig(), CPU, field="models.critic")
    oracle = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, attn_implementation="eager")
    expected = torch.stack([oracle.score(oracle.base_model(s[None])[0])[0, -1, 0] for s in batch.sequences])
    assert expected.std() > 0.1
    rows = [4, 0, 5, 1, 3, 2]
    packed = pack(batch, rows, CPU)
    scores = model(**packed_inputs(packed), index=packed.last_index)
    torch.testing.assert_close(scores, expected[rows], atol=1e-5, rtol=0)


def test_attention_per_sequence_needs_varlen_and_packing(tiny):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    assert not actor.uses_varlen  # SDPA, with a mask over every pair of tokens
    actor.model.config._attn_implementation = "varlen"
    assert actor.uses_varlen
    actor.is_padded = True
    assert not actor.uses_varlen


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "cohere", "bloom"])
def test_the_hugging_face_engine_has_the_same_logprobs(tiny, tmp_path, name):
    """Gemma 2's soft caps, Cohere's logit scale and BLOOM's ALiBi apply to both."""
    folder = save_random(AutoModelForCausalLM, (FAMILIES | PADDED)[name](), tmp_path, tiny / "policy")
    actor = load_actor(str(folder), ModelsConfig(), CPU)
    engine = HuggingFaceEngine(str(folder), dtype=torch.float32, device=CPU)
    sync_weights(engine, dict(actor.model.named_parameters()))
    sampling = Sampling(temperature=0.7, max_tokens=12, stop_token_ids=())
    prompts = [[5, 9, 3], [7]]
    rollouts = [
        make_rollout(prompts[i], generation.token_ids, prompt_id=i, rollout_logprobs=generation.logprobs)
        for i, generation in enumerate(engine.generate(prompts, sampling, [1, 2]))
    ]
    sampled = make_train_batch(rollouts)
    packed = pack(sampled, [1, 0], CPU)
    found, _ = run_actor(actor, packed, 0.7)
    torch.testing.assert_close(found, packed.gather(sampled.rollout_logprobs), atol=1e-5, rtol=0)
