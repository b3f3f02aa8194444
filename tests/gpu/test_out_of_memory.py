"""Work that exhausts a GPU's memory starts again with smaller micro-batches and gives their bits.

Ballast on the card leaves less than a micro-batch of the first size needs, and more than one of half that size needs.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.batch import TrainBatch, make_train_batch
from hybrid_rl.config import MemoryConfig, ModelsConfig, OptimizerConfig, UpdateConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.errors import RunError
from hybrid_rl.memory.device import DeviceMemory, grow_segments
from hybrid_rl.memory.enforcement import GIB, Enforcement
from hybrid_rl.memory.micro_batches import TokenLimit, free_memory
from hybrid_rl.models.determinism import use_deterministic_kernels
from hybrid_rl.models.loading import load_actor
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.steps.logprobs import Packing, token_logprobs
from hybrid_rl.steps.updates import update_actor
from tests.conftest import make_rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPT_TOKENS, RESPONSE_TOKENS = 32, 480
UPDATE_TOKENS, FORWARD_TOKENS = 16384, 65536
"""Maximum tokens of a micro-batch at the start: 32 and 128 sequences."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """The world of one rank; kernels repeat their results bit for bit."""
    use_deterministic_kernels()
    world = join_world()
    grow_segments(world.device, is_on=True)
    yield world
    torch.use_deterministic_algorithms(False)


def make_batch(num_sequences: int) -> TrainBatch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 32_000, (num_sequences, PROMPT_TOKENS + RESPONSE_TOKENS), generator=generator).tolist()
    rollouts = [
        make_rollout(ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:], prompt_id=i, sequence_id=i)
        for i, ids in enumerate(tokens)
    ]
    noise = torch.randn(2, num_sequences, RESPONSE_TOKENS, generator=generator)
    return make_train_batch(rollouts).with_fields(old_logprobs=noise[0] * 0.1 - 10.4, advantages=noise[1])


def make_engine(small: Path, world: World, zero_stage: int) -> DeepSpeedEngine:
    # What the work takes must not depend on whether Liger is installed.
    models = ModelsConfig(gradient_checkpointing=False, fused_layers="off")
    module = load_actor(str(small / "policy"), models, world.device)
    return DeepSpeedEngine(module, OptimizerConfig(lr=1e-4), zero_stage=zero_stage, total_steps=9, world=world)


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes that some work takes beyond what was there before it."""

    allocated: int
    """Of tensors: it cannot run with less."""
    reserved: int
    """Of PyTorch's allocator: it can run with this."""


def measure(work: Callable[[], Any]) -> tuple[Any, Need]:
    """Return the result of some work, and what it needs."""
    free_memory(torch.device("cuda"))
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    result = work()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    need = Need(allocated=peaks[0] - allocated, reserved=peaks[1] - reserved)
    print(f"{need.allocated / GIB:.2f} GiB allocated, {need.reserved / GIB:.2f} GiB reserved")
    return result, need


def between(small: Need, large: Need) -> int:
    """Return a number of bytes in which the small work can run, and the large work cannot."""
    assert large.allocated - small.reserved > GIB // 4
    return (small.reserved + large.allocated) // 2


@contextmanager
def ballast(leaving_bytes: int) -> Iterator[None]:
    """Fill the card except for some bytes."""
    free_memory(torch.device("cuda"))
    free, _ = torch.cuda.mem_get_info()
    weight = torch.empty(free - leaving_bytes, dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del weight
        free_memory(torch.device("cuda"))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same work with half of the tokens from the start, and with all of them on a card without room for them."""

    expected: dict[str, Any]
    found: dict[str, Any]
    limit: TokenLimit
    messages: list[str]
    room_bytes: int
    """Bytes that the ballast leaves."""
    later: Need
    """What the same work takes once more after it has started again."""


def take_steps(engine: DeepSpeedEngine, world: World, limit: TokenLimit) -> dict[str, float]:
    """Take an optimizer step on 32 sequences."""
    config = UpdateConfig(mini_batch_size=32, entropy_coef=0.01)
    options: dict[str, Any] = {"seed": 0, "temperature": 1.0, "max_response_tokens": RESPONSE_TOKENS, "limit": limit}
    return update_actor(engine, make_batch(32), config, world, **options)


def weights_of(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
        return {name: tensor.cpu() for name, tensor in tensors.items()}


class Records:
    """Collects the messages of the limit's logger; caplog works in one test only."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __enter__(self) -> "Records":
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self.messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("hybrid_rl.memory").addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("hybrid_rl.memory").removeHandler(self._handler)


@pytest.fixture(scope="module", params=[1, 2, 3])
def update(small: Path, world: World, request: pytest.FixtureRequest) -> Comparison:
    """An optimizer step at a ZeRO stage."""
    stage = request.param

    def run(tokens: int) -> tuple[dict[str, Any], Need]:
        engine = make_engine(small, world, stage)
        metrics, need = measure(lambda: take_steps(engine, world, TokenLimit(tokens)))
        return {"metrics": metrics, "weights": weights_of(engine)}, need

    expected, smaller = run(UPDATE_TOKENS // 2)
    _, larger = run(UPDATE_TOKENS)
    room = between(smaller, larger)
    free_memory(world.device)
    limit, records, engine = TokenLimit(UPDATE_TOKENS, work="UPDATE_ACTOR"), Records(), make_engine(small, world, stage)
    with ballast(room), records:
        found = {"metrics": take_steps(engine, world, limit), "weights": weights_of(engine)}
        _, later = measure(lambda: take_steps(engine, world, limit))
    return Comparison(
        expected=expected,
        found=found,
        limit=limit,
        messages=records.messages,
        room_bytes=room,
        later=later,
    )


def test_an_update_starts_again_on_a_full_card(update: Comparison) -> None:
    assert update.limit.tokens == UPDATE_TOKENS // 2
    assert update.messages == [
        "out of memory in UPDATE_ACTOR on rank 0: a micro-batch of 32 sequences and 16384 tokens does not fit, so it "
        "starts again with at most 8192 tokens, which hold for the rest of the run; update.micro_batch_tokens = 8192 "
        "avoids this"
    ]
    assert update.later.allocated < update.room_bytes


def test_its_loss_has_the_bits_of_the_smaller_size(update: Comparison) -> None:
    found, expected = update.found["metrics"], update.expected["metrics"]
    print("metrics:", found, expected)
    assert found["loss"] == expected["loss"] and found["entropy"] == expected["entropy"]


def test_its_gradient_and_weights_have_the_bits_of_the_smaller_size(update: Comparison) -> None:
    assert update.found["metrics"] == update.expected["metrics"]
    weights = update.expected["weights"]
    assert all(torch.equal(weight, weights[name]) for name, weight in update.found["weights"].items())


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_log_probs_start_again_on_a_full_card(small: Path, world: World, zero_stage: int) -> None:
    engine, batch = make_engine(small, world, zero_stage), make_batch(128)

    def logprobs(limit: TokenLimit) -> Tensor:
        return token_logprobs(engine.forward, batch, Packing(limit=limit, world=world), temperature=1.0)

    expected, smaller = measure(lambda: logprobs(TokenLimit(FORWARD_TOKENS // 2)))
    _, larger = measure(lambda: logprobs(TokenLimit(FORWARD_TOKENS)))
    limit = TokenLimit(FORWARD_TOKENS, per_setting=4)
    with Records() as records, ballast(between(smaller, larger)):
        found = logprobs(limit)
        again = logprobs(limit)
    assert limit.tokens == FORWARD_TOKENS // 2
    assert len(records.messages) == 1 and "update.micro_batch_tokens = 8192 avoids this" in records.messages[0]
    assert torch.equal(found, expected) and torch.equal(again, expected)


def test_a_sequence_that_does_not_fit_alone_ends_the_run_with_one_sentence(small: Path, world: World) -> None:
    engine = make_engine(small, world, 2)
    take_steps(engine, world, TokenLimit(512))
    with (
        ballast(128 << 20),
        pytest.raises(
            RunError, match=r"^out of memory in UPDATE_ACTOR on rank 0: a sequence of 512 tokens does not fit"
        ),
    ):
        take_steps(engine, world, TokenLimit(UPDATE_TOKENS, work="UPDATE_ACTOR"))


def test_ballast_on_the_card_exceeds_the_plan_of_a_phase(world: World) -> None:
    planned = {"score": {"context": GIB, "activations": 4 * GIB}}
    for enforce in ("warn", "stop"):
        free_memory(world.device)
        enforcement = Enforcement(MemoryConfig(enforce=enforce), rank=0)
        memory = DeviceMemory(world.device, Timeline(0), planned, enforcement=enforcement)
        with Records() as records:
            memory.record_start("score", 1)
            weight = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
            memory.record_peak("score")
            assert records.messages == []
            more = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
            if enforce == "stop":
                with pytest.raises(RunError, match="phase score took"):
                    memory.record_peak("score")
            else:
                memory.record_peak("score")
                memory.record_peak("score")
        print(records.messages)
        assert len(records.messages) == (1 if enforce == "warn" else 0)
        del weight, more
