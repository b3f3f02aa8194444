"""Tiny models that every end-to-end test shares, and one vLLM engine per session."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from hybrid_rl.batch import Prompt, Rollout
from hybrid_rl.distributed import free_port

ROOT = Path(__file__).parents[1]

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


@pytest.fixture
def five_rollouts() -> list[Rollout]:
    """Five responses, of 2, 4, 0, 3 and 1 tokens; the second and the fourth are truncated. The answers are 3 to 7."""
    responses = [[5, 0], [3, 4, 11, 9], [], [6, 12, 8], [0]]
    return [
        Rollout(
            prompt=Prompt(prompt_id=20 + i, text="", token_ids=[2 + i] * (i + 1), answer=str(i + 3)),
            sequence_id=i,
            response_ids=ids,
            rollout_logprobs=[-1.0] * len(ids),
            is_truncated=i in (1, 3),
            text=text,
        )
        for i, (ids, text) in enumerate(zip(responses, ["3", "12", "", "4+", "5"], strict=True))
    ]


@pytest.fixture(scope="session")
def on_two_ranks(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """Return what the program `file` saves in two processes over gloo, as rank<i>.pt in the folder it is given.

    Its arguments are that folder and the one of the tiny models.
    """

    def run(file: str) -> list[Any]:
        folder = tmp_path_factory.mktemp("two_ranks")
        common = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        logs = [(folder / f"rank{rank}.log").open("w") for rank in range(2)]
        processes = [
            subprocess.Popen(
                [sys.executable, file, str(folder), str(tiny)],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(timeout=180) for process in processes]
        finally:
            for process, log in zip(processes, logs, strict=True):
                process.kill()
                process.wait()
                log.close()
        assert codes == [0, 0], "".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(2))
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]

    return run
