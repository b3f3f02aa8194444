"""The maths of advantages by hand: returns, GAE, penalties, whitening."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.algorithms.advantage import (
    discounted_returns,
    gae_advantages,
    length_adaptive_lambda,
    moments,
    overlong_penalty,
    turn_ends,
    whiten,
)
from hybrid_rl_kernels import Advantages, merge_moments

GARBAGE = [math.nan, math.inf, -math.inf, 3e38, -7.5]
# With pad id == EOS id == 2: `5 6 2 2 2`, truncated `5 6 7 8 9`, `2 2 2 2 2` of length 1, and an empty response.
LENGTHS_MASK = torch.arange(5) < torch.tensor([3, 5, 1, 0])[:, None]


def random_batch(seed: int, B: int = 4, T: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Return two float [B, T] tensors and a mask of right-padded rows, some possibly empty."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, B, T, generator=generator)
    return x, y, torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=generator)


def both(estimates: Advantages) -> tuple[Tensor, Tensor]:
    return estimates.advantages, estimates.returns


def paid(rewards: Tensor, mask: Tensor, **kl: Tensor | float) -> list[list[float]]:
    """Return the reward of each token: with gamma 0, the discounted return."""
    return discounted_returns(rewards, mask, gamma=0, **kl).advantages.tolist()


def test_reward_is_paid_on_the_last_sampled_token():
    assert paid(torch.tensor([1.0, 2, 3, 4]), LENGTHS_MASK) == [
        [0, 0, 1, 0, 0],
        [0, 0, 0, 0, 2],
        [3, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert paid(torch.tensor([1.0]), torch.tensor([[1, 0, 1, 0]])) == [[0, 0, 1, 0]]  # behind a gap


def test_kl_is_subtracted_on_every_token():
    kl = torch.tensor([[1.0, 2, 3, 4, 5]] * 4)
    # Row 0 with coefficient 0.5: -0.5*1, -0.5*2, 1 - 0.5*3; the empty row gets nothing.
    assert paid(torch.ones(4), LENGTHS_MASK, kl=kl, kl_coef=0.5) == [
        [-0.5, -1, -0.5, 0, 0],
        [-0.5, -1, -1.5, -2, -1.5],
        [0.5, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]


def test_rewards_and_kl_give_what_their_token_rewards_give():
    kl, values, mask = random_batch(7)
    scores, options = torch.tensor([1.0, -2, 3, 4]), {"gamma": 0.9, "gae_lambda": 0.8}
    shaped = gae_advantages(scores, values, mask, kl=kl, kl_coef=0.3, **options)
    per_token = torch.tensor(paid(scores, mask, kl=kl, kl_coef=0.3))
    plain = gae_advantages(None, values, mask, token_rewards=per_token, **options)
    torch.testing.assert_close(shaped.advantages, plain.advantages)
    torch.testing.assert_close(shaped.returns, plain.returns)
    torch.testing.assert_close(shaped.moments, moments(shaped.advantages, mask))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.sampled_from(GARBAGE))
def test_masked_slots_change_no_bit(seed, garbage):
    x, values, mask = random_batch(seed)
    clean = [torch.where(mask, x, 0), torch.where(mask, values, 0), torch.where(mask.any(1), x[:, 0], 0)]
    dirty = [torch.where(mask, x, garbage), torch.where(mask, values, garbage)]
    dirty.append(torch.where(mask.any(1), x[:, 0], garbage))
    runs = [
        (
            discounted_returns(scores, mask, gamma=0.9, kl=kl, kl_coef=0.1).advantages,
            *both(
                gae_advantages(None, values, mask, token_rewards=kl, gamma=0.9, gae_lambda=0.8, bootstrap_values=scores)
            ),
            discounted_returns(None, mask, token_rewards=kl, gamma=0.9).advantages,
            whiten(kl, mask),
        )
        for kl, values, scores in (clean, dirty)
    ]
    for expected, ours in zip(*runs, strict=True):
        assert torch.equal(ours, expected)
        assert not ours[~mask].any()


def test_gae_by_hand():
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards, values = torch.tensor([[0.0, 0, 1]]), torch.tensor([[0.5, 1, 2]])
    # gamma = lambda = 0.5. A_2 = 1 - 2; A_1 = (0.5*2 - 1) + 0.25*A_2; A_0 = (0.5*1 - 0.5) + 0.25*A_1; return = A + V
    advantages, returns = both(gae_advantages(None, values, mask, token_rewards=rewards, gamma=0.5, gae_lambda=0.5))
    assert advantages.tolist() == [[-0.0625, -0.25, -1]]
    assert returns.tolist() == [[0.4375, 0.75, 1]]


# A conversation of two turns: tokens 0 and 1 are sampled, 2 and 3 are an observation, 4 and 5 are sampled
CONVERSATION = torch.tensor([[1, 1, 0, 0, 1, 1]]).bool()
TURNS = torch.tensor([[0, 0, 0, 0, 1, 1]])


def test_gae_over_an_observation_by_hand():
    values, rewards = torch.tensor([[1.0, 2, math.nan, math.nan, 4, 2]]), torch.tensor([3.0])
    per_turn = torch.tensor([[0.0, 1, math.nan, math.nan, 0, 0]])
    found = gae_advantages(rewards, values, CONVERSATION, token_rewards=per_turn, gamma=0.5, gae_lambda=0.5)
    # A_5 = 3 - 2 = 1. A_4 = 0.5*2 - 4 + 0.25*1 = -2.75. The value 4, which knows the observation, bootstraps token 1:
    # A_1 = 1 + 0.5*4 - 2 + 0.25*-2.75 = 0.3125. A_0 = 0.5*2 - 1 + 0.25*0.3125 = 0.078125.
    assert found.advantages.tolist() == [[0.078125, 0.3125, 0, 0, -2.75, 1]]
    assert found.returns.tolist() == [[1.078125, 2.3125, 0, 0, 1.25, 3]]
    assert found.moments[0] == 4


def test_turn_gamma_discounts_once_per_turn_by_hand():
    values, rewards = torch.tensor([[1.0, 2, 9, 9, 4, 2]]), torch.tensor([3.0])
    options = {"gamma": 0.5, "gae_lambda": 0.5, "turn_ids": TURNS, "turn_gamma": 0.5}
    found = gae_advantages(rewards, values, CONVERSATION, **options)
    # Between the turns gamma is 0.25: A_1 = 0.25*4 - 2 + 0.125*-2.75 = -1.34375, A_0 = 0.5*2 - 1 + 0.25*A_1.
    assert found.advantages.tolist() == [[-0.3359375, -1.34375, 0, 0, -2.75, 1]]
    returns = discounted_returns(rewards, CONVERSATION, gamma=1.0, turn_ids=TURNS, turn_gamma=0.5)
    assert returns.advantages.tolist() == [[1.5, 1.5, 0, 0, 3, 3]]


def test_a_turn_ends_where_the_next_sampled_token_is_of_another_turn():
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]])
    turns = torch.tensor([[0, 0, 9, 1, 2, 7], [0, 0, 0, 0, 7, 7], [5, 0, 5, 5, 1, 5], [0, 1, 2, 3, 4, 5]])
    expected = [[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    assert turn_ends(turns, mask).int().tolist() == expected


def test_kl_in_the_reward_over_an_observation_by_hand():
    kl = torch.tensor([[1.0, 2, math.nan, math.nan, 3, 4]])
    assert paid(torch.tensor([1.0]), CONVERSATION, kl=kl, kl_coef=0.5) == [[-0.5, -1, 0, 0, -1.5, -1]]
    to_come = discounted_returns(torch.tensor([1.0]), CONVERSATION, gamma=1, kl=kl, kl_coef=0.5).advantages
    assert to_come.tolist() == [[-4, -3.5, 0, 0, -2.5, -1]]


def test_gae_with_a_lambda_per_row_by_hand():
    rewards, mask = torch.tensor([[0.0, 0, 1], [0, 0, 1]]), torch.ones(2, 3, dtype=torch.bool)
    lambdas = torch.tensor([0.5, 1])
    # Values are 0, so A_t = R_t + gamma * lambda * A_{t+1}, with a factor of 0.25 and of 0.5.
    advantages, _ = both(
        gae_advantages(None, torch.zeros(2, 3), mask, token_rewards=rewards, gamma=0.5, gae_lambda=lambdas)
    )
    assert advantages.tolist() == [[0.0625, 0.25, 1], [0.25, 0.5, 1]]


def test_length_adaptive_lambda_by_hand():
    # alpha 0.5 and lengths 3, 5, 1, 0: 1 - 1/1.5, 1 - 1/2.5, then 1 - 1/0.5 = -1 and minus infinity, both clamped to 0.
    lambdas = length_adaptive_lambda(LENGTHS_MASK, 0.5)
    assert lambdas.dtype == torch.float32
    assert lambdas.tolist() == pytest.approx([1 / 3, 0.6, 0, 0])
    assert length_adaptive_lambda(torch.tensor([[1, 0, 1, 0]]), 1.0).tolist() == [0.5]  # a gap is no token
    assert length_adaptive_lambda(torch.ones(1, 400), 0.05).item() == pytest.approx(0.95)  # VAPO's alpha: 1 - 1/20
    with pytest.raises(ValueError, match="alpha must be greater than 0, got 0"):
        length_adaptive_lambda(LENGTHS_MASK, 0)


def test_discounted_returns_by_hand():
    rewards = torch.tensor([[1.0, 2, 4, 9], [1, 9, 4, 9], [9, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    # gamma 0.5. Row 0: 4, 2 + 0.5*4, 1 + 0.5*4. Row 1 skips its gap: 4, 1 + 0.5*4.
    returns = discounted_returns(None, mask, token_rewards=rewards, gamma=0.5).advantages
    assert returns.tolist() == [[3, 4, 4, 0], [3, 0, 4, 0], [0, 0, 0, 0]]


def test_undiscounted_reward_reaches_every_token():
    returns = discounted_returns(torch.tensor([1.0, 2, 3, 4]), LENGTHS_MASK, gamma=1).advantages
    assert returns.tolist() == [[1, 1, 1, 0, 0], [2, 2, 2, 2, 2], [3, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_discounted_returns_name_the_wrong_input():
    x = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\], got 1.5"):
        discounted_returns(None, x, token_rewards=x, gamma=1.5)
    with pytest.raises(ValueError, match=r"turn_gamma must lie in \[0, 1\], got -1"):
        discounted_returns(None, x, token_rewards=x, gamma=1, turn_gamma=-1)
    with pytest.raises(ValueError, match=r"response_mask \[1, 2\]"):
        discounted_returns(None, x[:1], token_rewards=x, gamma=1)
    with pytest.raises(ValueError, match=r"turn_ids \[1, 2\]"):
        discounted_returns(None, x, token_rewards=x, gamma=1, turn_ids=x[:1].long(), turn_gamma=0.5)
    with pytest.raises(ValueError, match="token_rewards is nan in row 0, token 1"):
        discounted_returns(None, torch.ones(1, 2), token_rewards=torch.tensor([[0, math.nan]]), gamma=1)


def test_overlong_penalty_by_hand():
    # Limit 10, buffer 4: nothing up to 6, then a quarter per token, all of it at 10 and beyond.
    lengths = torch.tensor([0, 6, 7, 9, 10, 25])
    penalties = overlong_penalty(lengths, max_response_tokens=10, buffer=4, penalty=2.0)
    assert penalties.dtype == torch.float32
    assert penalties.tolist() == [0, 0, -0.5, -1.5, -2, -2]
    with pytest.raises(ValueError, match=r"buffer must lie in 1..max_response_tokens = 10, got 11"):
        overlong_penalty(lengths, max_response_tokens=10, buffer=11, penalty=1)
    with pytest.raises(ValueError, match="buffer must lie"):
        overlong_penalty(lengths, max_response_tokens=10, buffer=0, penalty=1)
    with pytest.raises(ValueError, match="penalty must not be negative, got -1"):
        overlong_penalty(lengths, max_response_tokens=10, buffer=4, penalty=-1)


def test_rows_do_not_depend_on_each_other():
    rewards, values, mask = random_batch(3)
    bootstrap = torch.linspace(-1, 1, len(mask))
    options = {"gamma": 0.9, "gae_lambda": 0.8}
    together = both(gae_advantages(None, values, mask, token_rewards=rewards, bootstrap_values=bootstrap, **options))
    for b, length in enumerate(mask.sum(1)):
        alone = (x[b : b + 1, :length] for x in (values, mask))
        own = {"token_rewards": rewards[b : b + 1, :length], "bootstrap_values": bootstrap[b : b + 1]}
        results = gae_advantages(None, *alone, **own, **options)
        for ours, expected in zip(together, both(results), strict=True):
            assert torch.equal(ours[b, :length], expected[0])


def test_advantages_carry_no_gradient():
    rewards, values, mask = random_batch(0)
    advantages, returns = both(
        gae_advantages(None, values.requires_grad_(), mask, token_rewards=rewards, gamma=1, gae_lambda=0.95)
    )
    assert not advantages.requires_grad and not returns.requires_grad


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gamma": 1.5}, "gamma must lie"),
        ({"gae_lambda": -0.1}, "gae_lambda must lie"),
        ({"gae_lambda": torch.tensor([0.5, 1.5])}, r"gae_lambda must lie in \[0, 1\], got 1.5 in row 1"),
        ({"gae_lambda": torch.tensor([math.nan, 1])}, "got nan in row 0"),
        ({"gae_lambda": torch.ones(3)}, "gae_lambda must be"),
        ({"values": torch.ones(2, 1)}, r"values \[2, 1\]"),
        ({"bootstrap_values": torch.ones(3)}, "bootstrap_values"),
        ({"bootstrap_values": torch.tensor([0, math.inf])}, "bootstrap_values is inf in row 1"),
        ({"values": torch.tensor([[0.0, 0], [0, math.nan]])}, "values is nan in row 1, token 1"),
        ({"token_rewards": torch.tensor([[0, -math.inf], [0, 0]])}, "token_rewards is -inf in row 0, token 1"),
        ({"turn_gamma": 1.5}, r"turn_gamma must lie in \[0, 1\], got 1.5"),
    ],
)
def test_gae_names_the_wrong_input(changes, message):
    x = torch.ones(2, 2)
    good = {"rewards": x[0], "token_rewards": x, "values": x, "response_mask": x.bool(), "gamma": 1, "gae_lambda": 1}
    with pytest.raises(ValueError, match=message):
        gae_advantages(**{**good, **changes})


def test_wrong_rewards_and_kl_are_named():
    with pytest.raises(ValueError, match="rewards is nan in row 2"):
        paid(torch.tensor([0, 0, math.nan, math.nan]), LENGTHS_MASK)
    kl = torch.zeros(4, 5)
    kl[1, 4] = math.inf
    with pytest.raises(ValueError, match="kl is inf in row 1, token 4"):
        paid(torch.zeros(4), LENGTHS_MASK, kl=kl, kl_coef=0.1)
    with pytest.raises(ValueError, match="kl is None"):
        paid(torch.zeros(4), LENGTHS_MASK, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"rewards \[3\]"):
        paid(torch.zeros(3), LENGTHS_MASK)
    with pytest.raises(ValueError, match=r"rewards \[4, 1\]"):
        paid(torch.zeros(4, 1), LENGTHS_MASK)


def test_whiten_by_hand():
    x = torch.tensor([[1.0, 2, 9], [6, 9, 9]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert moments(x, mask).tolist() == pytest.approx([3, 3, 14])  # squared deviations 4 + 1 + 9
    # 1 2 6: mean 9/3 = 3, variance 41/3 - 9 = 14/3 (population), so -2 -1 3 over its root.
    std = math.sqrt(14 / 3)
    expected = torch.tensor([[-2 / std, -1 / std, 0], [3 / std, 0, 0]])
    torch.testing.assert_close(whiten(x, mask), expected, rtol=1e-6, atol=0)


@settings(max_examples=40, deadline=None)
@given(st.floats(-1e30, 1e30), st.integers(0, 3000), st.sampled_from([torch.float32, torch.float64]))
@example(0.1, 3, torch.float64)  # 0.1 + 0.1 + 0.1 is not 3 * 0.1
def test_equal_entries_whiten_to_zero(value, count, dtype):
    x = torch.full((3, 1000), value, dtype=dtype)
    assert not whiten(x, torch.arange(3000).view(3, 1000) < count).any()


def test_whiten_survives_a_large_offset():
    # Two units apart at a million: rounding of the sums must not swallow it. Mean 1e6 + 1, std 1.
    x = torch.tensor([[1e6, 1e6 + 2]])
    assert whiten(x, torch.ones(1, 2, dtype=torch.bool)).tolist()[0] == pytest.approx([-1, 1], rel=1e-2)


def test_whitening_with_merged_moments_spans_ranks():
    x, _, mask = random_batch(5, B=6)
    both = merge_moments(torch.stack([moments(x[:2], mask[:2]), moments(x[2:], mask[2:])]))
    parts = torch.cat([whiten(x[:2], mask[:2], both), whiten(x[2:], mask[2:], both)])
    torch.testing.assert_close(parts, whiten(x, mask))
    assert parts[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert parts[mask].var(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_whiten_passes_nan_on():
    assert whiten(torch.tensor([[1, math.nan, 2]]), torch.ones(1, 3, dtype=torch.bool)).isnan().all()
