"""Layout of the alias buffer for Llama and Qwen2, computed by hand, and the reasons against an alias."""

import pytest
import torch

from hybrid_rl.config import Config, RolloutConfig, UpdateConfig
from hybrid_rl.weights.layout import KNOWN, alias_bytes, alias_slots, engine_order, why_not_alias

F32, BF16 = torch.float32, torch.bfloat16
LLAMA = [
    ("embed", (100, 4), F32),
    ("0.q_proj.weight", (8, 4), F32),
    ("0.k_proj.weight", (4, 4), F32),
    ("0.v_proj.weight", (4, 4), F32),
    ("0.o_proj.weight", (4, 8), F32),
    ("0.gate_proj.weight", (6, 4), F32),
    ("0.up_proj.weight", (6, 4), F32),
    ("0.down_proj.weight", (4, 6), F32),
    ("0.norm.weight", (4,), F32),
    ("norm.weight", (4,), F32),
]
QWEN2 = [
    ("0.q_proj.weight", (8, 8), BF16),
    ("0.q_proj.bias", (8,), BF16),
    ("0.k_proj.weight", (8, 8), BF16),
    ("0.k_proj.bias", (8,), BF16),
    ("0.v_proj.weight", (8, 8), BF16),
    ("0.v_proj.bias", (8,), BF16),
    ("0.norm.weight", (8,), BF16),
    ("lm_head.weight", (65, 8), BF16),
]


def test_llama_by_hand():
    """Matrices with rows of 16 bytes follow each other; two elements of padding per rank; vectors start at 256 k."""
    slots = alias_slots(LLAMA, num_ranks=2)
    rows = [100, 8, 4, 4, 8, 6, 6, 6]  # o_proj has 4 rows of 32 bytes, down_proj 4 of 24
    assert [slot.offset for slot in slots[:8]] == [16 * sum(rows[:i]) for i in range(8)]
    assert sum(rows) * 16 == 2272  # with 16 bytes of padding 2288, so the vectors begin at 2304
    assert [(slot.name, slot.offset) for slot in slots[8:]] == [("0.norm.weight", 2304), ("norm.weight", 2320)]
    assert alias_bytes(slots, num_ranks=2) == 4096  # o_proj, at 1856, with 64 rows of 32 bytes: 3904, rounded up


def test_qwen2_by_hand():
    """Biases of fused layers are adjacent too, among the vectors; the rows of the head are rounded up to 128."""
    slots = alias_slots(QWEN2, num_ranks=1)
    assert [(slot.name, slot.offset) for slot in slots] == [
        ("0.q_proj.weight", 0),
        ("0.k_proj.weight", 128),
        ("0.v_proj.weight", 256),
        ("lm_head.weight", 384),  # 65 rows of 16 bytes end at 1424, then 4 bytes of padding
        ("0.q_proj.bias", 1536),
        ("0.k_proj.bias", 1552),
        ("0.v_proj.bias", 1568),
        ("0.norm.weight", 1584),
    ]
    assert alias_bytes(slots, num_ranks=1) == 2560  # 384 + 128 * 16 = 2432, more than the vectors' 1604, rounded up
    assert all(slot.shape == shape for slot in slots for name, shape, _ in QWEN2 if slot.name == name)


@pytest.mark.parametrize(
    "names, expected",
    [
        (["k_proj.weight", "v_proj.weight", "q_proj.weight"], ["q_proj.weight", "k_proj.weight", "v_proj.weight"]),
        (["a.up_proj.weight", "b", "a.gate_proj.weight"], ["a.gate_proj.weight", "a.up_proj.weight", "b"]),
        (["0.k_proj.w", "1.q_proj.w", "0.q_proj.w"], ["0.q_proj.w", "0.k_proj.w", "1.q_proj.w"]),
        (["q_proj.bias", "k_proj.weight"], ["q_proj.bias", "k_proj.weight"]),
        (["norm", "my_q_proj.weight"], ["norm", "my_q_proj.weight"]),
    ],
)
def test_weights_that_the_engine_fuses_are_adjacent(names, expected):
    assert engine_order(names) == expected


def test_known_architectures_can_be_aliased():
    for architecture in KNOWN:
        assert why_not_alias(Config(), architecture=architecture, tensors=LLAMA) is None
    for stage in (0, 1, 2):
        config = Config(update=UpdateConfig(zero_stage=stage))
        assert why_not_alias(config, architecture="LlamaForCausalLM", tensors=QWEN2) is None


@pytest.mark.parametrize(
    "config, architecture, tensors, rule",
    [
        (Config(rollout=RolloutConfig(tensor_parallel_size=2)), "LlamaForCausalLM", LLAMA, "tensor_parallel_size = 2"),
        (Config(update=UpdateConfig(tensor_parallel_size=2)), "LlamaForCausalLM", LLAMA, "update.tensor_parallel_size"),
        (Config(update=UpdateConfig(zero_stage=3)), "LlamaForCausalLM", LLAMA, "update.zero_stage = 3"),
        (
            Config(rollout=RolloutConfig(vllm={"model_impl": "transformers"})),
            "LlamaForCausalLM",
            LLAMA,
            "rollout.vllm.model_impl = transformers",
        ),
        (
            Config(update=UpdateConfig(deepspeed={"zero_optimization": {"round_robin_gradients": True}})),
            "LlamaForCausalLM",
            LLAMA,
            "update.deepspeed.zero_optimization.round_robin_gradients = True",
        ),
        (Config(), "GPT2LMHeadModel", LLAMA, "GPT2LMHeadModel is not one of DeepseekV2ForCausalLM, "),
        (Config(), "LlamaForCausalLM", [("a", (3, 3), F32), *LLAMA], "embed would begin at byte 36"),
    ],
)
def test_each_reason_against_an_alias_is_named(config, architecture, tensors, rule):
    reason = why_not_alias(config, architecture=architecture, tensors=tensors)
    assert reason is not None and rule in reason
