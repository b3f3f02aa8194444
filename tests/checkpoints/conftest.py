"""Engines for the tests of checkpoints and exports."""

from pathlib import Path

import pytest
import torch

from hybrid_rl.config import ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.models.loading import load_actor

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


def make_actor(folder: Path, world: World, stage: int = 2) -> DeepSpeedEngine:
    actor = load_actor(str(folder), ModelsConfig(), CPU)
    return DeepSpeedEngine(actor, OptimizerConfig(lr=1e-2), zero_stage=stage, total_steps=9, world=world)


def weights(trainer: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    with trainer.gathered([name for name, _, _ in trainer.named_shapes()]) as tensors:
        return {name: t.clone() for name, t in tensors.items()}
