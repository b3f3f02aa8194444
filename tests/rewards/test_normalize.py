"""The running normalizer, compared with torch's moments of all rewards at once."""

import pytest
import torch

from hybrid_rl.algorithms.advantage import masked_sums
from hybrid_rl.rewards import RunningNormalizer


def sums(rewards):
    return masked_sums(rewards, torch.ones_like(rewards, dtype=torch.bool))


def test_two_batches_by_hand():
    """1, 3 have mean 2 and variance 1; with 2, 2, 7 the mean is 3 and the variance (4 + 0 + 1 + 1 + 16) / 5."""
    normalizer = RunningNormalizer()
    assert (normalizer.mean, normalizer.std) == (0, 0)
    normalizer.update(2, 4, 10)
    assert (normalizer.mean, normalizer.std) == (2, 1)
    normalizer.update(0, 0, 0)
    normalizer.update(3, 11, 57)
    assert normalizer.mean == pytest.approx(3) and normalizer.std == pytest.approx(4.4**0.5)
    assert normalizer.apply(torch.tensor([3.0, 3 + 4.4**0.5])).tolist() == pytest.approx([0, 1])


def test_batches_and_ranks_merge_to_the_moments_of_all_rewards():
    rewards = torch.randn(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1000
    normalizer = RunningNormalizer()
    for batch in (rewards[:1], rewards[1:100], rewards[100:]):
        halves = sums(batch[::2]) + sums(batch[1::2])  # as summed over two ranks
        normalizer.update(*halves.tolist())
    assert normalizer.mean == pytest.approx(rewards.mean().item(), rel=1e-12)
    assert normalizer.std == pytest.approx(rewards.std(correction=0).item(), rel=1e-8)
    normal = normalizer.apply(rewards)
    assert normal.mean().item() == pytest.approx(0, abs=1e-9) and normal.std(correction=0).item() == pytest.approx(1)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_equal_rewards_become_0(value):
    normalizer, rewards = RunningNormalizer(), torch.full((7,), value)
    for _ in range(5):
        normalizer.update(*sums(rewards).tolist())
    assert normalizer.apply(rewards).abs().max() < 1e-6


def test_rounding_gives_no_variance_below_0():
    normalizer = RunningNormalizer()
    normalizer.update(1, 0.1, 0.01)  # 0.1 * 0.1 is above 0.01 in float64
    assert normalizer.std == 0


def test_a_loaded_state_continues_exactly():
    batches = torch.arange(12.0).view(3, 4).square()
    whole, first, second = RunningNormalizer(), RunningNormalizer(), RunningNormalizer()
    for batch in batches:
        whole.update(*sums(batch).tolist())
    first.update(*sums(batches[0]).tolist())
    second.load_state_dict(first.state_dict())
    for batch in batches[1:]:
        second.update(*sums(batch).tolist())
    assert second.state_dict() == whole.state_dict()
    assert torch.equal(second.apply(batches), whole.apply(batches))
