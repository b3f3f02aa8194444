"""Advantages and value targets of a batch, by hand."""

import dataclasses
import math

import pytest
import torch

from hybrid_rl.batch import TrainBatch, make_train_batch
from hybrid_rl.config import AdvantageConfig
from hybrid_rl.distributed import World
from hybrid_rl.steps.advantages import add_advantages
from tests.conftest import make_rollout, make_turns

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def scored_batch(lengths: list[int], rewards: list[float], groups: list[int], **fields) -> TrainBatch:
    """Return a batch of responses of some lengths, the second truncated, whose old log-probs are -1."""
    rollouts = [
        make_rollout([1], [4] * length, prompt_id=group, sequence_id=i, is_truncated=i == 1)
        for i, (length, group) in enumerate(zip(lengths, groups, strict=True))
    ]
    batch = make_train_batch(rollouts)
    return batch.with_fields(
        rewards=torch.tensor(rewards), old_logprobs=torch.where(batch.response_mask, -1.0, 0), **fields
    )


VALUES = torch.tensor([[0.5, 0.25], [0.4, 9.0], [9.0, 9.0]])  # the 9s are masked


def test_gae_by_hand():
    """delta_1 = 1 - 0.25 = 0.75; delta_0 = 0.9 * 0.25 - 0.5 = -0.275; A_0 = delta_0 + 0.9 * 0.5 * A_1."""
    batch = scored_batch([2, 1, 0], [1.0, -2.0, 7.0], [0, 1, 2], values=VALUES)
    config = AdvantageConfig(gamma=0.9, gae_lambda=0.5, whiten=False)
    done, sums = add_advantages(batch, config, WORLD)
    torch.testing.assert_close(done.advantages, torch.tensor([[0.0625, 0.75], [-2.4, 0], [0, 0]]))
    torch.testing.assert_close(done.returns, torch.tensor([[0.5625, 1.0], [-2.0, 0], [0, 0]]))
    assert sums == {}
    assert batch.advantages is None


def test_bootstrap_applies_to_truncated_responses_alone():
    batch = scored_batch([2, 1, 0], [1.0, -2.0, 7.0], [0, 1, 2], values=VALUES)
    config = AdvantageConfig(gamma=0.9, gae_lambda=0.5, whiten=False, bootstrap_truncated=True)
    done, _ = add_advantages(batch, config, WORLD, bootstrap_values=torch.tensor([100.0, 2.0, 100.0]))
    torch.testing.assert_close(done.advantages, torch.tensor([[0.0625, 0.75], [-2 + 1.8 - 0.4, 0], [0, 0]]))


def test_kl_is_subtracted_from_the_reward_of_every_token():
    """d = old - ref = 0.5, -0.5 | 1; with gamma = lambda = 1 each token gets all that follows it."""
    ref = torch.tensor([[-1.5, -0.5], [-2.0, 0], [0, 0]])
    batch = scored_batch([2, 1, 0], [1.0, 0.0, 0.0], [0, 1, 2], values=torch.zeros(3, 2), ref_logprobs=ref)
    config = AdvantageConfig(gae_lambda=1.0, kl_coef=0.1, whiten=False)
    done, sums = add_advantages(batch, config, WORLD)
    torch.testing.assert_close(done.advantages, torch.tensor([[1 - 0.05 + 0.05, 1 + 0.05], [-0.1, 0], [0, 0]]))
    assert sums["kl"] == pytest.approx(1.0)


def test_gae_advantages_are_whitened_and_returns_are_not():
    batch = scored_batch([2, 1, 0], [1.0, -2.0, 7.0], [0, 1, 2], values=VALUES)
    done, _ = add_advantages(batch, AdvantageConfig(gamma=0.9, gae_lambda=0.5), WORLD)
    raw = torch.tensor([0.0625, 0.75, -2.4])
    expected = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(done.advantages[batch.response_mask], expected)
    assert not done.advantages[~batch.response_mask].any()
    torch.testing.assert_close(done.returns[0], torch.tensor([0.5625, 1.0]))


@pytest.mark.parametrize("estimator, good", [("grpo", 0.5 / (math.sqrt(0.5) + 1e-6)), ("rloo", 1.0), ("dr_grpo", 0.5)])
def test_group_advantages_by_hand(estimator, good):
    """Group 7 has rewards 1 and 0, group 8 equal ones; groups are interleaved."""
    batch = scored_batch([2, 1, 1, 2], [1.0, 0.3, 0.0, 0.3], [7, 8, 7, 8])
    done, _ = add_advantages(batch, AdvantageConfig(estimator=estimator), WORLD)
    torch.testing.assert_close(done.advantages, torch.tensor([[good, good], [0, 0], [-good, 0], [0, 0]]))
    assert done.returns is None


def test_group_advantages_with_kl():
    ref = torch.tensor([[-1.5, -0.5], [-2.0, 5.0]])
    batch = scored_batch([2, 1], [1.0, 0.0], [7, 7], ref_logprobs=ref)
    done, sums = add_advantages(batch, AdvantageConfig(estimator="dr_grpo", kl_coef=0.1), WORLD)
    torch.testing.assert_close(done.advantages, torch.tensor([[0.45, 0.55], [-0.6, 0]]))
    assert sums["kl"] == pytest.approx(1.0)


def test_reinforce_pp_is_the_whitened_return():
    """Returns with gamma 0.5 and KL 0.1 * d: row 0 has tokens paid -0.05 and 1 + 0.05, row 1 one of -2 - 0.1."""
    ref = torch.tensor([[-1.5, -0.5], [-2.0, 0]])
    batch = scored_batch([2, 1], [1.0, -2.0], [0, 1], ref_logprobs=ref)
    config = AdvantageConfig(estimator="reinforce_pp", gamma=0.5, kl_coef=0.1)
    raw = torch.tensor([-0.05 + 0.525, 1.05, -2.1])
    done, _ = add_advantages(batch, config, WORLD)
    torch.testing.assert_close(done.advantages[batch.response_mask], (raw - raw.mean()) / raw.std(correction=0))
    plain, _ = add_advantages(batch, dataclasses.replace(config, whiten=False), WORLD)
    torch.testing.assert_close(plain.advantages[batch.response_mask], raw)


def test_reinforce_pp_baseline_is_centred_then_whitened():
    batch = scored_batch([2, 1, 1, 1], [1.0, 0.0, 4.0, 0.0], [7, 7, 8, 8])
    done, _ = add_advantages(batch, AdvantageConfig(estimator="reinforce_pp_baseline"), WORLD)
    raw = torch.tensor([0.5, 0.5, -0.5, 2.0, -2.0])
    torch.testing.assert_close(done.advantages[batch.response_mask], (raw - raw.mean()) / raw.std(correction=0))


def test_opo_weights_the_baseline_by_length():
    """Baseline (2 * 1 + 1 * 0) / 3 = 2/3."""
    batch = scored_batch([2, 1], [1.0, 0.0], [7, 7])
    done, _ = add_advantages(batch, AdvantageConfig(estimator="opo"), WORLD)
    torch.testing.assert_close(done.advantages, torch.tensor([[1 / 3, 1 / 3], [-2 / 3, 0]]))


def test_remax_subtracts_the_greedy_reward():
    batch = scored_batch([2, 1], [1.0, 0.0], [7, 8], baselines=torch.tensor([0.25, 1.0]))
    done, _ = add_advantages(batch, AdvantageConfig(estimator="remax"), WORLD)
    torch.testing.assert_close(done.advantages, torch.tensor([[0.75, 0.75], [-1.0, 0]]))


def test_the_critic_may_have_its_own_lambda():
    """With lambda 1 the targets are the discounted returns, whatever the values."""
    batch = scored_batch([2, 1, 0], [1.0, -2.0, 7.0], [0, 1, 2], values=VALUES)
    config = AdvantageConfig(gamma=0.9, gae_lambda=0.5, critic_lambda=1.0, whiten=False)
    done, _ = add_advantages(batch, config, WORLD)
    torch.testing.assert_close(done.advantages, torch.tensor([[0.0625, 0.75], [-2.4, 0], [0, 0]]))
    torch.testing.assert_close(done.returns, torch.tensor([[0.9, 1.0], [-2.0, 0], [0, 0]]))


def test_length_adaptive_lambda_of_the_actor():
    """alpha 1: lambda is 1 - 1/2 for two tokens, 0 for one."""
    batch = scored_batch([2, 1, 0], [1.0, -2.0, 7.0], [0, 1, 2], values=VALUES)
    config = AdvantageConfig(gamma=0.9, gae_lambda=1.0, length_adaptive_alpha=1.0, whiten=False)
    done, _ = add_advantages(batch, config, WORLD)
    torch.testing.assert_close(done.advantages, torch.tensor([[0.0625, 0.75], [-2.4, 0], [0, 0]]))


def test_kl_in_the_loss_is_summed_and_leaves_advantages_alone():
    ref = torch.tensor([[-1.5, -0.5], [-2.0, 5.0]])
    batch = scored_batch([2, 1], [1.0, 0.0], [7, 7], ref_logprobs=ref)
    config = AdvantageConfig(estimator="dr_grpo", kl_coef=0.1, kl_in="loss")
    done, sums = add_advantages(batch, config, WORLD)
    torch.testing.assert_close(done.advantages, torch.tensor([[0.5, 0.5], [-0.5, 0]]))
    assert sums["kl"] == pytest.approx(1.0)


def test_kl_without_a_reference_is_an_error():
    batch = scored_batch([2, 1], [1.0, 0.0], [0, 1], values=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1 but kl is None"):
        add_advantages(batch, AdvantageConfig(kl_coef=0.1), WORLD)


# Conversations


def talked_batch(**fields) -> TrainBatch:
    """Return two conversations of one group, s s [o] s and s [o o] s, and s s of another; KL estimates are 1."""
    batch = make_train_batch(
        [
            make_rollout([1], [4] * 4, prompt_id=7, sequence_id=0, turns=make_turns(2, -1, 1)),
            make_rollout([1], [4] * 4, prompt_id=7, sequence_id=1, turns=make_turns(1, -2, 1)),
            make_rollout([1], [4] * 2, prompt_id=8, sequence_id=2),
            make_rollout([1], [4] * 2, prompt_id=8, sequence_id=3),
        ]
    )
    observed = torch.full(batch.response_mask.shape, math.nan)
    return batch.with_fields(
        rewards=torch.tensor([3.0, 1.0, 0.5, 0.5]),
        token_rewards=torch.tensor([[0.0, 2, math.nan, 0], [0, math.nan, math.nan, 0], [0, 0, 0, 0], [0, 0, 0, 0]]),
        old_logprobs=torch.where(batch.response_mask, -1.0, observed),
        ref_logprobs=torch.where(batch.response_mask, -2.0, observed),
        **fields,
    )


def test_gae_of_conversations_with_rewards_of_turns_and_kl_by_hand():
    """Row 0 is paid 2 at token 1 and the remaining 1 at token 3; every sampled token pays 0.1 for its KL."""
    values = torch.tensor([[1.0, 2, math.nan, 4], [1, math.nan, math.nan, 2], [0, 0, 9, 9], [0, 0, 9, 9]])
    config = AdvantageConfig(gae_lambda=0.5, kl_coef=0.1, whiten=False, turn_gamma=0.5)
    done, sums = add_advantages(talked_batch(values=values), config, WORLD)
    last = 1 - 0.1 - 4  # A_3 of row 0
    first = 2 - 0.1 + 0.5 * 4 - 2 + 0.25 * last  # A_1, which the value after the observation bootstraps
    second = 1 - 0.1 - 2  # A_3 of row 1
    expected = [
        [-0.1 + 2 - 1 + 0.5 * first, first, 0, last],
        [-0.1 + 0.5 * 2 - 1 + 0.25 * second, 0, 0, second],
        [-0.1 + 0.5 * 0.4, 0.4, 0, 0],
        [-0.1 + 0.5 * 0.4, 0.4, 0, 0],
    ]
    torch.testing.assert_close(done.advantages, torch.tensor(expected))
    torch.testing.assert_close(done.returns, torch.tensor(expected) + torch.where(done.response_mask, values, 0))
    assert sums["kl"] == pytest.approx(3 + 2 + 2 + 2)


@pytest.mark.parametrize("estimator, good", [("grpo", 1 / (math.sqrt(2) + 1e-6)), ("rloo", 2.0), ("dr_grpo", 1.0)])
def test_group_estimators_compare_all_that_conversations_are_paid(estimator, good):
    done, _ = add_advantages(talked_batch(), AdvantageConfig(estimator=estimator), WORLD)
    expected = [[good, good, 0, good], [-good, 0, 0, -good], [0, 0, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(done.advantages, torch.tensor(expected))


def test_turns_are_compared_by_hand():
    """Returns of turns with turn_gamma 0.5: 2 + 0.5 and 1 of row 0, 0.5 and 1 of row 1."""
    config = AdvantageConfig(estimator="dr_grpo", credit="turn", turn_gamma=0.5, kl_coef=0.1)
    done, _ = add_advantages(talked_batch(), config, WORLD)
    expected = [[0.9, 0.9, 0, -0.1], [-1.1, 0, 0, -0.1], [-0.1, -0.1, 0, 0], [-0.1, -0.1, 0, 0]]
    torch.testing.assert_close(done.advantages, torch.tensor(expected))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "opo", "reinforce_pp_baseline"])
def test_without_turns_responses_and_turns_are_compared_alike(estimator):
    batch = scored_batch([2, 1, 1, 2], [1.0, 0.3, 0.0, 0.4], [7, 8, 7, 8])
    by_response, _ = add_advantages(batch, AdvantageConfig(estimator=estimator), WORLD)
    by_turn, _ = add_advantages(batch, AdvantageConfig(estimator=estimator, credit="turn"), WORLD)
    assert torch.equal(by_turn.advantages, by_response.advantages)


def test_whitening_counts_sampled_tokens():
    done, _ = add_advantages(talked_batch(), AdvantageConfig(estimator="reinforce_pp_baseline"), WORLD)
    raw = torch.tensor([1.0, 1, 1, -1, -1, 0, 0, 0, 0])
    expected = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(done.advantages[done.response_mask], expected)
    assert not done.advantages[~done.response_mask].any()
