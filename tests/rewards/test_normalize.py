"""The running normalizer, compared with torch's moments of all rewards at once."""

import pytest
import torch

from hybrid_rl.rewards import RunningNormalizer
from hybrid_rl.rewards.normalize import moments


def test_two_batches_by_hand():
    """1, 3 have mean 2 and variance 1; with 2, 2, 7 the mean is 3 and the variance (4 + 0 + 1 + 1 + 16) / 5."""
    normalizer = RunningNormalizer()
    assert (normalizer.mean, normalizer.std) == (0, 0)
    assert moments(torch.tensor([1.0, 3.0])) == (2, 2, 2)
    normalizer.update(2, 2, 2)
    assert (normalizer.mean, normalizer.std) == (2, 1)
    normalizer.update(0, 0, 0)
    count, mean, squares = moments(torch.tensor([2.0, 2.0, 7.0]))
    assert (count, mean, squares) == pytest.approx((3, 11 / 3, 50 / 3))
    normalizer.update(count, mean, squares)
    assert normalizer.mean == pytest.approx(3) and normalizer.std == pytest.approx(4.4**0.5)
    assert normalizer.apply(torch.tensor([3.0, 3 + 4.4**0.5])).tolist() == pytest.approx([0, 1])


def test_batches_and_ranks_merge_to_the_moments_of_all_rewards():
    rewards = torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1000
    normalizer = RunningNormalizer()
    for batch in (rewards[:1], rewards[1:100], rewards[100:]):
        for half in (batch[::2], batch[1::2]):  # as of two ranks
            normalizer.update(*moments(half))
    assert normalizer.mean == pytest.approx(rewards.mean().item(), rel=1e-12)
    assert normalizer.std == pytest.approx(rewards.std(correction=0).item(), rel=1e-8)
    normal = normalizer.apply(rewards)
    assert normal.mean().item() == pytest.approx(0, abs=1e-9) and normal.std(correction=0).item() == pytest.approx(1)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6, 1 / 3, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_become_exactly_0(value, dtype):
    normalizer, rewards = RunningNormalizer(), torch.full((7,), value, dtype=dtype)
    for num in (7, 1, 3, 6, 7):
        normalizer.update(*moments(rewards[:num]))
        assert normalizer.std == 0 and normalizer.apply(rewards).tolist() == [0] * 7


def test_a_large_mean_does_not_cancel_the_deviations():
    """1e8 and 1e8 + 8 have standard deviation 4; from sums of squares, float64 would find 4.2."""
    normalizer = RunningNormalizer()
    for _ in range(3):
        normalizer.update(*moments(torch.tensor([1e8, 1e8 + 8])))
    assert normalizer.mean == 1e8 + 4 and normalizer.std == pytest.approx(4, rel=1e-12)
    assert normalizer.apply(torch.tensor([1e8, 1e8 + 8])).tolist() == [-1, 1]


def test_a_loaded_state_continues_exactly():
    batches = torch.arange(12.0).view(3, 4).square()
    whole, first, second = RunningNormalizer(), RunningNormalizer(), RunningNormalizer()
    for batch in batches:
        whole.update(*moments(batch))
    first.update(*moments(batches[0]))
    second.load_state_dict(first.state_dict())
    for batch in batches[1:]:
        second.update(*moments(batch))
    assert second.state_dict() == whole.state_dict()
    assert torch.equal(second.apply(batches), whole.apply(batches))
