"""Small models and a batch for the tests of models."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

from hybrid_rl.batch import TrainBatch, make_train_batch
from hybrid_rl.distributed import World, join_world
from tests.conftest import make_rollout
from tests.models.families import CONFIGS, FAMILIES, PADDED, VOCABULARY, save_random


@pytest.fixture(
    scope="module",
    params=[(name, tied) for name in CONFIGS for tied in (True, False)],
    ids=lambda a: f"{a[0]}-{'tied' if a[1] else 'untied'}",
)
def policy(request, tiny, tmp_path_factory) -> Path:
    """Folder of a small causal language model, with tied or untied embeddings."""
    name, tied = request.param
    config = CONFIGS[name](tie_word_embeddings=tied)
    return save_random(AutoModelForCausalLM, config, tmp_path_factory.mktemp(name), tiny / "policy")


@pytest.fixture(scope="module", params=list(CONFIGS))
def classifier(request, tiny, tmp_path_factory) -> Path:
    """Folder of a small sequence classifier with one label."""
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
        rollouts.append(make_rollout(ids[:p], ids[p:], prompt_id=i))
    return make_train_batch(rollouts)


@pytest.fixture(scope="module", params=[*FAMILIES, *PADDED])
def family(request, tiny, tmp_path_factory) -> tuple[str, Path]:
    """Name and folder of a small model of another family that vLLM supports."""
    config = (FAMILIES | PADDED)[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, save_random(AutoModelForCausalLM, config, folder, tiny / "policy")


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def lora_policy(request, tiny, tmp_path_factory) -> Path:
    """Folder of a Llama, or of a GPT-2, whose linear layers store their weights transposed."""
    if request.param == "llama":
        return tiny / "policy"
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(2)
    ids = {"vocab_size": 40, "eos_token_id": 0, "bos_token_id": 1}
    model = AutoModelForCausalLM.from_config(GPT2Config(**ids, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny / "policy").save_pretrained(folder)
    return folder
