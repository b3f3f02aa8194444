"""Small random models of every family of architectures, and transformers' own log-probs of a batch."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
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
    OlmoeConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hybrid_rl.batch import Packed, TrainBatch, split
from hybrid_rl.models.packed import Actor, packed_inputs

CPU = torch.device("cpu")
VOCABULARY = 40
PAD = 39
"""Padding of the padded oracle batches; no sequence holds it."""
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
DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4}
# Windows are shorter than the sequences, and caps and scales change the logits.
FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "qwen3": lambda **o: Qwen3Config(**SMALL, head_dim=16, **o),
    "qwen3-moe": lambda **o: Qwen3MoeConfig(**SMALL, head_dim=16, **MOE, **o),
    "olmoe": lambda **o: OlmoeConfig(**SMALL | {"intermediate_size": 16}, num_experts=8, num_experts_per_tok=2, **o),
    "deepseek2": lambda **o: DeepseekV2Config(**SMALL | DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1, **o),
    "deepseek3": lambda **o: DeepseekV3Config(
        **SMALL | DEEPSEEK, q_lora_rank=16, n_group=2, topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid", **o
    ),
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
"""Families that run packed."""
PADDED: dict[str, Callable[..., PretrainedConfig]] = {
    "bloom": lambda **o: BloomConfig(**IDS, hidden_size=32, n_layer=2, n_head=2, **o),
    "mpt": lambda **o: MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=2, max_seq_len=64, **o),
    "falcon-alibi": lambda **o: FalconConfig(**IDS, **SIZES, alibi=True, **o),
    "gpt-oss": lambda **o: GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, sliding_window=4, **o),
    "falcon-h1": lambda **o: FalconH1Config(**SMALL, **MAMBA, lm_head_multiplier=0.3, **o),
    "lfm2": lambda **o: Lfm2Config(**SMALL, layer_types=["conv", "full_attention"], **o),
}
"""Families that cannot keep packed sequences apart and run padded."""


def save_random(auto_class: type, config: PretrainedConfig, folder: Path, tokenizer_from: Path) -> Path:
    """Save a random model and return its folder.

    Biases and norms are random too, and the logits are far from uniform, so that mistakes show.
    """
    torch.manual_seed(3)
    model = auto_class.from_config(config)
    for parameter in model.parameters():
        scale = 6 if parameter.ndim >= 2 else 1
        parameter.data.mul_(scale).add_(torch.randn_like(parameter), alpha=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(folder)
    return folder


def groupings(batch: TrainBatch) -> dict[str, list[list[int]]]:
    """Return ways to divide the rows of the batch into micro-batches."""
    return {
        "alone": [[row] for row in range(len(batch))],
        "together": [[4, 0, 5, 1, 3, 2]],
        "split": split(batch.sequence_lengths, 16),
    }


def padded_batch(batch: TrainBatch, side: str) -> dict[str, Tensor]:
    """Return the inputs of a transformers model padded on a side, and `starts`, the column of each first token."""
    width = max(batch.sequence_lengths)
    starts = [width - n if side == "left" else 0 for n in batch.sequence_lengths]
    ids, mask = torch.full((len(batch), width), PAD), torch.zeros(len(batch), width, dtype=torch.int64)
    for row, (sequence, start) in enumerate(zip(batch.sequences, starts, strict=True)):
        ids[row, start : start + len(sequence)] = sequence
        mask[row, start : start + len(sequence)] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "starts": torch.tensor(starts)}


@torch.no_grad()
def padded_logprobs(folder: Path, batch: TrainBatch, side: str, temperature: float) -> tuple[Tensor, Tensor]:
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


def logprobs_alone(folder: Path, batch: TrainBatch, temperature: float, implementation: str) -> list[Tensor]:
    """Return the log-probs of each sequence's response from transformers' own logits of that sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation)
    rows = []
    for row, sequence in enumerate(batch.sequences):
        table = (model(sequence[None]).logits[0, :-1] / temperature).log_softmax(-1)
        rows.append(table.gather(-1, sequence[1:, None])[int(batch.prompt_lengths[row]) - 1 :, 0])
    return rows


def run_actor(actor: Actor, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [R] of the packed responses."""
    return actor(**packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=temperature)
