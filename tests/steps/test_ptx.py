"""The ptx loss follows its formula, and depends on neither micro-batches, ZeRO stage nor the number of ranks."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl.batch import make_train_batch
from hybrid_rl.config import ConfigError, ModelsConfig, OptimizerConfig, PtxConfig, UpdateConfig
from hybrid_rl.data.mixing import Mixture
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.models.loading import load_actor
from hybrid_rl.steps.logprobs import Packing, token_logprobs
from hybrid_rl.steps.ptx import PtxLoss
from hybrid_rl.steps.updates import update_actor
from tests.conftest import make_rollout

CPU = torch.device("cpu")
TEXTS = [[5, 9, 12, 30, 0], [3, 0], [8, 7, 6, 5, 4, 3, 0], [20, 21, 22, 0], [9, 9, 9, 9, 9, 9]]


def make_engine(folder: Path, world: World, stage: int = 2) -> DeepSpeedEngine:
    # An eps well above rounding keeps AdamW from amplifying gradients that are 0 up to rounding.
    settings = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=1e9)
    actor = load_actor(str(folder / "policy"), ModelsConfig(), CPU)
    return DeepSpeedEngine(actor, settings, zero_stage=stage, total_steps=9, world=world)


def make_loss(world: World, *, batch_size: int = 3, seed: int = 5, texts=TEXTS) -> PtxLoss:
    config = PtxConfig(path="texts.jsonl", coef=0.3, batch_size=batch_size)
    return PtxLoss(texts, config, world, seed=seed)


def step(engine: DeepSpeedEngine, loss: PtxLoss, world: World, tokens: int = 10) -> tuple[float, float]:
    """Take an optimizer step on the texts and a response with advantage 0; return ptx loss and gradient norm."""
    batch = make_train_batch([make_rollout([3], [4], sequence_id=world.rank)])
    batch = batch.with_fields(advantages=torch.zeros(1, 1), old_logprobs=batch.rollout_logprobs)
    config = UpdateConfig(mini_batch_size=world.size, policy_loss="pg")
    options = {"seed": 0, "temperature": 1.0, "max_response_tokens": 3, "limit": TokenLimit(tokens)}
    metrics = update_actor(engine, batch, config, world, ptx=loss.next_batch, ptx_coef=0.3, **options)
    return metrics["ptx_loss"], metrics["grad_norm"]


def train(folder: Path, world: World, *, stage: int = 2, batch_size: int = 3, tokens: int = 10) -> dict[str, Any]:
    """Return the losses and gradient norms of three steps, and the weights after them."""
    engine, loss = make_engine(folder, world, stage), make_loss(world, batch_size=batch_size)
    numbers = [step(engine, loss, world, tokens) for _ in range(3)]
    with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
        return {"numbers": numbers, "weights": {name: t.clone() for name, t in tensors.items()}}


CASES: list[dict[str, int]] = [
    {"stage": 2},
    {"stage": 3},
    {"stage": 2, "tokens": 1},
    {"stage": 3, "batch_size": 1},  # nothing for the second rank
]


def main() -> None:
    """Train as one of two ranks, and save the results."""
    torch.set_num_threads(1)
    world = join_world()
    results = [train(Path(sys.argv[2]), world, **case) for case in CASES]
    torch.save(results, Path(sys.argv[1], f"rank{world.rank}.pt"))


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for numbers, wanted in zip(found["numbers"], expected["numbers"], strict=True):
        assert numbers == pytest.approx(wanted, rel=1e-5)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=2e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def mean_loss(oracle: torch.nn.Module) -> torch.Tensor:
    total = torch.zeros(())
    for text in map(torch.tensor, TEXTS):
        total = total - oracle(text[None]).logits[0, :-1].log_softmax(-1).gather(-1, text[1:, None]).sum()
    return total / (4 + 1 + 6 + 3 + 5)


def norm_of(oracle: torch.nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in oracle.parameters()]))


def test_step_follows_the_formula(tiny, world):
    """-0.3 times the mean over all predicted tokens of an epoch, with transformers' logits and PyTorch's AdamW."""
    engine, loss = make_engine(tiny, world), make_loss(world, batch_size=5)
    mean, norm = step(engine, loss, world)

    oracle = AutoModelForCausalLM.from_pretrained(tiny / "policy")
    expected = mean_loss(oracle)
    assert mean == pytest.approx(expected.item(), rel=1e-5)
    (0.3 * expected).backward()
    assert norm == pytest.approx(norm_of(oracle), rel=1e-5)
    torch.optim.AdamW(oracle.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0).step()
    for (name, ours), theirs in zip(engine.model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), atol=2e-6, rtol=0, msg=name)


def test_policy_and_texts_add_up_in_a_step(tiny, world):
    """The gradient of 0.7 times the policy loss at ratio one, -sum(A log pi) / N, and 0.3 times the texts' mean."""
    engine, loss = make_engine(tiny, world), make_loss(world, batch_size=5)
    responses = [([3, 4], [5, 6, 0], 1.5), ([7], [8, 0], -0.5)]
    rollouts = [make_rollout(prompt, response, prompt_id=i) for i, (prompt, response, _) in enumerate(responses)]
    batch = make_train_batch(rollouts)
    old_logprobs = token_logprobs(engine.module, batch, Packing(limit=TokenLimit(99), world=world), temperature=1.0)
    advantages = torch.tensor([[advantage] * 3 for *_, advantage in responses])
    batch = batch.with_fields(old_logprobs=old_logprobs, advantages=advantages)
    settings = {"seed": 0, "temperature": 1.0, "max_response_tokens": 3, "ptx": loss.next_batch, "ptx_coef": 0.3}
    metrics = update_actor(engine, batch, UpdateConfig(mini_batch_size=2), world, **settings)

    oracle = AutoModelForCausalLM.from_pretrained(tiny / "policy")
    policy = torch.zeros(())
    for prompt, response, advantage in responses:
        ids = torch.tensor([prompt + response])
        table = oracle(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        policy = policy - advantage * table.gather(-1, torch.tensor(response)[:, None]).sum() / 5
    texts = mean_loss(oracle)
    assert metrics["ptx_loss"] == pytest.approx(texts.item(), rel=1e-5)
    (0.7 * policy + 0.3 * texts).backward()
    assert metrics["grad_norm"] == pytest.approx(norm_of(oracle), rel=1e-5)


@pytest.mark.parametrize("tokens", [1, 7, 10_000])
@pytest.mark.parametrize("stage", [2, 3])
def test_micro_batches_and_zero_stages_change_nothing(tiny, world, tokens, stage):
    assert_same(train(tiny, world, tokens=tokens, stage=stage), train(tiny, world))


def test_two_ranks_give_what_one_gives(tiny, world, on_two_ranks):
    first, second = on_two_ranks(__file__)
    for case, one, other in zip(CASES, first, second, strict=True):
        assert_same(one, train(tiny, world, **case))
        assert one["numbers"] == other["numbers"]
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())


def draw(loss: PtxLoss, number: int) -> list[list[list[int]]]:
    """Return the texts of the next batches."""
    return [[sequence.tolist() for sequence in loss.next_batch().batch.sequences] for _ in range(number)]


def test_every_epoch_has_every_text_in_an_order_of_its_own(world):
    seen = [text for (text,) in draw(make_loss(world, batch_size=1), 20)]
    epochs = [seen[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(epoch) == sorted(TEXTS) for epoch in epochs)
    assert any(epoch != epochs[0] for epoch in epochs)
    assert [text for (text,) in draw(make_loss(world, batch_size=1), 20)] == seen
    assert [text for (text,) in draw(make_loss(world, batch_size=1, seed=6), 20)] != seen


def test_stream_continues_from_its_state(world):
    loss = make_loss(world, batch_size=2)
    draw(loss, 4)  # in the middle of the second epoch
    state = json.loads(json.dumps(loss.state_dict()))
    expected = draw(loss, 5)
    other = make_loss(world, batch_size=2)
    other.load_state_dict(state)
    assert draw(other, 5) == expected


@pytest.mark.parametrize("changes", [{"seed": 6}, {"texts": TEXTS[:4]}])
def test_state_of_another_stream_is_refused(world, changes):
    state = make_loss(world).state_dict()
    with pytest.raises(ConfigError, match=r"ptx\.path = texts\.jsonl: .*run\.resume = never"):
        make_loss(world, **changes).load_state_dict(state)


def make_mixed(world: World, *, weights=(1, 2), batch_size: int = 3) -> PtxLoss:
    config = PtxConfig(path=["a", "b"], coef=0.3, batch_size=batch_size)
    return PtxLoss(TEXTS, config, world, seed=5, mixture=Mixture([2, 3], weights, seed=5))


def test_a_mixture_of_texts_follows_its_weights_and_continues_from_its_state(world):
    expected = draw(make_mixed(world), 12)
    assert [sum(text in TEXTS[:2] for text in batch) for batch in expected] == [1] * 12
    assert [text for batch in expected for text in batch if text in TEXTS[:2]][:2] in (TEXTS[:2], TEXTS[1::-1])
    loss, resumed = make_mixed(world), make_mixed(world)
    draw(loss, 5)
    resumed.load_state_dict(json.loads(json.dumps(loss.state_dict())))
    assert draw(resumed, 7) == expected[5:]
    for other in (make_mixed(world, weights=(1, 1)), make_loss(world)):
        with pytest.raises(ConfigError, match=r"restore data, weights, tokenizer and seed"):
            other.load_state_dict(loss.state_dict())


def test_loss_that_is_not_finite_is_an_error(tiny, world):
    engine = make_engine(tiny, world)
    engine.model.model.norm.weight.data.fill_(math.nan)
    name = r"loss is nan in a micro-batch of texts 1 to 3 of the stream of ptx\.path"
    with pytest.raises(FloatingPointError, match=name):
        step(engine, make_loss(world), world)


if __name__ == "__main__":
    main()
