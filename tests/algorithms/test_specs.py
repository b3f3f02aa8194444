"""One declaration per algorithm: settings, rules and steps follow from it."""

import dataclasses
import os
import subprocess
import sys
import typing

import pytest
import torch

from hybrid_rl.algorithms import correction, estimators, kl, policy_loss
from hybrid_rl.algorithms.specs import (
    CORRECTIONS,
    ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    EstimatorSpec,
    PolicyLossSpec,
)
from hybrid_rl.batch import make_train_batch
from hybrid_rl.config import AdvantageConfig, ConfigError, UpdateConfig
from hybrid_rl.distributed import World
from hybrid_rl.steps.advantages import add_advantages
from hybrid_rl.validate import validate
from tests.conftest import VALID_CONFIG, change, make_rollout

TABLES = {
    "estimator": (AdvantageConfig, ESTIMATORS, estimators),
    "kl_estimator": (AdvantageConfig, KL_ESTIMATORS, kl),
    "policy_loss": (UpdateConfig, POLICY_LOSSES, policy_loss),
    "correction": (UpdateConfig, CORRECTIONS, correction),
}
WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


@pytest.mark.parametrize("field", TABLES)
def test_the_choices_of_a_setting_are_the_declared_algorithms(field):
    section, table, _ = TABLES[field]
    assert typing.get_args(typing.get_type_hints(section)[field]) == tuple(table)


@pytest.mark.parametrize("field", TABLES)
def test_every_declared_algorithm_has_a_function_of_its_name(field):
    _, table, module = TABLES[field]
    for name in table:
        function = getattr(module, name)
        assert callable(function) and function.__module__ == module.__name__ and function.__doc__


def test_settings_and_rules_load_no_torch():
    program = "import sys, hybrid_rl.validate, hybrid_rl.rewards.worker; assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


def test_a_new_estimator_is_one_function_and_one_line(monkeypatch):
    """Reward minus the worst of the group, whitened: rewards 1, 3 | 2, 6 give 0, 2 | 0, 4 with mean 1.5."""
    monkeypatch.setitem(ESTIMATORS, "worst", EstimatorSpec(compares_group=True, is_whitened=True))
    monkeypatch.setattr(estimators, "worst", lambda rewards, lengths: rewards - rewards.min(), raising=False)
    with pytest.raises(ConfigError, match=r"group_size = 1: advantage\.estimator = worst needs 2 or more"):
        validate(change(VALID_CONFIG, {"advantage.estimator": "worst"}))
    config = validate(change(VALID_CONFIG, {"advantage.estimator": "worst", "rollout.group_size": 2}))
    assert not config.has_critic and not config.needs_greedy

    batch = make_train_batch([make_rollout(prompt_id=i // 2, sequence_id=i) for i in range(4)])
    batch = batch.with_fields(rewards=torch.tensor([1.0, 3, 2, 6]), old_logprobs=batch.rollout_logprobs)
    plain, _ = add_advantages(batch, dataclasses.replace(config.advantage, whiten=False), WORLD)
    assert plain.advantages[:, 0].tolist() == [0, 2, 0, 4]
    whitened, _ = add_advantages(batch, config.advantage, WORLD)
    expected = (torch.tensor([0.0, 2, 0, 4]) - 1.5) / (2.75**0.5)  # (1.5^2 + 0.5^2 + 1.5^2 + 2.5^2) / 4
    torch.testing.assert_close(whitened.advantages[:, 0], expected)


def test_a_new_policy_loss_is_one_function_and_one_line(monkeypatch):
    """The loss -A rho, without clipping; the declaration says that it takes no dual clip."""
    monkeypatch.setitem(POLICY_LOSSES, "unclipped", PolicyLossSpec())

    def unclipped(tokens):
        ratio = tokens.log_ratio.exp()
        return -tokens.advantages * ratio, torch.zeros_like(ratio, dtype=torch.bool)

    monkeypatch.setattr(policy_loss, "unclipped", unclipped, raising=False)
    config = validate(change(VALID_CONFIG, {"update.policy_loss": "unclipped"}))
    with pytest.raises(ConfigError, match=r"needs update\.policy_loss = clip or gspo, not unclipped"):
        validate(change(config, {"update.dual_clip": 3.0}))
    logprobs = torch.tensor([2.0, 0.5]).log()
    loss, is_clipped = policy_loss.policy_loss(
        logprobs, torch.zeros(2), torch.tensor([3.0, -2]), kind="unclipped", clip_low=0.2, clip_high=0.2
    )
    torch.testing.assert_close(loss, torch.tensor([-6.0, 1]))
    assert not is_clipped.any()
