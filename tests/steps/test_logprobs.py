"""Log-probs, values and scores of a batch, and the gap between engine and trainer."""

from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import Rollout, TrainBatch, make_train_batch
from hybrid_rl.config import ModelsConfig
from hybrid_rl.distributed import World
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.steps.logprobs import (
    LogprobGapError,
    Packing,
    check_logprob_gap,
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
    return Packing(limit=TokenLimit(max_tokens), world=WORLD)


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
    old = torch.where(batch.response_mask, -1.0, torch.nan)  # masked slots are not read
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
