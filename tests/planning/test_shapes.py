"""Sizes of models against real modules: their parameters, peft's adapters, and the tensors that autograd saves."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hybrid_rl.config import ConfigError, LoraConfig, ModelsConfig
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.lora import add_adapters
from hybrid_rl.planning.layer_parts import Mixture
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
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 64}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 32}
FAMILIES = {
    "llama": CONFIGS["llama"],
    "qwen2": CONFIGS["qwen2"],
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32, num_experts=6),
    "olmoe": OlmoeConfig(**{**SIZES, "intermediate_size": 64}, num_experts=6, num_experts_per_tok=3),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        **EXPERTS,
        **LATENT,
        n_routed_experts=6,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}
"""Models whose activations autograd is asked for."""


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


def read(config, folder):
    """Return the shape of a configuration."""
    config.save_pretrained(folder)
    return read_shape(str(folder), field="models.actor", is_policy=True)


def test_a_mixture_of_the_size_of_qwen3_30b_a3b_by_hand(tmp_path):
    """48 layers of 128 experts, of which a token takes 8; the published counts are 30.5 and 3.3 billion."""
    shape = read(
        Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        tmp_path,
    )
    expert = 3 * 2048 * 768
    attention = 2048 * 4096 + 2 * 2048 * 512 + 4096 * 2048
    router, norms, words = 128 * 2048, 2 * 2048 + 2 * 128, 2 * 151936 * 2048
    assert shape.num_params == 48 * (128 * expert + attention + router + norms) + words + 2048 == 30_532_122_624
    assert shape.num_active_params == 48 * (8 * expert + attention + router + norms) + words + 2048 == 3_353_032_704
    assert shape.num_linear == 48 * (128 * expert + attention + router)
    assert shape.forward_flops(10, length=6) == 10 * (2 * 48 * (8 * expert + attention + router) + 2 * 48 * 4096 * 6)
    assert shape.kv_bytes_per_token(2) == 2 * 48 * 512 * 2
    # 2 norms of 2048, one of 32 query and one of 4 key heads; two inputs; q, k, v, output; 8 experts; 128 softmaxes.
    layer = 6 * (2 * 2048 + 4096 + 512) + 4 * 2048 + 2 * 2 * (4096 + 512) + 4 * 32
    experts = 8 * (4 * 2 * 768 + 2 * 2 * 2048) + 4 * 128
    sizes = {"repeats_keys": False, "is_fused": False}
    assert shape.layer_activation_bytes(2, has_experts=True, **sizes) == layer + experts
    assert shape.activation_bytes(1, 2, checkpointing=True, **sizes) == 48 * 4096 + layer + experts + 6 * 2048
    # 8 experts hold their outputs three times and their inputs once, which is more than what their gates read.
    assert shape.transient_bytes(1, 2) == 2 * 2 * 2048 + 8 * 4 * 2048 * 2


def test_latent_attention_and_shared_experts_by_hand(tmp_path):
    """The shape of DeepSeek-V3, of which 671 billion parameters are published, 37 active."""
    shape = read(DeepseekV3Config(), tmp_path)
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    expert, dense, router = 3 * 7168 * 2048, 3 * 7168 * 18432, 256 * 7168
    norms = 2 * 7168 + 1536 + 512
    words = 2 * 129280 * 7168 + 7168
    whole = 61 * (attention + norms) + 3 * dense + 58 * (257 * expert + router) + words
    assert shape.num_params == whole == 671_026_404_352
    assert shape.num_active_linear == 61 * attention + 3 * dense + 58 * (9 * expert + router)
    # An engine caches keys of 192 elements for each of 128 heads, and values in as many.
    assert shape.kv_bytes_per_token(2) == 2 * 61 * 128 * 192 * 2 == 8 * shape.kv_bytes_per_token(2, num_gpus=8)
    # Queries and keys of 192 elements, values and outputs of 128, for each of 128 heads.
    assert shape.forward_flops(1, length=10) - 2 * shape.num_active_linear == 61 * 128 * (192 + 128) * 10


@pytest.mark.parametrize("tokens, read_experts", [(0, 0), (1, 2), (2, 3.5)])
def test_tokens_read_the_experts_that_any_of_them_chooses(tokens, read_experts):
    """2 of 8 experts each: two tokens leave out (3/4)^2 = 9/16 of the experts."""
    mixture = Mixture(
        num_layers=1,
        num_experts=8,
        experts_per_token=2,
        expert_elements=800,
        router_elements=8,
        expert_size=1,
        shared_size=0,
    )
    assert mixture.read_elements(tokens) == pytest.approx(100 * read_experts)


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
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_equal_the_tensors_that_autograd_saves(tmp_path, name, dtype, dtype_bytes, checkpointing):
    AutoModelForCausalLM.from_config(FAMILIES[name]).save_pretrained(tmp_path)
    settings = ModelsConfig(actor=str(tmp_path), dtype=dtype, gradient_checkpointing=checkpointing, attention="sdpa")
    actor = load_actor(str(tmp_path), settings, torch.device("cpu"))
    shape = read_shape(str(tmp_path), field="models.actor", is_policy=True)
    measured = saved_bytes(actor, 256)
    planned = shape.activation_bytes(256, dtype_bytes, checkpointing=checkpointing, repeats_keys=True, is_fused=False)
    if checkpointing:  # the recomputed layer's activations exist in the backward only
        has_experts = shape.mixture is not None
        planned -= 256 * shape.layer_activation_bytes(
            dtype_bytes, repeats_keys=True, is_fused=False, has_experts=has_experts
        )
    # The attention of a CPU saves the output of latent attention in the order of heads and of tokens, a GPU's once.
    assert planned == pytest.approx(measured, rel=0.01 if shape.latent is None else 0.05)
