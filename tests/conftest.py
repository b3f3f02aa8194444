"""Tiny models that every end-to-end test shares, and one vLLM engine per session."""

import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

WORDS = ["<eos>", "<bos>", *"0123456789", "+", "=", *"abcdefghijklmnopqrstuvwxyz"]


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per character, whose padding is its EOS."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", bos_token="<bos>")


def tiny_config(*, tied: bool = True) -> LlamaConfig:
    """Return a two-layer Llama of 30,000 parameters with grouped heads of a size that vLLM's CPU kernels take."""
    return LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=1,
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `policy`, `reward`, `prompts.jsonl` (10 rows) and `heldout.jsonl` (6 rows)."""
    root = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    config = tiny_config()
    config.num_labels = 1
    for name, model in {
        "policy": LlamaForCausalLM(config),
        "reward": LlamaForSequenceClassification(config),
    }.items():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.data.mul_(8)  # away from uniform, so that log-probs and greedy tokens tell weights apart
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for name, rows in {"prompts": range(10), "heldout": range(10, 16)}.items():
        lines = [json.dumps({"prompt": f"{i}+{i % 3}=", "answer": str(i + i % 3)}) for i in rows]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root
