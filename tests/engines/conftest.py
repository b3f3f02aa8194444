"""Helpers of the tests of DeepSpeedEngine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_rl.batch import Packed
from hybrid_rl.config import ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import packed_inputs

CPU = torch.device("cpu")
STAGES = [0, 1, 2, 3]
SETTINGS = OptimizerConfig(
    lr=1e-2, eps=1e-4, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2, schedule="linear", min_lr_ratio=0.1
)


@pytest.fixture(scope="module")
def world() -> World:
    """The world of one rank."""
    return join_world()


def loss_of(logprobs: Tensor) -> Tensor:
    """Return a loss in which every response token, [N], has another weight."""
    return -(logprobs * torch.linspace(1, 2, len(logprobs))).sum()


def inputs_of(packed: Packed) -> dict[str, Any]:
    """Return the arguments of an actor's forward."""
    return {**packed_inputs(packed), "index": packed.response_index, "targets": packed.targets, "temperature": 1.0}


def take_step(engine: DeepSpeedEngine, pieces: list[Packed]) -> float:
    """Take an optimizer step on several micro-batches, and return the gradient norm."""
    for number, packed in enumerate(pieces):
        logprobs, _ = engine.forward(**inputs_of(packed))
        engine.backward(loss_of(logprobs), is_last=number == len(pieces) - 1)
    return engine.step()


def weights_of(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Return a copy of all weights by name."""
    with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
        return {name: t.clone() for name, t in tensors.items()}


@pytest.fixture
def make_engine(tiny: Path, world: World) -> Callable[..., DeepSpeedEngine]:
    """Return a function that makes the engine of an actor for a ZeRO stage; keywords are fields of ModelsConfig."""

    def make(stage: int, *, settings: OptimizerConfig = SETTINGS, **models: Any) -> DeepSpeedEngine:
        actor = load_actor(str(tiny / "policy"), ModelsConfig(**{"dtype": "float32", **models}), CPU)
        return DeepSpeedEngine(actor, settings, zero_stage=stage, total_steps=6, world=world)

    return make
