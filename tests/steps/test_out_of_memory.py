"""Work that runs out of memory gives, bit for bit, what it gives with smaller micro-batches from the start."""

from collections.abc import Iterator
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
from hybrid_rl.engines import TrainEngine
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.models.loading import load_actor, load_value_model
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
    """Take four optimizer steps."""
    config = UpdateConfig(num_epochs=2, mini_batch_size=4, entropy_coef=0.01, clip_high=0.4)
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
