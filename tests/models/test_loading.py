"""Packed, padded and alone give the same numbers, for every family of models; what cannot be right is refused."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hybrid_rl.batch import Packed, Prompt, Rollout, TrainBatch, make_train_batch, pack, split
from hybrid_rl.config import (
    AdvantageConfig,
    Config,
    ConfigError,
    LoraConfig,
    ModelsConfig,
    PromptsConfig,
    RolloutConfig,
    UpdateConfig,
)
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.models.checks import check_models
from hybrid_rl.models.heads import LogprobHead
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.packed import Actor, packed_inputs
from hybrid_rl.models.tokenizer import eos_token_ids, load_tokenizer
from hybrid_rl.weights.bucket import IpcBucket, bucket_bytes, plan_buckets

CPU = torch.device("cpu")
VOCABULARY = 40
PAD = 39  # for the oracle alone
IDS = {"vocab_size": VOCABULARY, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 1}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
CONFIGS: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": lambda **o: LlamaConfig(**IDS, **SIZES, intermediate_size=48, num_key_value_heads=1, **o),
    "qwen2": lambda **o: Qwen2Config(**IDS, **SIZES, intermediate_size=48, num_key_value_heads=1, **o),
    "gpt2": lambda **o: GPT2Config(**IDS, n_embd=32, n_layer=2, n_head=2, n_positions=64, **o),
    "opt": lambda **o: OPTConfig(**IDS, **SIZES, ffn_dim=48, word_embed_proj_dim=16, **o),
}
SMALL = {**IDS, **SIZES, "intermediate_size": 48, "num_key_value_heads": 1}
GEMMA = {**SMALL, "head_dim": 16, "sliding_window": 4}
CAPPED = {**GEMMA, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4}
# Windows are shorter than the sequences, caps and scales far from doing nothing.
FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "qwen3": lambda **o: Qwen3Config(**SMALL, head_dim=16, **o),
    "qwen3-moe": lambda **o: Qwen3MoeConfig(**SMALL, head_dim=16, **MOE, **o),
    "mistral": lambda **o: MistralConfig(**SMALL, sliding_window=4, **o),
    "gemma": lambda **o: GemmaConfig(**SMALL, head_dim=16, **o),
    "gemma2": lambda **o: Gemma2Config(**CAPPED, attn_logit_softcapping=1.0, **o),
    "gemma2-untied": lambda **o: Gemma2Config(**CAPPED, attn_logit_softcapping=1.0, tie_word_embeddings=False, **o),
    "gemma2-uncapped-attention": lambda **o: Gemma2Config(**CAPPED, attn_logit_softcapping=None, **o),
    "gemma3": lambda **o: Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"], **o),
    "gemma3-with-images": lambda **o: Gemma3Config(
        text_config={**GEMMA, "layer_types": ["sliding_attention", "full_attention"], "attention_dropout": 0.5, **o},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "image_size": 8},
        mm_tokens_per_image=4,
    ),
    "cohere": lambda **o: CohereConfig(**SMALL, logit_scale=0.25, **o),
    "granite": lambda **o: GraniteConfig(**SMALL, logits_scaling=4.0, embedding_multiplier=2.0, **o),
    "hyperclova": lambda **o: HyperCLOVAXConfig(**SMALL, logits_scaling=0.3, **o),
    "falcon": lambda **o: FalconConfig(**IDS, **SIZES, alibi=False, **o),
}
PADDED: dict[str, Callable[..., PretrainedConfig]] = {
    "bloom": lambda **o: BloomConfig(**IDS, hidden_size=32, n_layer=2, n_head=2, **o),
    "mpt": lambda **o: MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=2, max_seq_len=64, **o),
    "falcon-alibi": lambda **o: FalconConfig(**IDS, **SIZES, alibi=True, **o),
    "gpt-oss": lambda **o: GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, sliding_window=4, **o),
    "falcon-h1": lambda **o: FalconH1Config(**SMALL, **MAMBA, lm_head_multiplier=0.3, **o),
    "lfm2": lambda **o: Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], **o),
}
ARCHITECTURES = [(name, tied) for name in CONFIGS for tied in (True, False)]


def save_random(auto_class: type, config: PretrainedConfig, folder: Path, tokenizer_from: Path) -> Path:
    """Save a random model, biases and norms included, far enough from uniform for mistakes to show."""
    torch.manual_seed(3)
    model = auto_class.from_config(config)
    for parameter in model.parameters():
        scale = 6 if parameter.ndim >= 2 else 1
        parameter.data.mul_(scale).add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda a: f"{a[0]}-{'tied' if a[1] else 'untied'}")
def policy(request, tiny, tmp_path_factory) -> Path:
    name, tied = request.param
    config = CONFIGS[name](tie_word_embeddings=tied)
    return save_random(AutoModelForCausalLM, config, tmp_path_factory.mktemp(name), tiny / "policy")


@pytest.fixture(scope="module", params=list(CONFIGS))
def classifier(request, tiny, tmp_path_factory) -> Path:
    config = CONFIGS[request.param](num_labels=1)
    return save_random(
        AutoModelForSequenceClassification, config, tmp_path_factory.mktemp(request.param), tiny / "policy"
    )


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    """Sequences of 2 to 15 tokens; padding and EOS, both 0, occur in prompts and responses."""
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for i, (p, r) in enumerate([(3, 6), (9, 4), (1, 1), (5, 10), (2, 0), (4, 3)]):
        ids = torch.randint(0, VOCABULARY - 2, (p + r,), generator=generator).tolist()
        if i % 2:
            ids[-1] = 0
        rollouts.append(
            Rollout(
                prompt=Prompt(prompt_id=i, text="", token_ids=ids[:p]),
                sequence_id=i,
                response_ids=ids[p:],
                rollout_logprobs=[],
                is_truncated=False,
                text="",
            )
        )
    return make_train_batch(rollouts)


def groupings(batch: TrainBatch) -> dict[str, list[list[int]]]:
    return {
        "alone": [[row] for row in range(len(batch))],
        "together": [[4, 0, 5, 1, 3, 2]],
        "split": split(batch.sequence_lengths, 16),
    }


def padded_batch(batch: TrainBatch, side: str) -> dict[str, Tensor]:
    """Return the usual inputs of a transformers model, and `starts`, where each sequence begins."""
    width = max(batch.sequence_lengths)
    starts = [width - n if side == "left" else 0 for n in batch.sequence_lengths]
    ids, mask = torch.full((len(batch), width), PAD), torch.zeros(len(batch), width, dtype=torch.int64)
    for row, (sequence, start) in enumerate(zip(batch.sequences, starts, strict=True)):
        ids[row, start : start + len(sequence)] = sequence
        mask[row, start : start + len(sequence)] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "starts": torch.tensor(starts)}


@torch.no_grad()
def padded_oracle(folder: Path, batch: TrainBatch, side: str, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [B, T] from transformers' own logits of a padded batch."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = padded_batch(batch, side)
    starts = inputs.pop("starts")
    table = (model(**inputs).logits / temperature).log_softmax(-1)
    logprobs, entropy = torch.zeros(batch.response_mask.shape), torch.zeros(batch.response_mask.shape)
    for row, sequence in enumerate(batch.sequences):
        first = int(starts[row] + batch.prompt_lengths[row])
        targets = sequence[batch.prompt_lengths[row] :]
        rows = table[row, first - 1 : first - 1 + len(targets)]
        logprobs[row, : len(targets)] = rows.gather(-1, targets[:, None]).squeeze(-1)
        entropy[row, : len(targets)] = -(rows.exp() * rows).sum(-1)
    return logprobs, entropy


def run_actor(actor: Actor, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
    return actor(**packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=temperature)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("side", ["left", "right"])
def test_logprobs_packed_padded_and_alone(policy, batch, side, temperature):
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    expected = padded_oracle(policy, batch, side, temperature)
    assert expected[0].min() < -4.5  # nowhere near uniform, which is -3.7
    for name, groups in groupings(batch).items():
        found = torch.zeros_like(expected[0]), torch.zeros_like(expected[1])
        for rows in groups:
            packed = pack(batch, rows, CPU)
            for result, values in zip(found, run_actor(actor, packed, temperature), strict=True):
                packed.scatter(values, result)
        for result, oracle in zip(found, expected, strict=True):
            torch.testing.assert_close(result, oracle, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@torch.no_grad()
def test_values_and_scores_packed_padded_and_alone(classifier, batch):
    model = load_value_model(str(classifier), ModelsConfig(), CPU, field="models.critic")
    oracle = AutoModelForSequenceClassification.from_pretrained(classifier, num_labels=1).eval()
    oracle.config.pad_token_id = PAD  # else it takes an EOS at the end for padding, and reads the token before it
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


def test_gradient_is_that_of_the_padded_batch(policy, batch):
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    packed = pack(batch, [4, 0, 5, 1, 3, 2], CPU)
    run_actor(actor, packed, 0.7)[0].sum().backward()
    oracle = AutoModelForCausalLM.from_pretrained(policy)
    for row, sequence in enumerate(batch.sequences):
        table = (oracle(sequence[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        table.gather(-1, sequence[1:, None])[batch.prompt_lengths[row] - 1 :].sum().backward()
    for (name, ours), theirs in zip(actor.model.named_parameters(), oracle.parameters(), strict=True):
        expected = theirs.grad if theirs.grad is not None else torch.zeros_like(theirs)
        scale = max(float(expected.abs().max()), 0.1)  # that of a key's bias is 0 but for rounding
        torch.testing.assert_close(ours.grad / scale, expected / scale, atol=2e-5, rtol=0, msg=name)


@torch.no_grad()
def test_a_sequence_does_not_see_its_neighbours(policy, batch):
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    packed = pack(batch, [0, 1, 3], CPU)
    before, _ = run_actor(actor, packed, 1.0)
    packed.input_ids[0, :9] = torch.arange(9) + 3  # the first sequence is another one now
    after, _ = run_actor(actor, packed, 1.0)
    is_first = packed.token_rows == 0
    assert (before[is_first] - after[is_first]).abs().max() > 1e-2
    torch.testing.assert_close(before[~is_first], after[~is_first], atol=1e-5, rtol=0)


@torch.no_grad()
def test_head_without_targets_still_gives_logits(policy, batch):
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    assert isinstance(actor.model.get_output_embeddings(), LogprobHead)
    ids = batch.sequences[3][None]
    expected = AutoModelForCausalLM.from_pretrained(policy).eval()(ids).logits
    torch.testing.assert_close(actor.model(ids).logits, expected, atol=1e-5, rtol=0)


def test_wrapped_model_saves_what_was_loaded(policy, tmp_path):
    load_actor(str(policy), ModelsConfig(), CPU).model.save_pretrained(tmp_path)
    before, after = load_file(policy / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (policy, tmp_path)]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert configs[0]["tie_word_embeddings"] == configs[1]["tie_word_embeddings"]


def test_bfloat16_models_give_float32(policy, classifier, batch):
    config = ModelsConfig(dtype="bfloat16")
    packed = pack(batch, [0, 3], CPU)
    actor = load_actor(str(policy), config, CPU)
    assert {p.dtype for p in actor.parameters()} == {torch.bfloat16}
    assert [x.dtype for x in run_actor(actor, packed, 1.0)] == [torch.float32] * 2
    critic = load_value_model(str(classifier), config, CPU, field="models.critic")
    assert critic(**packed_inputs(packed), index=packed.last_index).dtype == torch.float32


def test_dropout_is_off_in_training_mode(policy, batch):
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    assert actor.model.training
    assert all(module.p == 0 for module in actor.modules() if isinstance(module, nn.Dropout))
    packed = pack(batch, [0, 1, 3], CPU)
    assert torch.equal(run_actor(actor, packed, 1.0)[0], run_actor(actor, packed, 1.0)[0])


@pytest.mark.parametrize("is_on", [False, True])
def test_gradient_checkpointing_runs_layers_twice_and_changes_nothing(tiny, batch, is_on):
    config = ModelsConfig(gradient_checkpointing=is_on)
    actor = load_actor(str(tiny / "policy"), config, CPU)
    calls = []
    actor.model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    packed = pack(batch, [2], CPU)
    run_actor(actor, packed, 1.0)[0].sum().backward()
    assert len(calls) == 1 + is_on
    plain = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    run_actor(plain, packed, 1.0)[0].sum().backward()
    for ours, theirs in zip(actor.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_critic_without_a_head_gets_zeros(policy, batch):
    critic = load_value_model(str(policy), ModelsConfig(), CPU, field="models.critic", new_head=True)
    assert not critic.model.score.weight.any()
    packed = pack(batch, [0, 1], CPU)
    assert critic(**packed_inputs(packed), index=packed.response_index).tolist() == [0] * 10
    actor = load_actor(str(policy), ModelsConfig(), CPU)
    assert torch.equal(critic.hidden(**packed_inputs(packed)), actor.hidden(**packed_inputs(packed)))


def test_critic_keeps_a_trained_head(classifier):
    kept = load_value_model(str(classifier), ModelsConfig(), CPU, field="models.critic", new_head=True)
    assert torch.equal(kept.model.score.weight, load_file(classifier / "model.safetensors")["score.weight"])


def test_reward_model_without_a_head_is_refused(policy):
    with pytest.raises(ConfigError, match=r"models.reward = .*: the folder holds no trained `score` head"):
        load_value_model(str(policy), ModelsConfig(), CPU, field="models.reward")


def test_reward_model_with_two_labels_is_refused(tiny, tmp_path):
    folder = save_random(AutoModelForSequenceClassification, CONFIGS["llama"](num_labels=2), tmp_path, tiny / "policy")
    with pytest.raises(ConfigError, match=r"models.reward = "):
        load_value_model(str(folder), ModelsConfig(), CPU, field="models.reward")


@pytest.fixture(scope="module", params=[*FAMILIES, *PADDED])
def family(request, tiny, tmp_path_factory) -> tuple[str, Path]:
    """Name and folder of one model more of each family that vLLM serves."""
    config = (FAMILIES | PADDED)[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, save_random(AutoModelForCausalLM, config, folder, tiny / "policy")


def one_by_one(folder: Path, batch: TrainBatch, temperature: float, implementation: str) -> list[Tensor]:
    """Return the log-probs of each sequence's response from transformers' own logits of that sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)
    rows = []
    for row, sequence in enumerate(batch.sequences):
        table = (model(sequence[None]).logits[0, :-1] / temperature).log_softmax(-1)
        rows.append(table.gather(-1, sequence[1:, None])[int(batch.prompt_lengths[row]) - 1 :, 0])
    return rows


@torch.no_grad()
def test_every_family_packed_is_alone(family, batch):
    name, folder = family
    actor = load_actor(str(folder), ModelsConfig(), CPU)
    assert actor.is_padded == (name in PADDED)
    # Falcon rounds its ALiBi in eager attention to bfloat16; transformers' other paths leave out Gemma 2's cap.
    expected = one_by_one(folder, batch, 0.6, "sdpa" if name == "falcon-alibi" else "eager")
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
def test_values_of_other_families_packed_are_alone(tiny, tmp_path, batch, name):
    config = (FAMILIES | PADDED)[name](num_labels=1)
    if name == "falcon-h1":  # which transformers gives no classifier
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


def test_a_pack_may_grow_where_no_mask_spans_it(tiny):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    assert not actor.uses_varlen  # SDPA, with a mask over every pair of tokens
    actor.model.config._attn_implementation = "varlen"
    assert actor.uses_varlen
    actor.is_padded = True
    assert not actor.uses_varlen


@torch.no_grad()
def test_every_family_loads_in_bfloat16(family, batch):
    """What is proved while loading tells rounding from a mistake: all are laid out as in float32."""
    name, folder = family
    actor = load_actor(str(folder), ModelsConfig(dtype="bfloat16"), CPU)
    assert actor.is_padded == (name in PADDED)
    exact = load_actor(str(folder), ModelsConfig(), CPU)
    packed = pack(batch, [4, 0, 5, 1, 3, 2], CPU)
    found, expected = (run_actor(model, packed, 1.0)[0] for model in (actor, exact))
    assert (found - expected).abs().mean() < 0.25 * expected.std()


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "cohere", "bloom"])
def test_the_oracle_engine_samples_by_the_same_logprobs(tiny, tmp_path, name):
    """Gemma 2's soft caps, Cohere's scale and BLOOM's ALiBi reach the sampled tokens' log-probs on both sides."""
    folder = save_random(AutoModelForCausalLM, (FAMILIES | PADDED)[name](), tmp_path, tiny / "policy")
    actor = load_actor(str(folder), ModelsConfig(), CPU)
    engine = HuggingFaceEngine(str(folder), dtype=torch.float32, device=CPU)
    plan = plan_buckets([(n, tuple(p.shape), p.dtype) for n, p in actor.model.named_parameters()], 1 << 30)
    bucket = IpcBucket(bucket_bytes(plan), CPU)
    for slot in plan[0]:
        slot.view(bucket.tensor).copy_(dict(actor.model.named_parameters())[slot.name])
    engine.open_bucket(bucket.handle(), plan)
    bucket.unlink()
    engine.load_bucket(0)
    engine.finish_sync()
    sampling = Sampling(temperature=0.7, max_tokens=12, stop_token_ids=())
    prompts = [[5, 9, 3], [7]]
    rollouts = [
        Rollout(
            prompt=Prompt(prompt_id=i, text="", token_ids=prompts[i]),
            sequence_id=i,
            response_ids=list(generation.token_ids),
            rollout_logprobs=list(generation.logprobs),
            is_truncated=True,
            text="",
        )
        for i, generation in enumerate(engine.generate(prompts, sampling, [1, 2]))
    ]
    sampled = make_train_batch(rollouts)
    packed = pack(sampled, [1, 0], CPU)
    found, _ = run_actor(actor, packed, 0.7)
    torch.testing.assert_close(found, packed.gather(sampled.rollout_logprobs), atol=1e-5, rtol=0)


def test_a_padded_model_says_so(tiny, tmp_path, caplog):
    folder = save_random(AutoModelForCausalLM, PADDED["bloom"](), tmp_path, tiny / "policy")
    with caplog.at_level(logging.WARNING):
        load_actor(str(folder), ModelsConfig(), CPU)
    assert f"models.actor = {folder}: BloomForCausalLM cannot keep packed sequences apart" in caplog.text


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_attention_without_the_cap_of_the_model_is_refused(tmp_path, attention):
    FAMILIES["gemma2"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"models.attention = {attention}: .*attn_logit_softcapping = 1.0.* eager"):
        load_actor(str(tmp_path), ModelsConfig(attention=attention), CPU)


def test_logits_that_are_not_what_the_config_says_are_refused(tiny, tmp_path):
    """transformers' MPT ignores the logit_scale that its config may hold."""
    folder = save_random(AutoModelForCausalLM, PADDED["mpt"](logit_scale=0.5), tmp_path, tiny / "policy")
    with pytest.raises(ConfigError, match=f"models.actor = {folder}: MptForCausalLM changes logits after its head"):
        load_actor(str(folder), ModelsConfig(), CPU)


@pytest.mark.parametrize("loader", ["actor", "reward", "tokenizer"])
def test_folder_without_a_model_is_refused(tmp_path, loader):
    with pytest.raises(ConfigError, match=f"{tmp_path}: no "):
        if loader == "actor":
            load_actor(str(tmp_path), ModelsConfig(), CPU)
        elif loader == "reward":
            load_value_model(str(tmp_path), ModelsConfig(), CPU, field="models.reward")
        else:
            load_tokenizer(str(tmp_path))


def test_check_models_knows_every_limit(tiny, tmp_path):
    """Sequences of 64 tokens fit the tiny models; a critic of 32 positions is named."""

    def config(**models: str) -> Config:
        return Config(
            models=ModelsConfig(actor=str(tiny / "policy"), reward=str(tiny / "reward"), **models),
            prompts=PromptsConfig(path="p", max_prompt_tokens=40),
            rollout=RolloutConfig(max_response_tokens=24),
        )

    check_models(config())
    short = tmp_path / "short"
    shutil.copytree(tiny / "reward", short)
    settings = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 32}
    (short / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"40 \+ .* 24 = 64: models.critic = {short} takes at most 32 tokens"):
        check_models(config(critic=str(short)))
    shared = replace(config(), update=UpdateConfig(sequence_parallel_size=3))
    with pytest.raises(ConfigError, match=r"sequence_parallel_size = 3: must divide the 2 attention heads of models\."):
        check_models(shared)


@pytest.mark.parametrize(
    "models, message",
    [
        (
            {"attention": "sdpa"},
            r"models.attention = sdpa: models.actor is a Gemma2ForCausalLM with .* = 1.0, .* eager$",
        ),
        ({"lora": LoraConfig(rank=1, target_modules=["v"])}, r"target_modules names v: Gemma2ForCausalLM .*, v_proj$"),
        ({"lora": LoraConfig(target_modules=["v"])}, None),
        ({"lora": LoraConfig(rank=1, target_modules=["q_proj", "down_proj"]), "attention": "eager"}, None),
    ],
)
def test_check_models_knows_attention_and_layers_before_anything_loads(tiny, tmp_path, models, message):
    FAMILIES["gemma2"]().save_pretrained(tmp_path)  # without weights
    AutoTokenizer.from_pretrained(tiny / "policy").save_pretrained(tmp_path)
    lengths = {"prompts": PromptsConfig(max_prompt_tokens=40), "rollout": RolloutConfig(max_response_tokens=24)}
    config = Config(models=ModelsConfig(actor=str(tmp_path), **models), **lengths)
    if message is None:
        check_models(config)
    else:
        with pytest.raises(ConfigError, match=message):
            check_models(config)


def test_check_models_knows_what_a_family_lacks(tiny, tmp_path):
    FAMILIES["cohere"]().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny / "policy").save_pretrained(tmp_path)
    lengths = {"prompts": PromptsConfig(max_prompt_tokens=40), "rollout": RolloutConfig(max_response_tokens=24)}
    models = ModelsConfig(actor=str(tmp_path))
    with pytest.raises(ConfigError, match=r"models.critic: transformers has no sequence classifier of type cohere"):
        check_models(Config(models=models, **lengths))
    without = Config(models=models, advantage=AdvantageConfig(estimator="grpo"), **lengths)
    check_models(without)
    with pytest.raises(ConfigError, match=r"models.fused_layers = liger: .*; models.actor is of type cohere; use auto"):
        check_models(replace(without, models=replace(models, fused_layers="liger")))


def test_only_a_reward_model_may_have_another_tokenizer(tiny, tmp_path):
    """It reads text that is encoded again, so its limit is not counted in the actor's tokens either."""
    other = tmp_path / "other"
    shutil.copytree(tiny / "reward", other)
    settings = json.loads((other / "config.json").read_text()) | {"max_position_embeddings": 8}
    (other / "config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["abc"])
    tokenizer.save_pretrained(other)
    models = {"actor": str(tiny / "policy"), "reward": str(other)}
    rest = {"prompts": PromptsConfig(path="p", max_prompt_tokens=40), "rollout": RolloutConfig(max_response_tokens=24)}
    check_models(Config(models=ModelsConfig(**models, critic=str(tiny / "policy")), **rest))
    check_models(Config(models=ModelsConfig(**models), advantage=AdvantageConfig(estimator="grpo"), **rest))
    for field in ("critic", "reference"):
        with pytest.raises(ConfigError, match=rf"models.{field} = {other}: its tokenizer is not the actor's"):
            check_models(Config(models=ModelsConfig(**models, **{field: str(other)}), **rest))
    with pytest.raises(ConfigError, match=r"models.critic is null and would start as models.reward = "):
        check_models(Config(models=ModelsConfig(**models), **rest))


@pytest.mark.parametrize(
    "generation, expected",
    [
        ({"eos_token_id": [3, 5]}, [0, 3, 5]),
        ({"eos_token_id": 4}, [0, 4]),
        ({"eos_token_id": 0}, [0]),
        ({}, [0]),
        (None, [0]),
    ],
)
def test_eos_ids_are_the_union(tiny, tmp_path, generation, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert eos_token_ids(str(tmp_path), load_tokenizer(str(tiny / "policy"))) == expected


def test_no_eos_at_all_is_refused(tiny, tmp_path):
    tokenizer = load_tokenizer(str(tiny / "policy"))
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="names an EOS token"):
        eos_token_ids(str(tmp_path), tokenizer)
