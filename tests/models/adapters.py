"""Engines with adapters, a batch and an optimizer step for the tests of LoRA."""

from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_rl.batch import Packed, make_train_batch, pack
from hybrid_rl.checkpoints import export
from hybrid_rl.config import LoraConfig, ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import World
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.packed import packed_inputs
from tests.conftest import make_rollout

CPU = torch.device("cpu")
LORA = LoraConfig(rank=2, alpha=6.0)
OPTIMIZER = OptimizerConfig(lr=3e-2, eps=1e-4, max_grad_norm=0.5)
LENGTHS = [(2, 5), (3, 1), (1, 8), (4, 3)]
"""Prompt and response tokens of four sequences."""


def make_actor(folder: Path, world: World, stage: int = 2, lora: LoraConfig = LORA, **models: Any) -> DeepSpeedEngine:
    torch.manual_seed(11)
    actor = load_actor(str(folder), ModelsConfig(**models), CPU, lora=lora)
    return DeepSpeedEngine(actor, OPTIMIZER, zero_stage=stage, total_steps=9, world=world)


def make_critic(folder: Path, world: World, stage: int = 2, *, new_head: bool = False) -> DeepSpeedEngine:
    torch.manual_seed(12)
    field = "models.critic"
    critic = load_value_model(str(folder), ModelsConfig(), CPU, field=field, lora=LORA, new_head=new_head)
    return DeepSpeedEngine(critic, OPTIMIZER, zero_stage=stage, total_steps=9, world=world)


def make_packed(rows: list[int]) -> Packed:
    """Return rows of the four sequences of LENGTHS, packed."""
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for i, (p, r) in enumerate(LENGTHS):
        ids = torch.randint(2, 38, (p + r,), generator=generator).tolist()
        rollouts.append(make_rollout(ids[:p], ids[p:], prompt_id=i))
    return pack(make_train_batch(rollouts), rows, CPU)


def actor_inputs(packed: Packed) -> dict[str, Any]:
    return packed_inputs(packed) | {"index": packed.response_index, "targets": packed.targets, "temperature": 0.8}


def step(trainer: DeepSpeedEngine, rows: list[int], *, is_critic: bool = False) -> float:
    """Take an optimizer step on rows of the batch and return the gradient norm."""
    packed = make_packed(rows)
    if is_critic:
        loss = (trainer.forward(**packed_inputs(packed), index=packed.response_index) - 0.5).square().sum()
    else:
        logprobs, entropy = trainer.forward(**actor_inputs(packed))
        loss = -(logprobs * packed.targets.remainder(3)).sum() - entropy.sum()
    trainer.backward(loss, is_last=True)
    return trainer.step()


def served(trainer: DeepSpeedEngine) -> dict[str, Tensor]:
    """Return a copy of every weight with its adapter merged."""
    with trainer.gathered([name for name, _, _ in trainer.named_shapes()]) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def stored(trainer: DeepSpeedEngine, stage: int) -> dict[str, tuple[bool, Tensor]]:
    """Return name -> (is trained, value) of every parameter, unmerged and unsharded."""
    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters()), enabled=stage == 3):
        return {name: (p.requires_grad, p.detach().clone()) for name, p in trainer.model.named_parameters()}


def peft_model(base: Path, trainer: DeepSpeedEngine, folder: Path, world: World) -> Any:
    """Export the adapter to a folder and return the base model with it, as peft loads them."""
    export.export_adapter(folder, trainer, world)
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
