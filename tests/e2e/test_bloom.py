"""A model that the trainer runs padded and whose tensors the engine rearranges: BLOOM, with real vLLM."""

import pytest
import torch
from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM

pytestmark = pytest.mark.slow


def test_engine_and_trainer_agree_on_bloom(make_config, train_here, read_run, tiny, tmp_path):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "policy")
    ids = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    model = BloomForCausalLM(BloomConfig(vocab_size=len(tokenizer), hidden_size=64, n_layer=2, n_head=2, **ids))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path / "bloom")
    tokenizer.save_pretrained(tmp_path / "bloom")
    (tmp_path / "rewards.py").write_text("def length(prompt, response):\n    return float(len(response))\n")
    config = make_config(
        tmp_path,
        models={"actor": str(tmp_path / "bloom"), "reward": None},
        rollout={"engine": "vllm"},
        reward={"functions": [f"{tmp_path / 'rewards.py'}:length"]},
        advantage={"estimator": "grpo", "kl_coef": 0.0},
    )
    train_here(config)
    rows = read_run(config).metrics
    # Not closer: vLLM computes BLOOM's GELU itself, transformers its approximation by tanh.
    assert all(row["rollout/logprob_gap"] < 3e-4 for row in rows), [row["rollout/logprob_gap"] for row in rows]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
