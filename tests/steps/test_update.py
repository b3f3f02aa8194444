"""The result of an update depends neither on its micro-batches nor on the number of ranks."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_rl.batch import TrainBatch, make_train_batch
from hybrid_rl.config import ModelsConfig, OptimizerConfig, UpdateConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.steps.logprobs import Packing, token_logprobs
from hybrid_rl.steps.updates import KlInLoss, balance_mini_batches, num_optimizer_steps, update_actor, update_critic
from tests.conftest import make_rollout

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LENGTHS = [(2, 5), (3, 1), (1, 8), (4, 3), (2, 0), (5, 6), (1, 2), (2, 4)]
"""Prompt and response tokens of the sequences 0 to 7; the response of number 4 is empty."""
# An eps well above rounding keeps AdamW from amplifying gradients that are 0 up to rounding.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.5)


@dataclass(frozen=True)
class Case:
    """One update: role, ZeRO stage, and how its sequences are split."""

    role: str = "actor"
    stage: int = 2
    mini_batch_size: int = 4
    micro_batch_tokens: int = 24
    aggregation: str = "token_mean"
    rows: tuple[tuple[int, ...], ...] = (tuple(range(8)),)
    """Sequence ids of each rank."""


def make_batch(ids: tuple[int, ...]) -> TrainBatch:
    """Return some of the eight sequences with all fields that an update reads; other ids do not change a sequence."""
    generator = torch.Generator().manual_seed(0)
    rollouts, tables = [], []
    for i, (p, r) in enumerate(LENGTHS):
        tokens = torch.randint(2, 38, (p + r,), generator=generator).tolist()
        rollouts.append(make_rollout(tokens[:p], tokens[p:], prompt_id=i // 2, sequence_id=i))
        tables.append(torch.randn(4, 8, generator=generator))
    batch = make_train_batch([rollouts[i] for i in ids])
    width = batch.response_mask.shape[1]
    table = torch.stack([tables[i] for i in ids]) if ids else torch.zeros(0, 4, 8)
    fields = torch.where(batch.response_mask[:, None], table[:, :, :width], 0).unbind(1)
    return batch.with_fields(
        old_logprobs=torch.where(batch.response_mask, fields[0] * 0.3 - 3.6, 0),
        advantages=fields[1],
        values=fields[2],
        returns=fields[3],
    )


def settings_of(case: Case) -> UpdateConfig:
    return UpdateConfig(
        num_epochs=2,
        mini_batch_size=case.mini_batch_size,
        micro_batch_tokens=case.micro_batch_tokens,
        aggregation=case.aggregation,
        entropy_coef=0.01,
        clip_high=0.4,
    )


def run_case(case: Case, folder: Path, world: World) -> dict[str, Any]:
    """Return weights, metrics and this rank's mini-batches after the updates of a case."""
    if case.role == "actor":
        module = load_actor(str(folder / "policy"), ModelsConfig(), CPU)
    else:
        module = load_value_model(str(folder / "reward"), ModelsConfig(), CPU, field="models.critic")
    engine = DeepSpeedEngine(module, OPTIMIZER, zero_stage=case.stage, total_steps=9, world=world)
    batch, config = make_batch(case.rows[world.rank]), settings_of(case)
    if case.role == "actor":
        metrics = update_actor(engine, batch, config, world, seed=7, temperature=0.8, max_response_tokens=8)
    else:
        metrics = update_critic(engine, batch, config, world, seed=7, max_response_tokens=8)
    with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
        weights = {name: t.clone() for name, t in tensors.items()}
    local, rows = balance_mini_batches(batch, case.mini_batch_size, seed=3, world=world)
    composition = [local.sequence_ids[r].tolist() for r in rows]
    return {"weights": weights, "metrics": metrics, "mini_batches": composition}


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


@pytest.fixture(scope="module")
def alone(tiny: Path, world: World):
    """Return the result of a case with all sequences on one rank, computed once."""
    known: dict[tuple, dict[str, Any]] = {}

    def run(role: str = "actor", **changes: Any) -> dict[str, Any]:
        case = Case(role=role, **changes)
        if case not in known:
            known[case] = run_case(case, tiny, world)
        return known[case]

    return run


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def moved(result: dict[str, Any], folder: Path) -> float:
    before = dict(AutoModelForCausalLM.from_pretrained(folder / "policy").named_parameters())
    return max(float((w - before[name].detach()).abs().max()) for name, w in result["weights"].items())


# One rank


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_constant"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_micro_batches_change_nothing(tiny, alone, role, aggregation):
    """A budget of one token gives each sequence a forward of its own, 10,000 the whole mini-batch one."""
    expected = alone(role, aggregation=aggregation, micro_batch_tokens=10_000)
    assert_same(alone(role, aggregation=aggregation, micro_batch_tokens=1), expected)
    assert_same(alone(role, aggregation=aggregation, micro_batch_tokens=13), expected)
    if role == "actor":
        assert moved(expected, tiny) > 1e-2
        assert 0 < expected["metrics"]["clip_fraction"] < 1


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_zero_stages_change_nothing(alone, role):
    expected = alone(role, stage=1)
    assert_same(alone(role, stage=2), expected)
    assert_same(alone(role, stage=3), expected)


def test_aggregations_differ(alone):
    losses = {a: alone(aggregation=a)["metrics"]["loss"] for a in ("token_mean", "sequence_mean")}
    assert abs(losses["token_mean"] - losses["sequence_mean"]) > 1e-3


def test_metrics_are_means(alone):
    metrics = alone()["metrics"]
    assert set(metrics) == {"loss", "entropy", "clip_fraction", "ratio", "log_ratio", "lr", "grad_norm"}
    assert metrics["lr"] == pytest.approx(1e-2)
    assert 0 < metrics["entropy"] < 3.64 and metrics["grad_norm"] > 0.5


def test_ratio_one_is_plain_policy_gradient(tiny, world):
    """The first step follows the gradient of -sum(A log pi) / N, computed with transformers' logits."""
    folder = tiny / "policy"
    actor = load_actor(str(folder), ModelsConfig(), CPU)
    batch = make_batch(tuple(range(8)))
    packing = Packing(limit=TokenLimit(24), world=world)
    batch = batch.with_fields(old_logprobs=token_logprobs(actor, batch, packing, temperature=0.8))
    settings = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=1e9)
    engine = DeepSpeedEngine(actor, settings, zero_stage=2, total_steps=9, world=world)
    config = UpdateConfig(mini_batch_size=8, micro_batch_tokens=24, clip_low=0.0, clip_high=0.0)
    metrics = update_actor(engine, batch, config, world, seed=0, temperature=0.8, max_response_tokens=8)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)

    oracle = AutoModelForCausalLM.from_pretrained(folder)
    loss = torch.zeros(())
    for row, sequence in enumerate(batch.sequences):
        table = (oracle(sequence[None]).logits[0, :-1] / 0.8).log_softmax(-1)
        logprobs = table.gather(-1, sequence[1:, None])[batch.prompt_lengths[row] - 1 :, 0]
        loss = loss - (batch.advantages[row, : len(logprobs)] * logprobs).sum() / 29
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in oracle.parameters()])
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    torch.optim.AdamW(oracle.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0).step()
    for (name, ours), theirs in zip(actor.model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), atol=2e-6, rtol=0, msg=name)


def test_no_clipping_at_ratio_one_even_with_bounds_of_zero(tiny, world):
    """A ratio beyond the bound stops the gradient, a ratio on the bound does not."""
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    engine = DeepSpeedEngine(actor, OPTIMIZER, zero_stage=2, total_steps=9, world=world)
    batch = make_batch((0, 2, 5))
    batch = batch.with_fields(
        old_logprobs=token_logprobs(actor, batch, Packing(limit=TokenLimit(99), world=world), temperature=1.0)
    )
    config = UpdateConfig(mini_batch_size=3)
    metrics = update_actor(engine, batch, config, world, seed=0, temperature=1.0, max_response_tokens=8)
    assert metrics["clip_fraction"] == 0 and metrics["grad_norm"] > 0.1


def test_values_within_the_bound_do_not_count_as_clipped(tiny, world):
    """old + (new - old) differs from new by rounding, which does not count as clipped."""
    module = load_value_model(str(tiny / "reward"), ModelsConfig(), CPU, field="models.critic")
    engine = DeepSpeedEngine(module, OPTIMIZER, zero_stage=2, total_steps=9, world=world)
    config = UpdateConfig(mini_batch_size=8, value_clip=1e3)
    metrics = update_critic(engine, make_batch(tuple(range(8))), config, world, seed=0, max_response_tokens=8)
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_nan_names_the_sequences(tiny, world, role):
    batch = make_batch(tuple(range(8)))
    field = getattr(batch, "advantages" if role == "actor" else "returns")
    field[5, 3] = torch.nan
    config = UpdateConfig(mini_batch_size=8, micro_batch_tokens=1)  # each sequence in a micro-batch of its own
    with pytest.raises(FloatingPointError, match=r"loss is nan in a micro-batch of the sequences \[5\]$"):
        if role == "actor":
            module = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
            engine = DeepSpeedEngine(module, OPTIMIZER, zero_stage=1, total_steps=9, world=world)
            update_actor(engine, batch, config, world, seed=0, temperature=1.0, max_response_tokens=8)
        else:
            module = load_value_model(str(tiny / "reward"), ModelsConfig(), CPU, field="models.critic")
            engine = DeepSpeedEngine(module, OPTIMIZER, zero_stage=1, total_steps=9, world=world)
            update_critic(engine, batch, config, world, seed=0, max_response_tokens=8)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 3e38])
def test_masked_slots_are_not_read(tiny, world, alone, garbage):
    case = Case()
    batch = make_batch(case.rows[0])
    mask = batch.response_mask
    names = ("old_logprobs", "advantages")
    batch = batch.with_fields(**{n: torch.where(mask, getattr(batch, n), garbage) for n in names})
    module = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    engine = DeepSpeedEngine(module, OPTIMIZER, zero_stage=2, total_steps=9, world=world)
    metrics = update_actor(engine, batch, settings_of(case), world, seed=7, temperature=0.8, max_response_tokens=8)
    assert metrics == alone()["metrics"]
    weights = dict(module.model.named_parameters())
    assert all(torch.equal(weights[name], w) for name, w in alone()["weights"].items())


def test_mini_batches_are_a_seeded_partition(world):
    def drawn(ids: tuple[int, ...], seed: int) -> list[list[int]]:
        local, batches = balance_mini_batches(make_batch(ids), 2, seed=seed, world=world)
        return [local.sequence_ids[rows].tolist() for rows in batches]

    batches = drawn((4, 3, 7, 0, 2), 1)
    assert [len(ids) for ids in batches] == [2, 2, 1]
    assert sorted(i for ids in batches for i in ids) == [0, 2, 3, 4, 7]
    assert batches == drawn((7, 4, 2, 3, 0), 1)  # the order of the sequences in the batch does not matter
    assert any(batches != drawn((4, 3, 7, 0, 2), seed) for seed in range(2, 6))


@pytest.mark.parametrize(
    "step_sizes, size, epochs, expected",
    [([8, 8], 4, 1, 4), ([8, 8, 3], 4, 1, 5), ([8, 8, 3], 4, 3, 15), ([1], 4, 1, 1), ([], 4, 2, 0), ([9], 9, 2, 2)],
)
def test_num_optimizer_steps_by_hand(step_sizes, size, epochs, expected):
    assert num_optimizer_steps(step_sizes, UpdateConfig(mini_batch_size=size, num_epochs=epochs)) == expected


# Two ranks

EVEN = ((0, 1, 2, 3), (4, 5, 6, 7))
UNEVEN = ((6, 0, 3, 2, 7, 5), (4, 1))
NOTHING = ((3, 1, 7, 6, 2, 5, 0, 4), ())
CASES = {
    f"{role}-zero{stage}-{name}": Case(role=role, stage=stage, rows=rows, **changes)
    for role, stage in (("actor", 2), ("actor", 3), ("critic", 2), ("critic", 3))
    for name, rows, changes in (
        ("even", EVEN, {}),
        ("uneven", UNEVEN, {}),
        ("one-mini-batch", UNEVEN, {"mini_batch_size": 8}),
        ("rank-without-a-mini-batch", UNEVEN, {"mini_batch_size": 1}),
        ("all-on-one-rank", NOTHING, {"aggregation": "sequence_mean"}),
        ("micro-batches-of-one", UNEVEN, {"micro_batch_tokens": 1}),
    )
    if role == "actor" or name in ("uneven", "all-on-one-rank")
}


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks: Callable[[str], list[Any]]) -> dict[str, list[dict[str, Any]]]:
    """Run every case in two processes over gloo; return each case's result on rank 0 and on rank 1."""
    first, second = on_two_ranks(__file__)
    return {name: [first[i], second[i]] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one(two_ranks, alone, name):
    case = CASES[name]
    expected = alone(case.role, stage=case.stage, mini_batch_size=case.mini_batch_size, aggregation=case.aggregation)
    first, second = two_ranks[name]
    assert_same(first, expected)
    assert first["metrics"] == second["metrics"]
    weights: dict[str, Tensor] = second["weights"]
    assert all(torch.equal(weight, weights[n]) for n, weight in first["weights"].items())


@pytest.mark.parametrize("name", CASES)
def test_mini_batches_do_not_depend_on_the_ranks(two_ranks, alone, name):
    case = CASES[name]
    first, second = (result["mini_batches"] for result in two_ranks[name])
    expected = alone(case.role, stage=case.stage, mini_batch_size=case.mini_batch_size, aggregation=case.aggregation)
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [sorted(x) for x in expected["mini_batches"]]
    if "without" in name:
        assert [] in second  # a rank without sequences of a mini-batch joins its collectives


@pytest.mark.parametrize("name", [name for name in CASES if "one-mini-batch" in name])
def test_ranks_have_about_as_many_tokens_of_a_mini_batch(two_ranks, name):
    """Longest first, sequences 5, 2, 0, 3, 7, 1, 6, 4 have 11, 9, 7, 7, 6, 4, 3, 2 tokens: 25 and 24 of 49."""
    first, second = (result["mini_batches"] for result in two_ranks[name])
    assert [sorted(ids) for ids in first] == [[1, 3, 5, 6]]
    assert [sorted(ids) for ids in second] == [[0, 2, 4, 7]]


def weights_after(tiny: Path, world: World, batch: TrainBatch, **changes: Any) -> tuple[dict[str, Tensor], dict]:
    """Return the actor's weights and metrics after one optimizer step on the whole batch."""
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    engine = DeepSpeedEngine(actor, OPTIMIZER, zero_stage=2, total_steps=9, world=world)
    fields = {name: changes.pop(name) for name in ("kl",) if name in changes}
    config = UpdateConfig(mini_batch_size=8, micro_batch_tokens=24, **changes)
    metrics = update_actor(engine, batch, config, world, seed=0, temperature=0.8, max_response_tokens=8, **fields)
    with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
        return {name: t.clone() for name, t in tensors.items()}, metrics


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_sequences_outside_the_loss_mask_change_nothing(tiny, world, aggregation):
    everyone = make_batch(tuple(range(8)))
    mask = everyone.response_mask.clone()
    mask[[1, 5, 7]] = False
    masked, _ = weights_after(tiny, world, everyone.with_fields(loss_mask=mask), aggregation=aggregation)
    absent, _ = weights_after(tiny, world, make_batch((0, 2, 3, 4, 6)), aggregation=aggregation)
    present, _ = weights_after(tiny, world, everyone, aggregation=aggregation)
    for name, weight in masked.items():
        torch.testing.assert_close(weight, absent[name], atol=1e-6, rtol=0)
    assert any((masked[name] - present[name]).abs().max() > 1e-4 for name in masked)


def test_loss_weights_scale_each_tokens_loss(tiny, world):
    """In the plain policy gradient a factor on the loss is a factor on the advantage."""
    batch = make_batch(tuple(range(8)))
    factors = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(1))
    weighted, _ = weights_after(tiny, world, batch.with_fields(loss_weights=factors), policy_loss="pg")
    scaled, _ = weights_after(tiny, world, batch.with_fields(advantages=batch.advantages * factors), policy_loss="pg")
    plain, _ = weights_after(tiny, world, batch, policy_loss="pg")
    for name, weight in weighted.items():
        torch.testing.assert_close(weight, scaled[name], atol=1e-6, rtol=0)
    assert any((weighted[name] - plain[name]).abs().max() > 1e-4 for name in plain)


def test_kl_in_the_loss_pulls_to_the_reference(tiny, world):
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    batch, packing = make_batch(tuple(range(8))), Packing(limit=TokenLimit(24), world=world)
    old = token_logprobs(actor, batch, packing, temperature=0.8)
    rest = {"advantages": torch.zeros_like(old), "old_logprobs": old}
    kl = KlInLoss(coef=0.5, estimator="k2", is_unbiased=False)
    _, metrics = weights_after(tiny, world, batch.with_fields(ref_logprobs=old, **rest), kl=kl)
    assert metrics["kl_loss"] == pytest.approx(0, abs=1e-9) and metrics["grad_norm"] < 1e-5

    far = batch.with_fields(ref_logprobs=old + 0.4 * batch.response_mask, **rest)
    moved, metrics = weights_after(tiny, world, far, kl=kl)
    assert metrics["kl_loss"] == pytest.approx(0.08, abs=1e-5)  # 0.4^2 / 2
    actor.model.load_state_dict(moved, strict=False)
    new = token_logprobs(actor, batch, packing, temperature=0.8)
    assert (new - old)[batch.response_mask].mean() > 0.1  # a step of 1e-2 overshoots the reference, in its direction


def main() -> None:
    """Run all cases as one of two ranks, and save the results in the folder."""
    folder, tiny = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    world = join_world()
    torch.save([run_case(case, tiny, world) for case in CASES.values()], folder / f"rank{world.rank}.pt")


if __name__ == "__main__":
    main()
