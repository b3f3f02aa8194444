"""Training on conversations: observations are attended to, and take part in nothing else."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_rl.batch import Rollout, TrainBatch, make_train_batch
from hybrid_rl.config import AdvantageConfig, ModelsConfig, OptimizerConfig, UpdateConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.steps.advantages import add_advantages
from hybrid_rl.steps.logprobs import LogprobGapError, Packing, check_logprob_gap, token_logprobs, token_values
from hybrid_rl.steps.loss_weights import add_loss_weights
from hybrid_rl.steps.updates import KlInLoss, update_actor, update_critic
from tests.conftest import make_rollout, make_turns

CPU = torch.device("cpu")
SHAPES = [(2, (3, -2, 2)), (1, (2,)), (3, (1, -3, 2, -1)), (2, (-2, 3)), (1, (4, -1, 1, -1, 2)), (2, (1, -4, 1))]
"""Prompt tokens and turns of six conversations, of which two form a group; a negative length is an observation's."""
NUM_SAMPLED = 22
READ_BY_ADVANTAGES = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "token_rewards")
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.5)


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


def make_rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for i, (num_prompt, lengths) in enumerate(SHAPES):
        turns = make_turns(*lengths)
        ids = torch.randint(2, 38, (num_prompt + sum(map(abs, lengths)),), generator=generator).tolist()
        rollouts.append(make_rollout(ids[:num_prompt], ids[num_prompt:], prompt_id=i // 2, sequence_id=i, turns=turns))
    return rollouts


def make_batch() -> TrainBatch:
    """Return the conversations with everything that advantages read; a reward is paid at some sampled tokens."""
    batch = make_train_batch(make_rollouts())
    mask, generator = batch.response_mask, torch.Generator().manual_seed(1)
    drawn = torch.randn(len(READ_BY_ADVANTAGES), *mask.shape, generator=generator)
    drawn[:3] = drawn[:3] * 0.3 - 3.6
    fields = dict(zip(READ_BY_ADVANTAGES, torch.where(mask, drawn, 0), strict=True))
    return batch.with_fields(rewards=torch.tensor([3.0, -1, 0.5, 2, 0, 1]), **fields)


def poisoned(batch: TrainBatch, *names: str) -> TrainBatch:
    """Return the batch with NaN at every token that is not sampled, in the named fields that it has."""
    found = {name: getattr(batch, name) for name in names}
    return batch.with_fields(
        **{name: torch.where(batch.response_mask, x, math.nan) for name, x in found.items() if x is not None}
    )


def weights_of(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
        return {name: t.clone() for name, t in tensors.items()}


def packing(world: World, max_tokens: int = 64) -> Packing:
    return Packing(limit=TokenLimit(max_tokens), world=world)


def train(
    batch: TrainBatch, folder: Path, world: World, config: UpdateConfig, kl: KlInLoss | None = None
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and weights of an actor, and of a critic where there are value targets, after their updates."""
    options: dict[str, Any] = {"seed": 7, "max_response_tokens": 9}
    actor = DeepSpeedEngine(
        load_actor(str(folder / "policy"), ModelsConfig(), CPU), OPTIMIZER, zero_stage=0, total_steps=9, world=world
    )
    metrics = update_actor(actor, batch, config, world, temperature=0.8, kl=kl, **options)
    weights = weights_of(actor)
    if batch.returns is not None:
        model = load_value_model(str(folder / "reward"), ModelsConfig(), CPU, field="models.critic")
        critic = DeepSpeedEngine(model, OPTIMIZER, zero_stage=0, total_steps=9, world=world)
        metrics |= {f"critic/{k}": v for k, v in update_critic(critic, batch, config, world, **options).items()}
        weights |= {f"critic/{name}": t for name, t in weights_of(critic).items()}
    return metrics, weights


CASES = {
    "gae": (AdvantageConfig(kl_coef=0.1, turn_gamma=0.5), UpdateConfig(mini_batch_size=3, correction="tis")),
    "reinforce_pp": (
        AdvantageConfig(estimator="reinforce_pp", gamma=0.9, kl_coef=0.1, kl_estimator="k3"),
        UpdateConfig(mini_batch_size=6, aggregation="sequence_mean", entropy_coef=0.01),
    ),
    "grpo by turn": (
        AdvantageConfig(estimator="grpo", credit="turn", kl_coef=0.1, kl_in="loss"),
        UpdateConfig(mini_batch_size=3, policy_loss="gspo", correction="sequence_mask", correction_low=0.9),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_poisoned_observations_change_no_bit(tiny, world, case):
    """NaN in the log-probs, values, rewards, advantages, targets and loss weights of observations reaches nothing."""
    advantage, update = CASES[case]
    kl = KlInLoss(coef=0.1, estimator="k2", is_unbiased=True) if advantage.kl_in == "loss" else None

    def results(*names: str) -> tuple[dict[str, float], dict[str, Tensor]]:
        batch = poisoned(make_batch(), *[name for name in names if name in READ_BY_ADVANTAGES])
        sums = {"gap": check_logprob_gap(batch, limit=9, world=world)}
        batch, found = add_advantages(batch, advantage, world, bootstrap_values=torch.ones(len(batch)))
        batch, correction = add_loss_weights(batch, update)
        batch = poisoned(batch, *names)
        metrics, weights = train(batch, tiny, world, update, kl)
        return metrics | sums | found | correction, weights

    metrics, weights = results()
    before = dict(AutoModelForCausalLM.from_pretrained(tiny / "policy").named_parameters())
    assert max(float((weights[name] - p.detach()).abs().max()) for name, p in before.items()) > 1e-3
    dirty_metrics, dirty_weights = results(*READ_BY_ADVANTAGES, "advantages", "returns", "loss_weights")
    assert dirty_metrics == metrics
    assert all(torch.equal(dirty_weights[name], weight) for name, weight in weights.items())


def test_metrics_count_sampled_tokens_alone(tiny, world):
    batch = make_batch()
    assert int(batch.response_lengths.sum()) == NUM_SAMPLED
    batch = batch.with_fields(old_logprobs=torch.where(batch.response_mask, batch.rollout_logprobs - 0.5, 9.0))
    assert check_logprob_gap(batch, limit=1, world=world) == pytest.approx(0.5)
    with pytest.raises(LogprobGapError, match=r"log-prob is 0\.5, above 0\.4"):
        check_logprob_gap(batch, limit=0.4, world=world)
    advantages = torch.where(batch.response_mask, 2.0, math.nan)
    config = UpdateConfig(mini_batch_size=6, policy_loss="pg", aggregation="token_mean")
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    logprobs = token_logprobs(actor, batch, packing(world), temperature=0.8)
    metrics, _ = train(batch.with_fields(advantages=advantages), tiny, world, config)
    assert metrics["loss"] == pytest.approx(-2 * float(logprobs[batch.response_mask].mean()), rel=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 13, 10_000])
def test_packed_conversations_equal_each_sequence_alone(tiny, world, max_tokens):
    batch = make_batch()
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    critic = load_value_model(str(tiny / "reward"), ModelsConfig(), CPU, field="models.critic")
    logprobs = token_logprobs(actor, batch, packing(world, max_tokens), temperature=0.8)
    values = token_values(critic, batch, packing(world, max_tokens))
    oracle = AutoModelForCausalLM.from_pretrained(tiny / "policy")
    for row, sequence in enumerate(batch.sequences):
        start, is_sampled = int(batch.prompt_lengths[row]), batch.response_mask[row]
        places = is_sampled.nonzero().flatten() + start
        with torch.no_grad():
            table = (oracle(sequence[None]).logits[0] / 0.8).log_softmax(-1)
            states = critic.model.score(critic.model.model(sequence[None]).last_hidden_state)[0]
        expected = table[places - 1, sequence[places]]
        torch.testing.assert_close(logprobs[row, is_sampled], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(values[row, is_sampled], states[places - 1].view(-1), atol=1e-5, rtol=0)
    assert not logprobs[~batch.response_mask].any() and not values[~batch.response_mask].any()


def test_later_turns_attend_to_an_observation(tiny, world):
    batch, other = make_batch(), make_batch()
    other.sequences[0][2 + 3] += 1  # the first token of the observation of row 0
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    before, after = (token_logprobs(actor, b, packing(world), temperature=1.0)[0] for b in (batch, other))
    torch.testing.assert_close(before[:3], after[:3], atol=1e-6, rtol=0)
    assert (before[5:7] - after[5:7]).abs().min() > 1e-3


def test_micro_batches_change_nothing(tiny, world):
    batch, _ = add_advantages(make_batch(), CASES["gae"][0], world)
    results = [
        train(batch, tiny, world, UpdateConfig(mini_batch_size=6, micro_batch_tokens=tokens)) for tokens in (1, 10_000)
    ]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5, abs=1e-6)
    for name, weight in results[1][1].items():
        torch.testing.assert_close(results[0][1][name], weight, atol=1e-6, rtol=0)


def shifted(batch: TrainBatch, row: int, by: int) -> TrainBatch:
    """Return the batch with the fields of one row moved to the left by some columns."""
    fields = {}
    for name in ("old_logprobs", "advantages", "values", "returns"):
        x = getattr(batch, name).clone()
        x[row] = torch.cat([x[row, by:], x.new_zeros(by)])
        fields[name] = x
    return batch.with_fields(**fields)


def test_an_observation_before_all_sampled_tokens_trains_like_a_longer_prompt(tiny, world):
    rollouts = make_rollouts()
    first = rollouts[3]  # two tokens of an observation, then three sampled ones
    joined = make_rollout(
        first.prompt.token_ids + first.response_ids[:2], first.response_ids[2:], prompt_id=1, sequence_id=3
    )
    as_prompt = make_train_batch([*rollouts[:3], joined, *rollouts[4:]])
    batch, _ = add_advantages(make_batch(), CASES["gae"][0], world)
    moved = shifted(batch, 3, 2)
    names = ("old_logprobs", "advantages", "values", "returns")
    as_prompt = as_prompt.with_fields(**{name: getattr(moved, name) for name in names})
    config = UpdateConfig(mini_batch_size=3, aggregation="sequence_mean")
    expected, ours = train(batch, tiny, world, config), train(as_prompt, tiny, world, config)
    assert ours[0] == expected[0]
    assert all(torch.equal(ours[1][name], weight) for name, weight in expected[1].items())
