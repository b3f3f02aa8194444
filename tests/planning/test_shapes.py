"""Sizes of models against real modules: their parameters, peft's adapters, and the tensors that autograd saves."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
)

from hybrid_rl.config import ConfigError, LoraConfig, ModelsConfig
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.lora import add_adapters
from hybrid_rl.planning.shapes import read_shape

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "gpt2": GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, pad_token_id=0),
}


@pytest.fixture(params=CONFIGS)
def folder(request, tmp_path):
    CONFIGS[request.param].save_pretrained(tmp_path)
    return str(tmp_path)


def test_tiny_llama_by_hand(tiny):
    shape = read_shape(str(tiny / "policy"), field="models.actor", is_policy=True)
    # Embedding 40 x 32, tied. A layer: q 32 x 64, k and v 32 x 32, o 64 x 32, gate, up, down 32 x 64, two norms of 32.
    layer = 2048 + 2 * 1024 + 2048 + 3 * 2048 + 2 * 32
    assert shape.num_params == 40 * 32 + 2 * layer + 32 == 26_016
    assert shape.largest_tensor == 2048
    assert shape.num_linear == 2 * (layer - 64)
    assert shape.kv_bytes_per_token(2) == 2 * 2 * 32 * 2  # keys and values, 2 layers, 1 head of 32, 2 bytes
    assert shape.kv_bytes_per_token(2, num_gpus=2) == 2 * 2 * 32 * 2  # a head cannot be divided
    # 2 norms 2 * 6 * 32, inputs 2 * 2 * 32, q and output 4 * 64, one key head 4 * 32, log-sum-exp 4 * 2, 8 * 64.
    assert shape.layer_activation_bytes(2, repeats_keys=False, is_fused=False) == 384 + 128 + 256 + 128 + 8 + 512
    assert shape.layer_activation_bytes(2, repeats_keys=True, is_fused=False) == 384 + 128 + 256 + 256 + 8 + 512
    # Fused: 2 norms 2 * (2 * 32 + 4), gate, up and product 6 * 64; the last norm of each of 10 tokens 2 * 32 + 4.
    fused = 136 + 128 + 256 + 256 + 8 + 384
    assert shape.layer_activation_bytes(2, repeats_keys=True, is_fused=True) == fused
    whole = shape.activation_bytes(10, 2, checkpointing=False, repeats_keys=True, is_fused=True)
    assert whole == 10 * (2 * fused + 68)
    assert shape.forward_flops(10, length=6) == 10 * (2 * shape.num_linear + 2 * 2 * 64 * 6)
    assert shape.head_flops(3) == 2 * 3 * 32 * 40


def test_the_shard_of_a_tensor_parallel_rank_by_hand(tiny):
    """All matrices of the layers are sharded; norms and the embedding, which is also the head, are not."""
    shape = read_shape(str(tiny / "policy"), field="models.actor", is_policy=True)
    assert shape.shard(1) == shape
    layer = 2048 + 2 * 1024 + 2048 + 3 * 2048
    assert shape.shard(2).num_params == 40 * 32 + 2 * (layer // 2 + 2 * 32) + 32 == 13_728
    assert dict(shape.shard(4).tensors)["model.layers.1.self_attn.k_proj.weight"] == (8, 32)


@pytest.mark.parametrize("is_policy", [True, False])
def test_parameters_equal_those_of_the_real_module(folder, is_policy):
    auto_class = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    settings = AutoConfig.from_pretrained(folder)
    settings.num_labels = 2 if is_policy else 1
    model = auto_class.from_config(settings)
    shape = read_shape(folder, field="models.actor", is_policy=is_policy)
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    assert dict(shape.tensors) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shape.vocab_size == (96 if is_policy else 1)


@pytest.mark.parametrize("targets", [None, ["q_proj", "down_proj"]])
def test_number_of_adapter_parameters_equals_pefts(tmp_path, targets):
    CONFIGS["llama"].save_pretrained(tmp_path)
    lora = LoraConfig(rank=3, target_modules=targets)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    add_adapters(model, lora, heads=[model.get_output_embeddings()])
    shape = read_shape(str(tmp_path), field="models.actor", is_policy=True)
    assert shape.num_adapted(lora) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_error_names_a_folder_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"models.reward = .*: no Hugging Face model there"):
        read_shape(str(tmp_path), field="models.reward", is_policy=False)


def saved_bytes(actor, num_tokens: int) -> int:
    """Return the bytes that autograd saves in a forward over one packed sequence, each storage once.

    Parameters, masks, and the rotary tables that all layers use are not activations of a layer.
    """
    skipped = {p.untyped_storage().data_ptr() for p in actor.parameters()}
    head_dim = actor.model.config.hidden_size // actor.model.config.num_attention_heads
    found: dict[int, int] = {}
    kept = []

    def note(tensor):
        is_table = tensor.shape[-2:] in ((num_tokens, num_tokens), (num_tokens, head_dim)) and tensor.shape[1] == 1
        if tensor.is_floating_point() and not is_table and tensor.untyped_storage().data_ptr() not in skipped:
            kept.append(tensor)  # so that no later storage has the same address
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.arange(num_tokens)[None] % 96
    ends = torch.tensor([0, num_tokens], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        hidden = actor.hidden(ids, torch.arange(num_tokens)[None], ends, num_tokens)
    del hidden
    return sum(found.values())


@pytest.mark.parametrize("dtype, dtype_bytes", [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_equal_the_tensors_that_autograd_saves(tmp_path, name, dtype, dtype_bytes, checkpointing):
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    settings = ModelsConfig(actor=str(tmp_path), dtype=dtype, gradient_checkpointing=checkpointing, attention="sdpa")
    actor = load_actor(str(tmp_path), settings, torch.device("cpu"))
    shape = read_shape(str(tmp_path), field="models.actor", is_policy=True)
    measured = saved_bytes(actor, 256)
    planned = shape.activation_bytes(256, dtype_bytes, checkpointing=checkpointing, repeats_keys=True, is_fused=False)
    if checkpointing:  # the recomputed layer's activations exist in the backward only
        planned -= 256 * shape.layer_activation_bytes(dtype_bytes, repeats_keys=True, is_fused=False)
    assert planned == pytest.approx(measured, rel=0.01)
