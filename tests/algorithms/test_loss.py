"""The value loss, the aggregation of token losses, and properties of every elementwise loss."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.algorithms.kl import kl_estimate, kl_loss
from hybrid_rl.algorithms.loss import aggregate, token_weights, value_loss
from hybrid_rl.algorithms.policy_loss import policy_loss

MODES = ["token_mean", "sequence_mean", "sequence_sum_constant"]
GARBAGE = [math.nan, math.inf, -math.inf, 3e38, -7.5]
TOKEN_LOSSES: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "k1": (2, lambda x, y: kl_estimate(x, y, "k1")),
    "k2": (2, lambda x, y: kl_estimate(x, y, "k2")),
    "k3": (2, lambda x, y: kl_estimate(x, y, "k3")),
    "kl loss": (3, lambda x, y, z: kl_loss(x, y, z, "k3", unbiased=False)),
    "unbiased k1": (3, lambda x, y, z: kl_loss(x, y, z, "k1", unbiased=True)),
    "unbiased k2": (3, lambda x, y, z: kl_loss(x, y, z, "k2", unbiased=True)),
    "unbiased k3": (3, lambda x, y, z: kl_loss(x, y, z, "k3", unbiased=True)),
    "clip": (3, lambda x, y, z: policy_loss(x, y, z, clip_low=0.2, clip_high=0.3)[0]),
    "dual clip": (3, lambda x, y, z: policy_loss(x, y, z, clip_low=0.2, clip_high=0.3, dual_clip=1.5)[0]),
    "cispo": (3, lambda x, y, z: policy_loss(x, y, z, kind="cispo", clip_low=0.2, clip_high=0.3)[0]),
    "pg": (3, lambda x, y, z: policy_loss(x, y, z, kind="pg", clip_low=0.2, clip_high=0.3)[0]),
    "value": (3, lambda x, y, z: value_loss(x, y, z, value_clip=0.5)[0]),
    "value, not clipped": (3, lambda x, y, z: value_loss(x, y, z, value_clip=None)[0]),
}
"""Each loss of one token: how many tensors it takes, the first with gradient, and itself."""


def random_mask(B: int, T: int, generator: torch.Generator) -> Tensor:
    """Return a mask of right-padded rows whose lengths run from 0 to T."""
    return torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=generator)


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


def test_value_loss_by_hand():
    values, old_values, returns = torch.tensor([[1.0, 2, 2], [0, 3, 1], [3, 0, 1]]).unbind(1)
    losses, gradient = value_and_gradient(lambda x: value_loss(x, old_values, returns, value_clip=0.5)[0], values)
    # V 1, old 2: clipped to 1.5; R 2: max(1, 0.25) / 2. V 0, old 3: 2.5; R 1: max(1, 2.25) / 2.
    # V 3, old 0: 0.5; R 1: max(4, 0.25) / 2.
    assert losses.tolist() == [0.5, 1.125, 2]
    assert gradient.tolist() == [-1, 0, 2]  # V - R where not clipped
    assert value_loss(values, old_values, returns, value_clip=0.5)[1].tolist() == [False, True, False]
    unclipped, is_clipped = value_loss(values, old_values, returns, value_clip=None)
    assert unclipped.tolist() == [0.5, 0.5, 2] and not is_clipped.any()


def test_value_loss_has_the_gradient_of_finite_differences():
    x = torch.tensor([-0.9, -0.1, 0.05, 0.7], dtype=torch.float64, requires_grad=True)
    y = torch.zeros_like(x)
    for z in (torch.ones_like(x), -torch.ones_like(x)):
        assert torch.autograd.gradcheck(lambda x, z=z: value_loss(x, y, z, value_clip=0.5)[0], (x,))


def test_aggregate_by_hand():
    losses = torch.tensor([[1.0, 2, 3], [4, 9, 9], [9, 9, 9]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert aggregate(losses, mask, "token_mean").item() == 2.5  # (1+2+3+4) / 4
    assert aggregate(losses, mask, "sequence_mean").item() == 3  # ((1+2+3)/3 + 4/1) / 2, the empty row does not count
    assert aggregate(losses, mask, "sequence_sum_constant").item() == pytest.approx(10 / (2 * 3))  # longest is 3
    assert aggregate(losses, mask, "token_mean", num_tokens=20).item() == 0.5
    assert aggregate(losses, mask, "sequence_mean", num_sequences=torch.tensor(12)).item() == 0.5
    constant = aggregate(losses, mask, "sequence_sum_constant", num_sequences=4, max_response_tokens=5)
    assert constant.item() == 0.5  # 10 / (4*5)


@pytest.mark.parametrize("mode", MODES)
def test_parts_with_global_normalisers_add_up_to_the_whole(mode):
    generator = torch.Generator().manual_seed(0)
    mask = random_mask(9, 11, generator)
    losses = torch.randn(9, 11, generator=generator)
    assert not mask.any(1).all() and mask.any()  # empty rows take part
    whole = aggregate(losses, mask, mode, max_response_tokens=11)
    counts = {"num_tokens": mask.sum(), "num_sequences": float(mask.any(1).sum()), "max_response_tokens": 11}
    for size in (1, 2, 4):
        total = torch.zeros(())
        for part, part_mask in zip(losses.split(size), mask.split(size), strict=True):
            width = int(part_mask.sum(1).max())  # a micro-batch is padded to its own longest row
            total += aggregate(part[:, :width], part_mask[:, :width], mode, **counts)
        torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_packed_equals_padded(mode):
    generator = torch.Generator().manual_seed(1)
    mask = random_mask(6, 9, generator)
    logprobs, old_logprobs, advantages = torch.randn(3, 6, 9, generator=generator)
    weights = token_weights(mask, mode)

    def loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        return policy_loss(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.2)[0]

    padded, gradient = value_and_gradient(lambda x: aggregate(loss(x, old_logprobs, advantages), mask, mode), logprobs)
    packed, packed_gradient = value_and_gradient(
        lambda x: (weights[mask] * loss(x, old_logprobs[mask], advantages[mask])).sum(), logprobs[mask]
    )
    torch.testing.assert_close(packed, padded)
    assert torch.equal(packed_gradient, gradient[mask])
    assert not gradient[~mask].any()


@pytest.mark.parametrize("mode", MODES)
def test_padding_columns_change_nothing(mode):
    losses, mask = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4)
    padded, padded_mask = (torch.nn.functional.pad(x, (0, 5)) for x in (losses, mask))
    torch.testing.assert_close(aggregate(padded, padded_mask, mode), aggregate(losses, mask, mode))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(TOKEN_LOSSES)), st.sampled_from(MODES), st.sampled_from(GARBAGE), st.integers(0, 99))
def test_masked_slots_change_no_bit(name, mode, garbage, seed):
    num_inputs, token_loss = TOKEN_LOSSES[name]
    generator = torch.Generator().manual_seed(seed)
    mask = random_mask(4, 6, generator)
    inputs = torch.randn(num_inputs, 4, 6, generator=generator)
    expected, expected_gradient = value_and_gradient(
        lambda x: aggregate(token_loss(x, *inputs[1:]), mask, mode), inputs[0]
    )
    for place in range(num_inputs):  # garbage in the tensors so far, and finite but in one
        inputs[place][~mask] = garbage
        for dirty in (
            inputs,
            torch.stack([inputs[i] if i == place else inputs[i].nan_to_num() for i in range(num_inputs)]),
        ):
            value, gradient = value_and_gradient(
                lambda x, dirty=dirty: aggregate(token_loss(x, *dirty[1:]), mask, mode), dirty[0]
            )
            assert torch.equal(value, expected)
            assert torch.equal(gradient, expected_gradient)
    assert not expected_gradient[~mask].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_without_tokens_the_loss_is_zero(mode, shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    value, gradient = value_and_gradient(lambda x: aggregate(x, mask, mode), torch.full(shape, math.nan))
    assert value.item() == 0
    assert not gradient.any()
    assert token_weights(mask, mode, num_tokens=0, num_sequences=0, max_response_tokens=4).count_nonzero() == 0


def test_the_wrong_input_is_named():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"returns \[3\]"):
        value_loss(x, x, x[0], value_clip=None)
    with pytest.raises(ValueError, match=r"token_loss \[2, 1\]"):
        aggregate(x[:, :1], mask, "token_mean")
    with pytest.raises(ValueError, match="token_mean, sequence_mean or sequence_sum_constant"):
        aggregate(x, mask, "mean")
