"""An optimizer step that starts again after an out-of-memory error equals one that never ran out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hybrid_rl.batch import Packed
from hybrid_rl.engines import FirstWait
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from tests.engines.conftest import SETTINGS, inputs_of, loss_of, take_step, weights_of

CASES = [(stage, "float32") for stage in (0, 1, 2, 3)] + [(stage, "bfloat16") for stage in (1, 2, 3)]


def exhausted(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@contextmanager
def no_memory_in(part: str, engine: DeepSpeedEngine, *, call: int) -> Iterator[None]:
    """Raise PyTorch's out-of-memory error in the middle of the model: in its `forward`, or in its `backward`.

    Args:
        call: number of forwards or backwards of the last layer before the one that fails.
    """
    layer: nn.Module = engine.model.model.layers[-1].mlp
    calls = iter(range(1000))

    def count(*_: object) -> None:
        if next(calls) == call:
            exhausted()

    hook = layer.register_forward_pre_hook(count) if part == "forward" else layer.register_full_backward_hook(count)
    try:
        yield
    finally:
        hook.remove()


def run_out(engine: DeepSpeedEngine, pieces: list[Packed], part: str, *, call: int) -> None:
    """Begin an optimizer step that runs out of memory in a micro-batch, or in the loss of the last one."""
    with suppress(torch.OutOfMemoryError), no_memory_in(part, engine, call=call):
        for number, packed in enumerate(pieces):
            logprobs, _ = engine.forward(**inputs_of(packed))
            if part == "loss" and number == call:
                exhausted()
            engine.backward(loss_of(logprobs), is_last=number == len(pieces) - 1)
        raise AssertionError("the step did not run out of memory")


def state_of(engine: DeepSpeedEngine) -> list[Tensor]:
    """Return the optimizer's state: master weights and moments."""
    return [tensor.clone() for tensor in engine.optimizer_tensors()]


def assert_equal(found: DeepSpeedEngine, expected: DeepSpeedEngine) -> None:
    weights = weights_of(expected)
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(found).items())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(state_of(found), state_of(expected), strict=True))


@pytest.mark.parametrize("stage, dtype", CASES)
def test_a_step_that_starts_again_gives_the_same_bits(
    make_engine: Callable[..., DeepSpeedEngine], pieces: list[Packed], stage: int, dtype: str
) -> None:
    """The error is raised in the model's forward, in the loss and in the backward, of the first and the last one."""
    expected = make_engine(stage, dtype=dtype)
    norms = [take_step(expected, pieces) for _ in range(3)]
    engine = make_engine(stage, dtype=dtype)
    found = []
    for _ in range(3):
        for call in (0, len(pieces) - 1):
            for part in ("forward", "loss", "backward"):
                run_out(engine, pieces, part, call=call)
                engine.drop_gradients()
        found.append(take_step(engine, pieces))
    assert found == norms
    assert_equal(engine, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_on_the_host_are_dropped_too(
    make_engine: Callable[..., DeepSpeedEngine], pieces: list[Packed], stage: int
) -> None:
    settings = replace(SETTINGS, kind="cpu_adam")
    expected, engine = (make_engine(stage, settings=settings) for _ in range(2))
    norms, found = [take_step(expected, pieces) for _ in range(2)], []
    for _ in range(2):
        run_out(engine, pieces, "backward", call=len(pieces) - 1)
        engine.drop_gradients()
        found.append(take_step(engine, pieces))
    assert found == norms
    assert_equal(engine, expected)


def test_layers_that_are_computed_again_in_backward_may_run_out(
    make_engine: Callable[..., DeepSpeedEngine], pieces: list[Packed]
) -> None:
    """Under ZeRO-3 the weights of such layers are gathered in the middle of backward."""
    expected, engine = (make_engine(3, gradient_checkpointing=True) for _ in range(2))
    norms = [take_step(expected, pieces) for _ in range(3)]
    found = []
    for _ in range(3):
        run_out(engine, pieces, "forward", call=1)  # the second forward of a layer is in the first backward
        engine.drop_gradients()
        found.append(take_step(engine, pieces))
    assert found == norms
    assert_equal(engine, expected)


def test_a_forward_without_gradient_may_run_out(
    make_engine: Callable[..., DeepSpeedEngine], pieces: list[Packed]
) -> None:
    """Under ZeRO-3 no gathered weight stays."""
    engine = make_engine(3)
    take_step(engine, pieces)
    with torch.no_grad():
        expected = [engine.forward(**inputs_of(packed))[0] for packed in pieces]
        engine.drop_gathered()
        with pytest.raises(torch.OutOfMemoryError), no_memory_in("forward", engine, call=1):
            for packed in pieces:
                engine.forward(**inputs_of(packed))
        assert all(p.numel() == 0 for p in engine.module.parameters())
        found = [engine.forward(**inputs_of(packed))[0] for packed in pieces]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    engine.drop_gathered()
    assert take_step(engine, pieces) > 0


def test_a_single_rank_waits_for_nobody(make_engine: Callable[..., DeepSpeedEngine]) -> None:
    assert make_engine(3).first_wait is FirstWait.STEP
