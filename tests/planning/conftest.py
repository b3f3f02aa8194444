"""Configs of two model shapes, whose folders hold nothing but a config.json."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen2Config

from hybrid_rl.config import (
    AdvantageConfig,
    Config,
    MemoryConfig,
    ModelsConfig,
    PromptsConfig,
    RewardConfig,
    RolloutConfig,
    SyncConfig,
    UpdateConfig,
)

LLAMA_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="session")
def make_config(tmp_path_factory: pytest.TempPathFactory, qwen_7b: Qwen2Config) -> Callable[..., Config]:
    """Return a function from `7b` or `1b` and changed fields by section to a config."""
    root: Path = tmp_path_factory.mktemp("configs")
    for name, shape in {"7b": qwen_7b, "1b": LLAMA_1B}.items():
        shape.save_pretrained(root / name)

    def make(name: str, *, estimator: str = "grpo", **sections: dict[str, Any]) -> Config:
        config = Config(
            models=ModelsConfig(actor=str(root / name)),
            prompts=PromptsConfig(path="prompts.jsonl", max_prompt_tokens=256),
            rollout=RolloutConfig(
                rollout_batch_size=64,
                group_size=8,
                max_response_tokens=768,
                kv_cache_memory_bytes=None,
                max_num_seqs=256,
            ),
            reward=RewardConfig(functions=["math"]),
            advantage=AdvantageConfig(estimator=estimator),
            update=UpdateConfig(mini_batch_size=128, micro_batch_tokens=8192),
            memory=MemoryConfig(swap="auto"),
            sync=SyncConfig(mode="copy"),
        )
        return replace(config, **{k: replace(getattr(config, k), **fields) for k, fields in sections.items()})

    return make
