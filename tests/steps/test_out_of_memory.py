"""Work that runs out of memory gives, bit for bit, what it gives with smaller micro-batches from the start."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.batch import TrainBatch, make_train_batch
from hybrid_rl.config import ModelsConfig, OptimizerConfig, PtxConfig, UpdateConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import FirstWait, TrainEngine
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.errors import RunError
from hybrid_rl.memory.micro_batches import Shortage, TokenLimit
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.steps.logprobs import Packing, sequence_values, token_logprobs, token_values
from hybrid_rl.steps.ptx import PtxLoss
from hybrid_rl.steps.updates import update_actor, update_critic
from tests.conftest import make_rollout

CPU = torch.device("cpu")
LENGTHS = [(2, 5), (3, 1), (1, 8), (4, 3), (2, 0), (5, 6), (1, 2), (2, 4)]
"""Prompt and response tokens of the sequences 0 to 7; the longest has 11."""
TEXTS = [[5, 9, 12, 30, 0], [3, 0], [8, 7, 6, 5, 4, 3, 0], [20, 21, 22, 0], [9, 9, 9, 9, 9, 9]]
START, FITS = 24, 13
"""Maximum tokens at the start, and tokens of a micro-batch that fit into memory."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One update in which micro-batches of more than FITS tokens run out of memory."""

    stage: int
    dtype: str = "float32"
    role: str = "actor"
    part: str = "forward"
    """Where: in the model's `forward`, in the `loss` or in the `backward`."""
    ptx: bool = False
    ranks: tuple[int, ...] = (0,)
    """Ranks that run out."""
    recompute: bool = False


def make_batch(world: World) -> TrainBatch:
    """Return this rank's sequences, with all fields that an update reads."""
    generator = torch.Generator().manual_seed(0)
    rollouts, fields = [], torch.randn(8, 4, 8, generator=generator)
    for i, (p, r) in enumerate(LENGTHS):
        tokens = torch.randint(2, 38, (p + r,), generator=generator).tolist()
        rollouts.append(make_rollout(tokens[:p], tokens[p:], prompt_id=i // 2, sequence_id=i))
    batch = make_train_batch(rollouts)
    old, advantages, values, returns = torch.where(batch.response_mask[:, None], fields, 0).unbind(1)
    batch = batch.with_fields(
        old_logprobs=torch.where(batch.response_mask, old * 0.3 - 3.6, 0),
        advantages=advantages,
        values=values,
        returns=returns,
    )
    return batch.select(list(range(8))[world.rank :: world.size])


@contextmanager
def memory_for(module: Any, num_tokens: int, part: str) -> Iterator[None]:
    """Raise PyTorch's out-of-memory error in micro-batches of more tokens."""

    def check(found: int) -> None:
        if found > num_tokens:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {found} tokens")

    layer, decoder = module.model.base_model.layers[-1].mlp, module.model.base_model
    packed: list[int] = []
    hooks = [decoder.register_forward_pre_hook(lambda _, a, k: packed.append(k["input_ids"].numel()), with_kwargs=True)]
    if part == "forward":
        hooks.append(layer.register_forward_pre_hook(lambda _, args: check(args[0].shape[-2])))
    elif part == "loss":
        head = getattr(module.model, "score", None) or module.model.get_output_embeddings()
        hooks.append(head.register_forward_hook(lambda *_: check(packed[-1])))
    else:
        hooks.append(layer.register_full_backward_hook(lambda _, __, outputs: check(outputs[0].shape[-2])))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def make_engine(case: Case, folder: Path, world: World) -> DeepSpeedEngine:
    models = ModelsConfig(dtype=case.dtype, gradient_checkpointing=case.recompute)
    if case.role == "actor":
        module = load_actor(str(folder / "policy"), models, CPU)
    else:
        module = load_value_model(str(folder / "reward"), models, CPU, field="models.critic")
    return DeepSpeedEngine(module, OptimizerConfig(lr=1e-2), zero_stage=case.stage, total_steps=9, world=world)


def update(engine: TrainEngine, case: Case, limit: TokenLimit, world: World) -> dict[str, float]:
    """Take optimizer steps of 4 sequences per rank, the first of which has a micro-batch that runs out."""
    config = UpdateConfig(num_epochs=2, mini_batch_size=4 * world.size, entropy_coef=0.01, clip_high=0.4)
    options: dict[str, Any] = {"seed": 7, "max_response_tokens": 8, "limit": limit}
    if case.role == "critic":
        return update_critic(engine, make_batch(world), config, world, **options)
    if case.ptx:
        texts = PtxLoss(TEXTS, PtxConfig(path="texts", batch_size=3), world, seed=5)
        options |= {"ptx": texts.next_batch, "ptx_coef": 0.3}
    return update_actor(engine, make_batch(world), config, world, temperature=0.8, **options)


def result_of(engine: DeepSpeedEngine, metrics: dict[str, float]) -> dict[str, Any]:
    with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
        weights = {name: tensor.clone() for name, tensor in tensors.items()}
    return {"metrics": metrics, "weights": weights, "state": [t.clone() for t in engine.optimizer_tensors()]}


def run_case(case: Case, folder: Path, world: World) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the results of an update that runs out, and of one that starts with its last limit, and that limit."""
    limit = TokenLimit(START, work="UPDATE_ACTOR", rank=world.rank)
    engine = make_engine(case, folder, world)
    with memory_for(engine.module, FITS if world.rank in case.ranks else 10_000, case.part):
        found = result_of(engine, update(engine, case, limit, world))
    engine = make_engine(case, folder, world)
    expected = result_of(engine, update(engine, case, TokenLimit(limit.tokens), world))
    return found, expected, limit.tokens


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["metrics"] == expected["metrics"]
    weights: dict[str, Tensor] = expected["weights"]
    assert all(torch.equal(weight, weights[name]) for name, weight in found["weights"].items())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found["state"], expected["state"], strict=True))


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


# One rank

ALONE = {
    **{f"zero{stage}-{part}": Case(stage=stage, part=part) for stage in range(4) for part in ("forward", "backward")},
    **{f"zero{stage}-loss": Case(stage=stage, part="loss") for stage in (0, 2)},
    **{f"zero{stage}-bfloat16": Case(stage=stage, dtype="bfloat16", part="backward") for stage in (1, 2, 3)},
    **{
        f"zero{stage}-critic-{part}": Case(stage=stage, role="critic", part=part)
        for stage, part in ((1, "loss"), (3, "forward"))
    },
    **{f"zero{stage}-ptx": Case(stage=stage, ptx=True) for stage in (2, 3)},
    "zero3-recompute": Case(stage=3, recompute=True, part="backward"),
}


@pytest.mark.parametrize("name", ALONE)
def test_an_update_gives_the_bits_of_smaller_micro_batches(
    tiny: Path, world: World, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The packs of 24 tokens do not fit, nor their halves if these have more than 13 tokens."""
    found, expected, limit = run_case(ALONE[name], tiny, world)
    assert_same_bits(found, expected)
    assert limit <= FITS
    assert len(caplog.messages) <= 2 and f"update.micro_batch_tokens = {limit} avoids this" in caplog.messages[-1]


def test_the_first_message_names_the_micro_batch_and_the_setting(
    tiny: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    run_case(Case(stage=2), tiny, world)
    assert "out of memory in UPDATE_ACTOR on rank 0: a micro-batch of" in caplog.messages[0]


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_sequence_that_does_not_fit_alone_ends_the_update(tiny: Path, world: World, part: str) -> None:
    """The longest sequence has 11 tokens; the packs of 24, then of 12 or fewer, do not fit either."""
    case, limit = Case(stage=2, part=part), TokenLimit(START, work="UPDATE_ACTOR", rank=5)
    engine = make_engine(case, tiny, world)
    message = (
        r"^out of memory in UPDATE_ACTOR on rank 5: a sequence of \d+ tokens does not fit alone; lower "
        r"rollout\.max_response_tokens, or set models\.gradient_checkpointing = true, "
    )
    with memory_for(engine.module, 3, part), pytest.raises(RunError, match=message):
        update(engine, case, limit, world)


def test_an_optimizer_step_that_runs_out_ends_the_update(tiny: Path, world: World) -> None:
    engine = make_engine(Case(stage=2), tiny, world)

    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.wrapped.optimizer.optimizer.register_step_pre_hook(exhausted)
    with pytest.raises(RunError, match=r"^out of memory in the optimizer step of UPDATE_CRITIC on rank 0; set "):
        update(engine, Case(stage=2), TokenLimit(START, work="UPDATE_CRITIC"), world)


# SCORE


def test_scores_give_the_bits_of_smaller_packs(tiny: Path, world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A pack holds four micro-batches here, and the setting in the message gives packs of at most the new size."""
    batch, models = make_batch(world), ModelsConfig()
    actor = load_actor(str(tiny / "policy"), models, CPU)
    critic = load_value_model(str(tiny / "reward"), models, CPU, field="models.critic")
    limit = TokenLimit(4 * START, per_setting=4)
    functions: list[tuple[Any, Callable[[Packing], Tensor]]] = [
        (actor, lambda packing: token_logprobs(actor, batch, packing, temperature=0.8)),
        (critic, lambda packing: token_values(critic, batch, packing)),
        (critic, lambda packing: sequence_values(critic, batch, packing)),
    ]
    for module, function in functions:
        with memory_for(module, FITS, "forward"):
            found = function(Packing(limit=limit, world=world))
        assert torch.equal(found, function(Packing(limit=TokenLimit(limit.tokens), world=world)))
    assert limit.tokens == 12  # the pack of all 49 tokens, then the pack of 24 of them
    assert [message.split(", so")[0] for message in caplog.messages] == [
        "out of memory in SCORE on rank 0: a micro-batch of 8 sequences and 49 tokens does not fit",
        "out of memory in SCORE on rank 0: a micro-batch of 3 sequences and 24 tokens does not fit",
    ]
    assert "update.micro_batch_tokens = 3 avoids this" in caplog.messages[-1]


def test_the_setting_in_the_message_is_one_that_a_run_accepts(caplog: pytest.LogCaptureFixture) -> None:
    """update.micro_batch_tokens must hold one sequence, here of 20 tokens."""
    limit = TokenLimit(160, per_setting=4, min_setting=20)
    shortage = Shortage(rank=1, num_sequences=8, num_tokens=160)
    limit.lower([shortage], is_logged=True)
    assert limit.tokens == 80 and "; update.micro_batch_tokens = 20 avoids this" in caplog.messages[-1]
    limit.lower([Shortage(rank=1, num_sequences=4, num_tokens=80)], is_logged=True)
    assert limit.tokens == 40
    assert "; update.micro_batch_tokens = 20 with models.gradient_checkpointing = true" in caplog.messages[-1]


# Two ranks: all agree, as long as no rank waits for another in the middle of its work

TOGETHER = {
    **{f"zero{stage}-forward": Case(stage=stage, ranks=(1,)) for stage in (0, 1, 2)},
    **{f"zero{stage}-backward": Case(stage=stage, part="backward", ranks=(1,)) for stage in (0, 1)},
    "zero1-bfloat16": Case(stage=1, part="backward", dtype="bfloat16", ranks=(0,)),
    "zero2-both-ranks": Case(stage=2, part="loss", dtype="bfloat16", ranks=(0, 1)),
    "zero2-ptx": Case(stage=2, ptx=True, ranks=(1,)),
}


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks: Callable[[str], list[Any]]) -> list[dict[str, Any]]:
    """Run all cases in two processes over gloo; return what each rank saves."""
    return on_two_ranks(__file__)


@pytest.mark.parametrize("name", TOGETHER)
def test_all_ranks_start_again_if_one_runs_out(two_ranks: list[dict[str, Any]], name: str) -> None:
    (found, expected, limit), (other, other_expected, other_limit) = (results[name] for results in two_ranks)
    assert_same_bits(found, expected)
    assert_same_bits(other, other_expected)
    assert limit == other_limit <= FITS
    assert found["metrics"] == other["metrics"]


def test_scores_of_all_ranks_start_again_if_one_runs_out(two_ranks: list[dict[str, Any]]) -> None:
    (found, expected, limit), (other, other_expected, other_limit) = (results["score"] for results in two_ranks)
    assert torch.equal(found, expected) and torch.equal(other, other_expected)
    assert limit == other_limit <= FITS


def test_where_ranks_first_wait_for_each_other(two_ranks: list[dict[str, Any]]) -> None:
    """Under ZeRO 0 and 1 only in the optimizer step, so that forward and backward of a rank may run out alone."""
    assert [results["waits"] for results in two_ranks] == [["step", "step", "backward", "forward"]] * 2


def score_together(tiny: Path, world: World) -> tuple[Tensor, Tensor, int]:
    """Return log-probs of a rank of which the second runs out of memory, those of smaller packs, and the limit."""
    actor, batch, limit = load_actor(str(tiny / "policy"), ModelsConfig(), CPU), make_batch(world), TokenLimit(START)
    with memory_for(actor, FITS if world.rank == 1 else 10_000, "forward"):
        found = token_logprobs(actor, batch, Packing(limit=limit, world=world), temperature=0.8)
    smaller = Packing(limit=TokenLimit(limit.tokens), world=world)
    return found, token_logprobs(actor, batch, smaller, temperature=0.8), limit.tokens


def main() -> None:
    """Run all cases as one of two ranks, and save the results in the folder."""
    folder, tiny = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    world = join_world()
    results: dict[str, Any] = {name: run_case(case, tiny, world) for name, case in TOGETHER.items()}
    results["score"] = score_together(tiny, world)
    waits: list[FirstWait] = [make_engine(Case(stage=stage), tiny, world).first_wait for stage in range(4)]
    results["waits"] = [wait.value for wait in waits]
    torch.save(results, folder / f"rank{world.rank}.pt")


if __name__ == "__main__":
    main()
