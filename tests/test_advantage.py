import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl.advantage import ESTIMATORS, gae_advantages, group_advantages, masked_sums, token_rewards, whiten

GARBAGE = [math.nan, math.inf, -math.inf, 3e38, -7.5]
# pad id == EOS id == 2: `5 6 2 2 2`, cut `5 6 7 8 9`, `2 2 2 2 2` of length 1, and an empty response.
LENGTHS_MASK = torch.arange(5) < torch.tensor([3, 5, 1, 0])[:, None]


def random_batch(seed: int, B: int = 4, T: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Return two float [B, T] tensors and a mask of right-padded rows, some possibly empty."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, B, T, generator=generator)
    return x, y, torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=generator)


def test_score_stands_on_the_last_sampled_token():
    rewards = torch.tensor([1.0, 2, 3, 4])
    assert token_rewards(rewards, LENGTHS_MASK).tolist() == [
        [0, 0, 1, 0, 0],
        [0, 0, 0, 0, 2],
        [3, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert token_rewards(torch.tensor([1.0]), torch.tensor([[1, 0, 1, 0]])).tolist() == [[0, 0, 1, 0]]  # behind a gap


def test_kl_is_subtracted_on_every_token():
    kl = torch.tensor([[1.0, 2, 3, 4, 5]] * 4)
    # Row 0 with coefficient 0.5: -0.5*1, -0.5*2, 1 - 0.5*3; the empty row gets nothing.
    result = token_rewards(torch.ones(4), LENGTHS_MASK, kl=kl, kl_coef=0.5)
    assert result.tolist() == [
        [-0.5, -1, -0.5, 0, 0],
        [-0.5, -1, -1.5, -2, -1.5],
        [0.5, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 99), st.sampled_from(GARBAGE))
def test_masked_slots_change_no_bit(seed, garbage):
    x, values, mask = random_batch(seed)
    clean = [torch.where(mask, x, 0), torch.where(mask, values, 0), torch.where(mask.any(1), x[:, 0], 0)]
    dirty = [torch.where(mask, x, garbage), torch.where(mask, values, garbage)]
    dirty.append(torch.where(mask.any(1), x[:, 0], garbage))
    runs = [
        (
            token_rewards(scores, mask, kl=kl, kl_coef=0.1),
            *gae_advantages(kl, values, mask, gamma=0.9, gae_lambda=0.8, bootstrap_values=scores),
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
    advantages, returns = gae_advantages(rewards, values, mask, gamma=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [[-0.0625, -0.25, -1]]
    assert returns.tolist() == [[0.4375, 0.75, 1]]


def test_rows_do_not_know_of_each_other():
    rewards, values, mask = random_batch(3)
    bootstrap = torch.linspace(-1, 1, len(mask))
    together = gae_advantages(rewards, values, mask, gamma=0.9, gae_lambda=0.8, bootstrap_values=bootstrap)
    for b, length in enumerate(mask.sum(1)):
        alone = (x[b : b + 1, :length] for x in (rewards, values, mask))
        results = gae_advantages(*alone, gamma=0.9, gae_lambda=0.8, bootstrap_values=bootstrap[b : b + 1])
        for ours, expected in zip(together, results, strict=True):
            assert torch.equal(ours[b, :length], expected[0])


def test_advantages_carry_no_gradient():
    rewards, values, mask = random_batch(0)
    advantages, returns = gae_advantages(rewards, values.requires_grad_(), mask, gamma=1, gae_lambda=0.95)
    assert not advantages.requires_grad and not returns.requires_grad


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gamma": 1.5}, "gamma must lie"),
        ({"gae_lambda": -0.1}, "gae_lambda must lie"),
        ({"values": torch.ones(2, 1)}, r"values \[2, 1\]"),
        ({"bootstrap_values": torch.ones(3)}, "bootstrap_values"),
        ({"bootstrap_values": torch.tensor([0, math.inf])}, "bootstrap_values is inf in row 1"),
        ({"values": torch.tensor([[0.0, 0], [0, math.nan]])}, "values is nan in row 1, token 1"),
        ({"token_rewards": torch.tensor([[0, -math.inf], [0, 0]])}, "token_rewards is -inf in row 0, token 1"),
    ],
)
def test_gae_names_what_is_wrong(changes, message):
    x = torch.ones(2, 2)
    good = {"token_rewards": x, "values": x, "response_mask": x.bool(), "gamma": 1, "gae_lambda": 1}
    with pytest.raises(ValueError, match=message):
        gae_advantages(**{**good, **changes})


def test_token_rewards_names_what_is_wrong():
    with pytest.raises(ValueError, match="rewards is nan in row 2"):
        token_rewards(torch.tensor([0, 0, math.nan, math.nan]), LENGTHS_MASK)
    kl = torch.zeros(4, 5)
    kl[1, 4] = math.inf
    with pytest.raises(ValueError, match="kl is inf in row 1, token 4"):
        token_rewards(torch.zeros(4), LENGTHS_MASK, kl=kl, kl_coef=0.1)
    with pytest.raises(ValueError, match="kl is None"):
        token_rewards(torch.zeros(4), LENGTHS_MASK, kl_coef=0.1)
    with pytest.raises(ValueError, match=r"rewards \[4, 1\]"):
        token_rewards(torch.zeros(4, 1), LENGTHS_MASK)


def test_whiten_by_hand():
    x = torch.tensor([[1.0, 2, 9], [6, 9, 9]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert masked_sums(x, mask).tolist() == [3, 9, 41]
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
    # One unit apart at a million: rounding of the sums must not swallow it. Mean 1e6 + 0.5, std 0.5.
    assert whiten(torch.tensor([1e6, 1e6 + 1]), torch.ones(2)).tolist() == pytest.approx([-1, 1], rel=1e-2)


def test_whitening_spans_ranks():
    x, _, mask = random_batch(5, B=6)
    sums = masked_sums(x[:2], mask[:2]) + masked_sums(x[2:], mask[2:])
    parts = torch.cat([whiten(x[:2], mask[:2], sums), whiten(x[2:], mask[2:], sums)])
    torch.testing.assert_close(parts, whiten(x, mask))
    assert parts[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert parts[mask].var(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_whiten_shows_nan():
    assert whiten(torch.tensor([1, math.nan, 2]), torch.tensor([True, True, True])).isnan().all()


@pytest.mark.parametrize(
    "estimator, expected",
    [
        ("grpo", [-2 / (math.sqrt(7) + 1e-6), -1 / (math.sqrt(7) + 1e-6), 3 / (math.sqrt(7) + 1e-6)]),  # (4 + 1 + 9)/2
        ("rloo", [1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2]),
        ("dr_grpo", [1 - 3, 2 - 3, 6 - 3]),
    ],
)
def test_group_advantages_by_hand(estimator, expected):
    # Rewards 1 2 6 (mean 3) of group 7 lie between those of group 4, which are equal and say nothing.
    rewards, group_ids = torch.tensor([0.1, 1, 2, 0.1, 6, 0.1]), torch.tensor([4, 7, 7, 4, 7, 4])
    advantages = group_advantages(rewards, group_ids, estimator=estimator)
    assert advantages.dtype == torch.float32
    assert advantages[[1, 2, 4]].tolist() == pytest.approx(expected, rel=1e-6)
    assert advantages[[0, 3, 5]].tolist() == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from(sorted(ESTIMATORS)), st.randoms(), st.data()
)
def test_order_of_responses_and_other_groups_change_nothing(groups, estimator, random, data):
    group_ids = [group for group in sorted(set(groups)) for _ in range(groups.count(group) + 1)]
    random.shuffle(group_ids)
    values = st.floats(-100, 100, width=32)
    rewards = torch.tensor(data.draw(st.lists(values, min_size=len(group_ids), max_size=len(group_ids))))
    ids = torch.tensor(group_ids)
    together = group_advantages(rewards, ids, estimator=estimator)
    for group in set(groups):
        alone = group_advantages(rewards[ids == group], ids[ids == group], estimator=estimator)
        assert torch.equal(together[ids == group], alone)
        assert abs(alone.double().sum().item()) <= 1e-4 * max(1, alone.abs().max().item())  # a baseline is unbiased


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_equal_rewards_give_exactly_zero(estimator):
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert rewards.mean() != rewards[0]  # the sum rounds, so that the difference alone would not be 0
    assert group_advantages(rewards, torch.zeros(3), estimator=estimator).tolist() == [0, 0, 0]


def test_group_advantages_names_what_is_wrong():
    ids = torch.tensor([0, 0, 5])
    with pytest.raises(ValueError, match="group 5 has one response"):
        group_advantages(torch.ones(3), ids, estimator="grpo")
    with pytest.raises(ValueError, match="rewards is nan in row 1"):
        group_advantages(torch.tensor([0, math.nan, 0]), ids, estimator="grpo")
    with pytest.raises(ValueError, match="grpo, rloo, dr_grpo"):
        group_advantages(torch.ones(3), ids, estimator="gae")
    with pytest.raises(ValueError, match=r"group_ids \[3\]"):
        group_advantages(torch.ones(3, 1), ids, estimator="grpo")
