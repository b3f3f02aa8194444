"""Which tokens the losses see, and their importance weights."""

import pytest
import torch

from hybrid_rl.batch import TrainBatch, make_train_batch
from hybrid_rl.config import UpdateConfig
from hybrid_rl.steps.loss_weights import add_loss_weights
from tests.conftest import make_rollout


def make_batch(lengths: list[int]) -> TrainBatch:
    """Return a batch of responses of some lengths, the second truncated, whose rollout log-probs are -1."""
    rollouts = [make_rollout([1], [4] * n, sequence_id=i, is_truncated=i == 1) for i, n in enumerate(lengths)]
    return make_train_batch(rollouts)


def test_truncated_responses_may_be_left_out():
    batch = make_batch([2, 2])  # the second is truncated
    done, sums = add_loss_weights(batch, UpdateConfig(mask_truncated=True))
    assert done.loss_mask.tolist() == [[True, True], [False, False]] and sums == {}
    assert add_loss_weights(batch, UpdateConfig())[0].loss_mask.all()


def test_correction_by_hand():
    """old - rollout = log 4, log 1 | log 0.25: truncated to 2, kept, truncated to 0.5."""
    batch = make_batch([2, 1])
    old = batch.rollout_logprobs + torch.tensor([[4.0, 1.0], [0.25, 1.0]]).log()
    batch = batch.with_fields(old_logprobs=old)
    done, sums = add_loss_weights(batch, UpdateConfig(correction="tis"))
    torch.testing.assert_close(done.loss_weights, torch.tensor([[2.0, 1.0], [0.5, 0.0]]))
    assert sums == {"correction/weight": pytest.approx(3.5), "correction/out": 2.0}
