"""Fuzz subjects: advantages, KL, losses and their weights, number by number in plain Python."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import torch

from hybrid_rl.algorithms.correction import importance_weights
from hybrid_rl.algorithms.kl import KlController, kl_estimate
from hybrid_rl.algorithms.loss import aggregate, value_loss
from hybrid_rl.algorithms.policy_loss import policy_loss
from hybrid_rl.batch import TrainBatch, make_train_batch
from hybrid_rl.config import AdvantageConfig, UpdateConfig
from hybrid_rl.distributed import World
from hybrid_rl.steps.advantages import add_advantages
from hybrid_rl.steps.loss_weights import add_loss_weights
from tests.conftest import make_rollout, make_turns
from tests.fuzz.cases import check_close

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
Rows = list[list[float]]
GROUP_ESTIMATORS = ["grpo", "rloo", "dr_grpo", "opo", "reinforce_pp_baseline"]


def random_batch(rng: random.Random) -> tuple[TrainBatch, dict[str, Any]]:
    """Return a batch of responses with every field, and the numbers of its sampled tokens as ragged lists."""
    groups, lengths = [], []
    for group in range(rng.randint(1, 3)):
        groups += [group] * rng.randint(2, 4)
    lengths = [rng.choice([0, 1, rng.randint(2, 7)]) for _ in groups]
    truncated = [rng.random() < 0.3 for _ in groups]

    def ragged(draw: Any) -> Rows:
        return [[draw() for _ in range(length)] for length in lengths]

    drawn: dict[str, Any] = {
        "groups": groups,
        "lengths": lengths,
        "truncated": truncated,
        "rewards": [rng.choice([0.0, 1.0, rng.uniform(-3, 3)]) for _ in groups],
        "baselines": [rng.uniform(-1, 1) for _ in groups],
        "bootstrap": [rng.uniform(-1, 1) for _ in groups],
        "old_logprobs": ragged(lambda: -rng.uniform(0.01, 6)),
        "ref_logprobs": ragged(lambda: -rng.uniform(0.01, 6)),
        "rollout_logprobs": ragged(lambda: -rng.uniform(0.01, 6)),
        "values": ragged(lambda: rng.uniform(-2, 2)),
    }
    are_conversations = rng.random() < 0.5
    turns = [random_turns(rng, n) if are_conversations else [n] if n else [] for n in lengths]
    sampled = [[n for n in row if n > 0] for row in turns]
    drawn["turns"] = [[k for k, n in enumerate(row) for _ in range(n)] for row in sampled]
    drawn["token_rewards"] = ragged(lambda: rng.choice([0.0, 0.0, rng.uniform(-1, 1)]) if are_conversations else 0.0)
    rollouts = [
        make_rollout([1], [4] * sum(map(abs, row)), prompt_id=g, sequence_id=i, is_truncated=t, rollout_logprobs=r,
                     turns=make_turns(*row) if are_conversations else ())
        for i, (g, row, t, r) in enumerate(zip(groups, turns, truncated, drawn["rollout_logprobs"], strict=True))
    ]  # fmt: skip
    batch = make_train_batch(rollouts)
    fields: dict[str, Any] = {}
    for name in ("old_logprobs", "ref_logprobs", "values", *(["token_rewards"] if are_conversations else [])):
        fields[name] = padded(drawn[name], batch.response_mask, rng.choice([0.0, 9.0, math.nan]))
    return batch.with_fields(rewards=torch.tensor(drawn["rewards"]), **fields), drawn


def random_turns(rng: random.Random, num_sampled: int) -> list[int]:
    """Return the lengths of turns, of observations as negative numbers, which have the sampled tokens together."""
    turns = [-1] if rng.random() < 0.2 else []
    while num_sampled:
        turns.append(rng.randint(1, num_sampled))
        num_sampled -= turns[-1]
        turns += [-rng.randint(1, 3)] if rng.random() < 0.7 else []
    return turns


def padded(rows: Rows, mask: torch.Tensor, filler: float = 0.0) -> torch.Tensor:
    """Return ragged rows as [B, T], with a filler outside the mask."""
    result = torch.full(mask.shape, filler)
    for row, values in enumerate(rows):
        result[row, mask[row]] = torch.tensor(values)
    return result


def unpadded(tensor: torch.Tensor, mask: torch.Tensor) -> Rows:
    """Return the entries of [B, T] at the sampled tokens, after checking that all others are 0."""
    for row, is_sampled in enumerate(mask):
        assert not tensor[row, ~is_sampled].any(), (
            f"row {row} is not 0 at the tokens that are not sampled: {tensor[row]}"
        )
    return [tensor[row, is_sampled].tolist() for row, is_sampled in enumerate(mask)]


def token_kl(log_p: float, log_q: float, estimator: str) -> float:
    """Return the KL estimate of a token."""
    d = log_p - log_q
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def check_advantages(rng: random.Random, folder: Path) -> None:
    """Advantages and value targets of every estimator are what their definitions give, token by token."""
    batch, drawn = random_batch(rng)
    estimator = rng.choice(["gae", "gae", "reinforce_pp", "remax", *GROUP_ESTIMATORS])
    kl_in, kl_coef = rng.choice(["reward", "loss"]), rng.choice([0.0, 0.1, 0.5])
    config = AdvantageConfig(
        estimator=estimator,
        gamma=rng.choice([1.0, 0.9]),
        gae_lambda=rng.choice([1.0, 0.95, 0.5, 0.0]),
        turn_gamma=rng.choice([1.0, 0.5, 0.0]),
        credit=rng.choice(["response", "turn"]),
        critic_lambda=rng.choice([None, 1.0]) if estimator == "gae" else None,
        kl_coef=kl_coef,
        kl_in=kl_in,
        kl_estimator=rng.choice(["k1", "k2", "k3"]),
        whiten=rng.random() < 0.4,
        bootstrap_truncated=rng.random() < 0.5,
    )
    if estimator == "remax":
        batch = batch.with_fields(baselines=torch.tensor(drawn["baselines"]))
    bootstrap = torch.tensor(drawn["bootstrap"]) if estimator == "gae" and config.bootstrap_truncated else None
    done, sums = add_advantages(batch, config, WORLD, bootstrap_values=bootstrap)
    kl = [
        [token_kl(p, q, config.kl_estimator) for p, q in zip(one, other, strict=True)]
        for one, other in zip(drawn["old_logprobs"], drawn["ref_logprobs"], strict=True)
    ]
    check_close(sums["kl"], math.fsum(math.fsum(row) for row in kl), "sum of the KL", tolerance=1e-4)
    coef = kl_coef if kl_in == "reward" else 0.0
    if estimator in GROUP_ESTIMATORS:
        expected = group_advantages(drawn, config, kl, coef)
    else:
        expected, returns = token_advantages(drawn, config, kl, coef, has_bootstrap=bootstrap is not None)
        if estimator == "gae":
            check_close(unpadded(done.returns, done.response_mask), returns, "returns", tolerance=1e-4)
    if config.whiten and estimator in ("gae", "reinforce_pp", "reinforce_pp_baseline"):
        expected = whitened(expected)
    if expected is not None:
        check_close(unpadded(done.advantages, done.response_mask), expected, f"{estimator}", tolerance=2e-4)


def paid_at(drawn: dict[str, Any], row: int) -> list[float]:
    """Return what each sampled token of a row is paid: its own reward, and the last one the rest of the score."""
    paid = [torch.tensor(reward).item() for reward in drawn["token_rewards"][row]]
    if paid:
        paid[-1] += torch.tensor(drawn["rewards"][row]).item() - math.fsum(paid)
    return paid


def turn_return(drawn: dict[str, Any], row: int, turn: int, turn_gamma: float) -> float:
    """Return what the tokens of a turn and, discounted, of its successors are paid, rounded to float32."""
    if not drawn["turns"][row]:
        return torch.tensor(drawn["rewards"][row]).item()
    later = [(k - turn, x) for k, x in zip(drawn["turns"][row], paid_at(drawn, row), strict=True) if k >= turn]
    return torch.tensor(math.fsum(turn_gamma**k * x for k, x in later)).item()


def group_advantages(drawn: dict[str, Any], config: AdvantageConfig, kl: Rows, coef: float) -> Rows:
    """Return each response's or turn's reward compared with its group, less the KL of each token."""
    result = []
    for row, group in enumerate(drawn["groups"]):
        members = [i for i, g in enumerate(drawn["groups"]) if g == group]
        advantages = {}
        for turn in {0, *drawn["turns"][row]}:
            if config.credit == "turn":
                others = [i for i in members if turn in drawn["turns"][i] or turn == 0]
                rewards = {i: turn_return(drawn, i, turn, config.turn_gamma) for i in others}
                lengths = {i: drawn["turns"][i].count(turn) for i in others}
            else:
                rewards = {i: torch.tensor(drawn["rewards"][i]).item() for i in members}
                lengths = {i: drawn["lengths"][i] for i in members}
            advantages[turn] = compared(config.estimator, rewards, lengths, row)
        result.append([advantages[turn] - coef * k for turn, k in zip(drawn["turns"][row], kl[row], strict=True)])
    return result


def compared(estimator: str, rewards: dict[int, float], lengths: dict[int, int], row: int) -> float:
    """Return the reward of a row compared with the rewards of all rows, given their lengths."""
    reward, n, mean = rewards[row], len(rewards), math.fsum(rewards.values()) / len(rewards)
    if min(rewards.values()) == max(rewards.values()):
        return 0.0
    if estimator == "grpo":
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards.values()) / (n - 1))
        return (reward - mean) / (std + 1e-6)
    if estimator == "rloo":
        return reward - (math.fsum(rewards.values()) - reward) / (n - 1)
    if estimator == "opo":
        return reward - math.fsum(rewards[i] * lengths[i] for i in rewards) / max(sum(lengths.values()), 1)
    return reward - mean


def token_advantages(
    drawn: dict[str, Any], config: AdvantageConfig, kl: Rows, coef: float, *, has_bootstrap: bool
) -> tuple[Rows, Rows]:
    """Return advantages and value targets by summing every later token's term."""
    advantages, returns = [], []
    for row, length in enumerate(drawn["lengths"]):
        paid = [x - coef * k for x, k in zip(paid_at(drawn, row), kl[row], strict=True)]
        gamma, turns = config.gamma, drawn["turns"][row]

        def total(decay: float, terms: list[float], turns: list[int] = turns, length: int = length) -> list[float]:
            """Return for each token the sum of later terms, which decay per sampled token and per turn."""
            per_turn = config.turn_gamma
            return [
                math.fsum(decay ** (s - t) * per_turn ** (turns[s] - turns[t]) * terms[s] for s in range(t, length))
                for t in range(length)
            ]

        later = total(gamma, paid)
        if config.estimator == "reinforce_pp":
            advantages.append(later)
        elif config.estimator == "remax":
            advantages.append([g - drawn["baselines"][row] for g in later])
        else:
            values = drawn["values"][row]
            end = drawn["bootstrap"][row] if has_bootstrap and drawn["truncated"][row] else 0.0
            following = [*values[1:], end]
            discounts = [gamma * config.turn_gamma ** (b - a) for a, b in itertools.pairwise([*turns, *turns[-1:]])]
            deltas = [paid[t] + discounts[t] * following[t] - values[t] for t in range(length)]
            found = total(gamma * config.gae_lambda, deltas)
            targets = found if config.critic_lambda is None else total(gamma * config.critic_lambda, deltas)
            advantages.append(found)
            returns.append([a + v for a, v in zip(targets, values, strict=True)])
    return advantages, returns


def whitened(rows: Rows) -> Rows | None:
    """Return the rows with mean 0 and population variance 1; None if rounding decides whether they are all equal."""
    entries = [value for row in rows for value in row]
    if not entries:
        return rows
    mean = math.fsum(entries) / len(entries)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in entries) / len(entries))
    if std < 1e-3:
        return None
    return [[(value - mean) / std for value in row] for row in rows]


def check_policy_losses(rng: random.Random, folder: Path) -> None:
    """Loss and gradient of every token follow from its ratio, advantage and bounds."""
    kind = rng.choice(["clip", "clip", "gspo", "cispo", "pg"])
    low, high = rng.choice([0.2, 0.1, 0.0]), rng.choice([0.2, 0.28, 0.0])
    dual = rng.choice([None, 3.0]) if kind in ("clip", "gspo") else None
    lengths = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    sequence = [i for i, n in enumerate(lengths) for _ in range(n)]
    old = [-rng.uniform(0.01, 4) for _ in sequence]
    new = [o + rng.choice([0.0, rng.gauss(0, 0.3), rng.gauss(0, 2)]) for o in old]
    advantages = [rng.choice([0.0, rng.gauss(0, 1)]) for _ in sequence]
    tensor = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss(
        tensor,
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        kind=kind,
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
        sequence_index=torch.tensor(sequence),
        num_sequences=len(lengths),
    )
    loss.sum().backward()
    for i, advantage in enumerate(advantages):
        members = [j for j, s in enumerate(sequence) if s == sequence[i]] if kind == "gspo" else [i]
        log_ratio = math.fsum(new[j] - old[j] for j in members) / len(members)
        value, slope = _loss_and_slope(kind, log_ratio, new[i], advantage, low, high, dual)
        check_close(loss[i].item(), value, f"{kind} loss of token {i}")
        if slope is not None:
            check_close(float(tensor.grad[i]), slope, f"{kind} gradient of token {i}")


def _loss_and_slope(
    kind: str, log_ratio: float, logprob: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, float | None]:
    """Return the loss of a token and its derivative by the log-prob; None at a bound, where there are two."""
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    bounded = min(max(ratio, 1 - low), 1 + high)
    if kind == "pg":
        return -advantage * logprob, -advantage
    if kind == "cispo":
        return -bounded * advantage * logprob, -bounded * advantage
    objective, is_cut = ratio * advantage, bounded * advantage < ratio * advantage
    if is_cut:
        objective = bounded * advantage
    if dual is not None and advantage < 0 and objective < dual * advantage:
        objective, is_cut = dual * advantage, True
    slope = None if abs(ratio - bounded) < 1e-9 or abs(log_ratio) > 20 else 0.0 if is_cut else -ratio * advantage
    return -objective, slope


def check_losses(rng: random.Random, folder: Path) -> None:
    """Value losses, weights of correction, and aggregates are plain sums over the tokens."""
    batch, drawn = random_batch(rng)
    mask, lengths = batch.response_mask, drawn["lengths"]
    returns = [[rng.uniform(-2, 2) for _ in range(n)] for n in lengths]
    old_values = [[rng.uniform(-2, 2) for _ in range(n)] for n in lengths]
    clip = rng.choice([None, 0.5])
    found, _ = value_loss(
        padded(drawn["values"], mask), padded(old_values, mask), padded(returns, mask), value_clip=clip
    )
    token_loss = []
    for row in range(len(lengths)):
        losses = []
        for v, o, r in zip(drawn["values"][row], old_values[row], returns[row], strict=True):
            near = v if clip is None else o + min(clip, max(-clip, v - o))
            losses.append(max((v - r) ** 2, (near - r) ** 2) / 2)
        token_loss.append(losses)
    check_close(unpadded(torch.where(mask, found, 0), mask), token_loss, "value loss")
    mode, longest = rng.choice(["token_mean", "sequence_mean", "sequence_sum_constant"]), rng.choice([8, 16])
    total = aggregate(found, mask, mode, max_response_tokens=longest)
    filled = [row for row in token_loss if row]
    expected = 0.0
    if filled:
        expected = {
            "token_mean": math.fsum(map(math.fsum, filled)) / sum(map(len, filled)),
            "sequence_mean": math.fsum(math.fsum(row) / len(row) for row in filled) / len(filled),
            "sequence_sum_constant": math.fsum(map(math.fsum, filled)) / (len(filled) * longest),
        }[mode]
    check_close(float(total), expected, mode)
    _check_correction(rng, batch, drawn)


def _check_correction(rng: random.Random, batch: TrainBatch, drawn: dict[str, Any]) -> None:
    """Check the weights of the policy loss, and which tokens are left out."""
    kind, low, high = rng.choice(["none", "tis", "icepop", "sequence_mask"]), 0.5, rng.choice([1.5, 2.0])
    mask_truncated = rng.random() < 0.5
    config = UpdateConfig(correction=kind, correction_low=low, correction_high=high, mask_truncated=mask_truncated)
    done, _ = add_loss_weights(batch, config)
    lengths = drawn["lengths"]
    kept = [0 if mask_truncated and t else n for n, t in zip(lengths, drawn["truncated"], strict=True)]
    assert done.loss_mask.sum(1).tolist() == kept, "other tokens count in the loss"
    expected, pairs = [], zip(drawn["old_logprobs"], drawn["rollout_logprobs"], strict=True)
    for old, engine in pairs:
        ratios = [math.exp(o - e) for o, e in zip(old, engine, strict=True)]
        if kind == "tis":
            ratios = [min(high, max(low, r)) for r in ratios]
        elif kind == "icepop":
            ratios = [r if low <= r <= high else 0.0 for r in ratios]
        elif kind == "sequence_mask" and ratios:
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            ratios = ratios if low <= mean <= high else [0.0] * len(ratios)
        expected.append(ratios)
    if kind == "none":
        assert done.loss_weights is None
        return
    check_close(unpadded(done.loss_weights, batch.response_mask), expected, kind, tolerance=1e-4)
    weights, _ = importance_weights(
        batch.old_logprobs, batch.rollout_logprobs, batch.response_mask, kind=kind, low=low, high=high
    )
    check_close(unpadded(weights, batch.response_mask), expected, kind, tolerance=1e-4)


def check_kl(rng: random.Random, folder: Path) -> None:
    """KL estimates follow their formulas; the controller's coefficient moves towards the target, by at most a fifth."""
    logprobs = [-rng.uniform(0.001, 9) for _ in range(6)]
    reference = [p + rng.choice([0.0, rng.gauss(0, 0.01), rng.gauss(0, 3)]) for p in logprobs]
    for estimator in ("k1", "k2", "k3"):
        found = kl_estimate(
            torch.tensor(logprobs, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64), estimator
        )
        expected = [token_kl(p, q, estimator) for p, q in zip(logprobs, reference, strict=True)]
        check_close(found.tolist(), expected, estimator)
    coef, target, horizon = rng.uniform(0.01, 1), rng.uniform(0.1, 5), rng.randint(1000, 10_000)
    controller = KlController(coef, target=target, horizon=horizon)
    for _ in range(3):
        kl, count = rng.uniform(0, 10), rng.randint(1, 500)
        error = min(0.2, max(-0.2, kl / target - 1))
        coef *= 1 + error * count / horizon
        controller.update(kl, count)
        check_close(controller.coef, coef, "KL coefficient")
