"""Operations of a small model, worked by hand."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3NextConfig

from hybrid_rl.planning.flops import Flops
from hybrid_rl.planning.model_shape import ModelShape
from hybrid_rl.planning.shapes import Shapes, read_shape

SIZES = {
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LINEAR = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 20)
"""Weights of two layers: q, k and v of one of two heads of size 4, o; gate, up and down."""


def forward(tokens: int) -> int:
    """Operations of a forward of one sequence: 2 per weight; 4 per query element and pair of positions, of which half
    are masked; 2 layers of 8 query elements."""
    return 2 * LINEAR * tokens + 4 * 2 * 8 * tokens * tokens // 2


HEAD = 2 * 8 * 100


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> ModelShape:
    folder = tmp_path_factory.mktemp("shape")
    LlamaConfig(**SIZES, tie_word_embeddings=False).save_pretrained(folder)
    return read_shape(str(folder), field="models.actor", is_policy=True)


@pytest.fixture
def flops(shape) -> Flops:
    value = replace(shape, vocab_size=1)
    shapes = Shapes(actor=shape, critic=value, reference=None, reward=value)
    return Flops(shapes=shapes, has_adapters=False, shares_prompts=True)


def test_a_forward_counts_weights_attention_and_head(flops):
    assert flops.forward("actor", [5, 12], 7) == forward(5) + forward(12) + 7 * HEAD
    # 6 N T would be 9 % more than the linear layers and leave attention out.
    assert forward(12) - 2 * LINEAR * 12 == 4 * 2 * 8 * 72


def test_a_value_model_has_one_output(flops):
    assert flops.forward("critic", [12], 7) == forward(12) + 7 * 2 * 8
    assert flops.forward("reward", [12], 1) == forward(12) + 2 * 8


def test_the_reference_of_adapters_is_the_actor(flops):
    assert flops.forward("reference", [12], 7) == flops.forward("actor", [12], 7)


def test_an_update_takes_three_forwards_and_two_with_adapters(flops):
    one = flops.forward("actor", [5, 12], 7)
    assert flops.update("actor", [5, 12], 7) == 3 * one
    assert replace(flops, has_adapters=True).update("actor", [5, 12], 7) == 2 * one


def test_generation_reads_the_prompt_of_a_group_once(flops):
    """Two responses of 3 and 5 tokens to a prompt of 4, and one of 2 to a prompt of 6."""
    prompts, sequences = {7: 4, 9: 6}, [(7, 7, 3), (7, 9, 5), (9, 8, 2)]
    every = forward(7) + forward(9) + forward(8) + 10 * HEAD
    assert flops.generation(prompts, sequences) == every - forward(4)
    assert replace(flops, shares_prompts=False).generation(prompts, sequences) == every


@pytest.mark.parametrize(
    "config, is_known",
    [
        (MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2), True),
        (Qwen3NextConfig(**SIZES, head_dim=4, num_experts=0, num_experts_per_tok=1), False),  # linear attention
        (MistralConfig(**SIZES, sliding_window=16), True),
        (MistralConfig(**SIZES, sliding_window=11), False),
        (Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=4), True),
    ],
    ids=["experts", "linear attention", "window of 16", "window of 11", "window not used"],
)
def test_operations_are_unknown_where_the_formula_is_not_the_model(config, is_known, tmp_path, flops):
    """The longer sequence has 12 tokens."""
    config.save_pretrained(tmp_path)
    actor = read_shape(str(tmp_path), field="models.actor", is_policy=True)
    found = replace(flops, shapes=replace(flops.shapes, actor=actor))
    values = (
        found.forward("actor", [5, 12], 7),
        found.update("actor", [5, 12], 7),
        found.generation({1: 2}, [(1, 5, 3), (1, 12, 10)]),
    )
    assert [value is not None for value in values] == [is_known] * 3
