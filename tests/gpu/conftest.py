"""GPU tests: `python -m pytest -m gpu tests/gpu` on a machine with a GPU; each needs about two minutes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder with a random `policy` of 0.2B parameters, a `reward` model of the same shape, and `prompts.jsonl`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("small")
    words = {word: i for i, word in enumerate(["<eos>", *(f"w{n}" for n in range(31_999))])}
    core = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=10,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        num_labels=1,
        dtype="bfloat16",
    )
    for name, model_class in {"policy": LlamaForCausalLM, "reward": LlamaForSequenceClassification}.items():
        model_class(config).to(torch.bfloat16).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    rows = [{"prompt": " ".join(f"w{(37 * i + 11 * k) % 31_999}" for k in range(8 + i % 24))} for i in range(64)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root
