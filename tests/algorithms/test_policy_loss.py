"""Policy losses by hand and by finite differences; test_loss.py has the properties of all elementwise losses."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.algorithms.policy_loss import policy_loss
from hybrid_rl.algorithms.specs import POLICY_LOSSES

GARBAGE = [math.nan, math.inf, -math.inf, 3e38, -7.5]


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value.sum(), x)[0]


def test_policy_loss_by_hand():
    # Clipped to [0.8, 1.3]: with A > 0 ratios above lose their gradient, with A < 0 ratios below; others keep it.
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])
    advantages = torch.tensor([2.0, 2, 2, -2, -2])
    losses, gradient = value_and_gradient(
        lambda x: policy_loss(x, torch.zeros(5), advantages, clip_low=0.2, clip_high=0.3)[0], ratio.log()
    )
    # -min(1*2, 1*2), -min(3, 1.3*2), -min(1, 0.8*2), -min(-3, 1.3*-2), -min(-1, 0.8*-2)
    assert losses.tolist() == pytest.approx([-2, -2.6, -1, 3, 1.6])
    assert gradient.tolist() == pytest.approx([-2, 0, -1, 3, 0])  # -rho A where not clipped
    _, is_clipped = policy_loss(ratio.log(), torch.zeros(5), advantages, clip_low=0.2, clip_high=0.3)
    assert is_clipped.tolist() == [False, True, False, False, True]


def test_dual_clip_by_hand():
    # c = 3. Only with A < 0 and a ratio above 3 does c * A = -6 replace rho * A.
    ratio = torch.tensor([5.0, 2, 0.5, 5, 0.5])
    advantages = torch.tensor([-2.0, -2, -2, 2, 2])

    def loss(logprobs: Tensor) -> tuple[Tensor, Tensor]:
        return policy_loss(logprobs, torch.zeros(5), advantages, clip_low=0.2, clip_high=0.3, dual_clip=3.0)

    losses, gradient = value_and_gradient(lambda x: loss(x)[0], ratio.log())
    assert losses.tolist() == pytest.approx([6, 4, 1.6, -2.6, -1])
    assert gradient.tolist() == pytest.approx([0, 4, 0, 0, -1])
    assert loss(ratio.log())[1].tolist() == [True, False, True, True, False]


def test_cispo_by_hand():
    ratio, logprobs = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5]), torch.tensor([-1.0, -2, -3, -4, -5])
    advantages = torch.tensor([2.0, 2, 2, -2, -2])

    def loss(logprobs: Tensor, old_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        return policy_loss(logprobs, old_logprobs, advantages, kind="cispo", clip_low=0.2, clip_high=0.3)

    losses, gradient = value_and_gradient(lambda x: loss(x, logprobs - ratio.log())[0], logprobs)
    # Weights 1, 1.3, 0.8, 1.3, 0.8 times -A logprob; each token keeps its gradient, -weight A.
    assert losses.tolist() == pytest.approx([2, 5.2, 4.8, -10.4, -8])
    assert gradient.tolist() == pytest.approx([-2, -2.6, -1.6, 2.6, 1.6])
    assert loss(logprobs, logprobs)[1].any().item() is False
    assert loss(logprobs, logprobs - ratio.log())[1].tolist() == [False, True, True, True, True]


def test_plain_policy_gradient_by_hand():
    logprobs, advantages = torch.tensor([-1.0, -2]), torch.tensor([3.0, -4])
    old_logprobs = torch.full((2,), math.nan)  # not read
    losses, gradient = value_and_gradient(
        lambda x: policy_loss(x, old_logprobs, advantages, kind="pg", clip_low=0.2, clip_high=0.2)[0], logprobs
    )
    assert losses.tolist() == [3, -8]
    assert gradient.tolist() == [-3, 4]
    assert not policy_loss(logprobs, old_logprobs, advantages, kind="pg", clip_low=0.2, clip_high=0.2)[1].any()


def gspo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, index: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Return GSPO's loss of packed tokens with bounds [0.8, 1.3]."""
    return policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        **{"kind": "gspo", "clip_low": 0.2, "clip_high": 0.3, "num_sequences": 4, **options},
        sequence_index=index,
    )


def test_gspo_by_hand():
    # Sequence 0: log-ratios ln 1.5, ln 1.5, ln 1.5; sequence 2: ln 4, ln 1/4; sequence 3: ln 0.5; none of sequence 1.
    index = torch.tensor([0, 2, 0, 3, 2, 0])
    ratio = torch.tensor([1.5, 4, 1.5, 0.5, 0.25, 1.5])
    advantages = torch.tensor([1.0, 2, -1, 3, -5, 1])
    losses, gradient = value_and_gradient(lambda x: gspo(x, torch.zeros(6), advantages, index)[0], ratio.log())
    # s = 1.5, 1, 0.5: clipped above for A > 0 in sequence 0; sequence 2 as on policy; 0.5 * 3 < 0.8 * 3.
    assert losses.tolist() == pytest.approx([-1.3, -2, 1.5, -1.5, 5, -1.3])
    assert gradient.tolist() == pytest.approx([0, -2, 1.5, -1.5, 5, 0])  # -s A_t where not clipped
    _, is_clipped = gspo(ratio.log(), torch.zeros(6), advantages, index)
    assert is_clipped.tolist() == [True, False, False, False, False, True]
    # With c = 1.2 the token with A = -1 and s = 1.5 counts 1.2.
    assert gspo(ratio.log(), torch.zeros(6), advantages, index, dual_clip=1.2)[0][2].item() == pytest.approx(1.2)


def test_gspo_has_the_gradient_of_the_ratio_of_the_sequence():
    # Where advantage and weight are the same along a sequence: of the value, which depends on every token's log-prob.
    index = torch.tensor([0, 0, 0, 1, 2, 2])
    advantages = torch.tensor([1.0, -2, 0.5], dtype=torch.float64)[index]
    weights = torch.tensor([1 / 9, 1 / 3, 1 / 6], dtype=torch.float64)[index]  # sequence_mean
    logprobs = torch.tensor([-0.1, 0.2, 0.05, -0.1, 0.9, -0.2], dtype=torch.float64, requires_grad=True)
    old_logprobs = torch.zeros(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: (weights * gspo(x, old_logprobs, advantages, index, num_sequences=3)[0]).sum(), (logprobs,)
    )


def test_gspo_of_one_token_each_is_clip():
    logprobs, old_logprobs, advantages = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    ours, gradient = value_and_gradient(
        lambda x: gspo(x, old_logprobs, advantages, torch.arange(9), num_sequences=9)[0], logprobs
    )
    clip, clip_gradient = value_and_gradient(
        lambda x: policy_loss(x, old_logprobs, advantages, clip_low=0.2, clip_high=0.3)[0], logprobs
    )
    torch.testing.assert_close(ours, clip, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, clip_gradient, rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sampled_from(GARBAGE), st.integers(0, 99))
def test_gspo_sequences_do_not_depend_on_each_other(sequences, garbage, seed):
    index = torch.tensor(sequences)
    logprobs, old_logprobs, advantages = torch.randn(3, len(index), generator=torch.Generator().manual_seed(seed))
    for sequence in set(sequences):
        rows = index == sequence
        dirty = [torch.where(rows, x, garbage) for x in (logprobs, old_logprobs, advantages)]
        value, gradient = value_and_gradient(
            lambda x, rows=rows, dirty=dirty: torch.where(rows, gspo(x, *dirty[1:], index)[0], 0), dirty[0]
        )
        alone, alone_gradient = value_and_gradient(
            lambda x, rows=rows: gspo(x, old_logprobs[rows], advantages[rows], index[rows])[0], logprobs[rows]
        )
        assert torch.equal(value[rows], alone) and torch.equal(gradient[rows], alone_gradient)
        assert not gradient[~rows].any()


def test_a_token_of_weight_zero_gets_no_gradient_from_its_sequence():
    index, x = torch.zeros(3, dtype=torch.int64), torch.tensor([0.1, -0.1, 0.05])
    _, gradient = value_and_gradient(
        lambda x: torch.tensor([1.0, 0, 1]) * gspo(x, torch.zeros(3), torch.ones(3), index)[0], x
    )
    assert (gradient != 0).tolist() == [True, False, True]


def test_all_tokens_of_a_sequence_have_one_ratio():
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(40) % 4
    logprobs = -30 * torch.rand(40, generator=generator)
    old_logprobs = logprobs + 1e-3 * torch.randn(40, generator=generator)
    losses, _ = gspo(logprobs, old_logprobs, torch.ones(40), index)  # minus the ratio: all lie within the bounds
    for sequence in range(4):
        assert len(losses[index == sequence].unique()) == 1
    assert len(losses.unique()) == 4


def test_gspo_of_no_tokens():
    nothing, index = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    losses, gradient = value_and_gradient(lambda x: gspo(x, nothing, nothing, index)[0], nothing)
    assert losses.shape == gradient.shape == (0,)


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(kind):
    logprobs, advantages = torch.randn(2, 28, generator=torch.Generator().manual_seed(0))
    losses, gradient = value_and_gradient(
        lambda x: gspo(x, logprobs, advantages, torch.arange(28) % 4, kind=kind)[0], logprobs
    )
    assert torch.equal(gradient, -advantages)
    assert torch.equal(losses, -advantages if kind in ("clip", "gspo") else -advantages * logprobs)


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_loss_of_extreme_ratios_is_finite(kind, dtype):
    # Ratios of exp(+-80) under both signs of the advantage, in one sequence each.
    logprobs = torch.tensor([0, -80, 0, -80], dtype=dtype)
    advantages, index = torch.tensor([1.0, 1, -1, -1]), torch.arange(4)
    losses, gradient = value_and_gradient(
        lambda x: gspo(x, logprobs.flip(0), advantages, index, kind=kind)[0].float(), logprobs
    )
    assert losses.isfinite().all() and gradient.isfinite().all()
    assert policy_loss(logprobs, logprobs, advantages, kind="pg", clip_low=0, clip_high=0)[0].dtype == torch.float32


def test_loss_of_extreme_ratios_by_hand():
    logprobs = torch.tensor([0.0, -1e3, 0, -1e3])
    advantages = torch.tensor([1.0, 1, -1, -1])
    losses, gradient = value_and_gradient(
        lambda x: policy_loss(x, -1e3 - logprobs, advantages, clip_low=0.2, clip_high=0.2)[0], logprobs
    )
    # Ratios exp(20), exp(-20), exp(20), exp(-20): clipped for A > 0 above and A < 0 below, bounded elsewhere.
    assert losses.tolist() == pytest.approx([-1.2, -math.exp(-20), math.exp(20), 0.8], rel=1e-5)
    assert not gradient.any()


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_policy_loss_passes_nan_on(kind, place):
    inputs = [torch.zeros(2), torch.zeros(2), torch.ones(2)]
    inputs[place][1] = math.nan
    loss, _ = gspo(*inputs, torch.arange(2), kind=kind)
    assert loss.isnan().tolist() == [False, not (kind == "pg" and place == 1)]  # pg does not read old_logprobs


def test_policy_losses_have_the_gradient_of_finite_differences():
    x = torch.tensor([-0.9, -0.1, 0.05, 0.7], dtype=torch.float64, requires_grad=True)
    y = torch.zeros_like(x)
    for advantages in (torch.ones_like(x), -torch.ones_like(x)):
        for options in ({}, {"dual_clip": 1.5}, {"kind": "pg"}):
            assert torch.autograd.gradcheck(
                lambda x, a=advantages, o=options: policy_loss(x, y, a, clip_low=0.2, clip_high=0.2, **o)[0], (x,)
            )


def test_the_wrong_input_is_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"advantages \[2, 1\]"):
        policy_loss(x, x, x[:, :1], clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match="clip, gspo, cispo, pg, got 'ppo'"):
        policy_loss(x, x, x, kind="ppo", clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match=r"dual_clip must be above 1 .* got 1\.0 for clip"):
        policy_loss(x, x, x, clip_low=0.2, clip_high=0.2, dual_clip=1.0)
    with pytest.raises(ValueError, match=r"got 3\.0 for cispo"):
        policy_loss(x, x, x, kind="cispo", clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    with pytest.raises(ValueError, match="gspo needs the sequence"):
        policy_loss(x, x, x, kind="gspo", clip_low=0.2, clip_high=0.2)
    with pytest.raises(ValueError, match=r"sequence_index \[2\]"):
        gspo(x, x, x, torch.zeros(2, dtype=torch.int64))
