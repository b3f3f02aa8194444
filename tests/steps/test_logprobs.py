"""Log-probs, values and scores of a batch, and the advantages made of them, by hand."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import Prompt, Rollout, TrainBatch, make_train_batch
from hybrid_rl.config import AdvantageConfig, ModelsConfig, UpdateConfig
from hybrid_rl.distributed import World
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.steps.logprobs import (
    LogprobGapError,
    Packing,
    add_advantages,
    check_logprob_gap,
    correct,
    sequence_values,
    token_logprobs,
    token_values,
)

CPU = torch.device("cpu")
WORLD = World(rank=0, size=1, local_rank=0, device=CPU)


@pytest.fixture
def batch(five_rollouts: list[Rollout]) -> TrainBatch:
    return make_train_batch(five_rollouts)


def packing(max_tokens: int = 64) -> Packing:
    return Packing(max_tokens=max_tokens, world=WORLD)


@pytest.fixture(scope="module")
def actor(tiny: Path):
    return load_actor(str(tiny / "policy"), ModelsConfig(), CPU)


@pytest.fixture(scope="module")
def critic(tiny: Path):
    return load_value_model(str(tiny / "reward"), ModelsConfig(), CPU, field="models.critic")


def test_results_do_not_depend_on_the_packing(actor, critic, batch):
    def results(max_tokens: int) -> list[torch.Tensor]:
        p = packing(max_tokens)
        return [
            token_logprobs(actor, batch, p, temperature=0.8),
            token_values(critic, batch, p),
            sequence_values(critic, batch, p),
        ]

    expected = results(1)  # each sequence alone
    for max_tokens in (7, 12, 10_000):
        for found, wanted in zip(results(max_tokens), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    logprobs, values, scores = expected
    assert logprobs.shape == values.shape == (5, 4) and scores.shape == (5,)
    assert not logprobs[~batch.response_mask].any() and not values[~batch.response_mask].any()
    assert (logprobs[batch.response_mask] < 0).all() and not logprobs.requires_grad and not values.requires_grad
    assert scores.unique().numel() == 5


def test_value_before_a_token_and_score_after_the_last(actor, critic, batch):
    """The value of response token t is read one position before it, the score at the sequence's last token."""
    values = token_values(critic, batch, packing())
    scores = sequence_values(critic, batch, packing())
    for row, sequence in enumerate(batch.sequences):
        with torch.no_grad():
            table = critic.model.score(critic.model.model(sequence[None]).last_hidden_state)[0]
        assert scores[row].item() == pytest.approx(table[-1].item(), abs=1e-5)
        start, num = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        torch.testing.assert_close(values[row, :num], table[start - 1 : start - 1 + num], atol=1e-5, rtol=0)


def test_empty_batch(actor, critic):
    batch = make_train_batch([])
    assert token_logprobs(actor, batch, packing(), temperature=1.0).shape == (0, 1)
    assert sequence_values(critic, batch, packing()).shape == (0,)


# Engine against trainer


def test_gap_is_the_mean_over_sampled_tokens(batch):
    old = torch.where(batch.response_mask, -1.0, torch.nan)  # what is masked is not read
    old[1, 2] = -1.5
    batch = batch.with_fields(old_logprobs=old)
    assert check_logprob_gap(batch, limit=0.06, world=WORLD) == pytest.approx(0.05)  # 0.5 over 10 tokens
    with pytest.raises(LogprobGapError, match=r"is 0.05, above 0.04 \(rollout.max_logprob_gap\)"):
        check_logprob_gap(batch, limit=0.04, world=WORLD)


def test_gap_that_is_nan_is_an_error(batch):
    old = torch.full_like(batch.rollout_logprobs, torch.nan)
    with pytest.raises(LogprobGapError, match="is nan"):
        check_logprob_gap(batch.with_fields(old_logprobs=old), limit=1.0, world=WORLD)


def test_gap_of_nothing_is_zero():
    batch = make_train_batch([])
    assert check_logprob_gap(batch.with_fields(old_logprobs=torch.zeros(0, 1)), limit=0.0, world=WORLD) == 0


def test_gap_finds_other_weights(tiny, actor, batch):
    engine_logprobs = token_logprobs(actor, batch, packing(), temperature=1.0)
    changed = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    changed.model.model.layers[1].mlp.down_proj.weight.data *= 1.05
    batch = batch.with_fields(rollout_logprobs=engine_logprobs)
    same = batch.with_fields(old_logprobs=token_logprobs(actor, batch, packing(9), temperature=1.0))
    assert check_logprob_gap(same, limit=1e-5, world=WORLD) < 1e-5
    other = batch.with_fields(old_logprobs=token_logprobs(changed, batch, packing(), temperature=1.0))
    with pytest.raises(LogprobGapError, match="does not run the trainer's weights"):
        check_logprob_gap(other, limit=1e-3, world=WORLD)


# Advantages


def scored_batch(lengths: list[int], rewards: list[float], groups: list[int], **fields) -> TrainBatch:
    rollouts = [
        Rollout(
            prompt=Prompt(prompt_id=group, text="", token_ids=[1]),
            sequence_id=i,
            response_ids=[4] * n,
            rollout_logprobs=[-1.0] * n,
            is_truncated=i == 1,
            text="",
        )
        for i, (n, group) in enumerate(zip(lengths, groups, strict=True))
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


def test_bootstrap_is_for_truncated_responses_alone():
    batch = scored_batch([2, 1, 0], [1.0, -2.0, 7.0], [0, 1, 2], values=VALUES)
    config = AdvantageConfig(gamma=0.9, gae_lambda=0.5, whiten=False, bootstrap_truncated=True)
    done, _ = add_advantages(batch, config, WORLD, bootstrap_values=torch.tensor([100.0, 2.0, 100.0]))
    torch.testing.assert_close(done.advantages, torch.tensor([[0.0625, 0.75], [-2 + 1.8 - 0.4, 0], [0, 0]]))


def test_kl_is_paid_on_every_token():
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


def test_lambda_that_grows_with_the_response():
    """alpha 1: lambda is 1 - 1/2 for two tokens, 0 for one."""
    batch = scored_batch([2, 1, 0], [1.0, -2.0, 7.0], [0, 1, 2], values=VALUES)
    config = AdvantageConfig(gamma=0.9, gae_lambda=1.0, length_adaptive_alpha=1.0, whiten=False)
    done, _ = add_advantages(batch, config, WORLD)
    torch.testing.assert_close(done.advantages, torch.tensor([[0.0625, 0.75], [-2.4, 0], [0, 0]]))


def test_kl_in_the_loss_is_logged_and_not_paid():
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


# What counts in the losses


def test_truncated_responses_may_be_left_out():
    batch = scored_batch([2, 2], [1.0, 0.0], [7, 7])  # the second is truncated
    done, sums = correct(batch, UpdateConfig(mask_truncated=True))
    assert done.loss_mask.tolist() == [[True, True], [False, False]] and sums == {}
    assert correct(batch, UpdateConfig())[0].loss_mask.all()


def test_correction_by_hand():
    """old - rollout = log 4, log 1 | log 0.25: truncated to 2, kept, truncated to 0.5."""
    batch = scored_batch([2, 1], [1.0, 0.0], [7, 7])
    old = batch.rollout_logprobs + torch.tensor([[4.0, 1.0], [0.25, 1.0]]).log()
    batch = batch.with_fields(old_logprobs=old)
    done, sums = correct(batch, UpdateConfig(correction="tis"))
    torch.testing.assert_close(done.loss_weights, torch.tensor([[2.0, 1.0], [0.5, 0.0]]))
    assert sums == {"correction/weight": pytest.approx(3.5), "correction/out": 2.0}
