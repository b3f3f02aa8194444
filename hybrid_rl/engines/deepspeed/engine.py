"""DeepSpeed, ZeRO 0 to 3, as the training engine of actor and critic."""

import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rl.checkpoints.snapshot import SavedTensors, Snapshot
from hybrid_rl.config import OptimizerConfig, check
from hybrid_rl.distributed import World
from hybrid_rl.models.lora import (
    adapter_factors,
    adapter_parameters,
    adapter_settings,
    adapters_disabled,
    base_weights,
    has_adapters,
    served_weights,
)
from hybrid_rl.models.packed import PackedModel

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
# DeepSpeed compiles its optimizers with ninja, which is installed next to Python even if .venv is not activated.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
import deepspeed
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import logger as deepspeed_logger

from hybrid_rl.engines import FirstWait
from hybrid_rl.engines.deepspeed.alias import flat_parameters_in
from hybrid_rl.engines.deepspeed.gradients import delay_reduction, drop_gradients, reduce_delayed, release_weights
from hybrid_rl.engines.deepspeed.settings import deepspeed_settings, lr_factor, make_optimizer
from hybrid_rl.engines.deepspeed.sharding import gather_whole_layers
from hybrid_rl.engines.deepspeed.shards import Shards
from hybrid_rl.engines.deepspeed.sources import ShardedSource, unsharded
from hybrid_rl.engines.deepspeed.states import TrainingState
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.protocols import NamedShape

deepspeed_logger.setLevel(logging.WARNING)
if not torch.cuda.is_available():
    # DeepSpeed would compile a C++ operator at its first start, which only its inference engine uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

# Without lp_params, the bfloat16 weights, which the phases SCORE and SYNC read between two updates.
_OFFLOADED = [
    OffloadStateTypeEnum.optim_states,
    OffloadStateTypeEnum.hp_params,
    OffloadStateTypeEnum.lp_grads,
    OffloadStateTypeEnum.contiguous_grad_buffer,
]


def _check_master(zero_stage: int, dtype: torch.dtype) -> None:
    """Check that DeepSpeed keeps float32 weights beside 16-bit ones."""
    check(
        zero_stage > 0 or dtype == torch.float32,
        f"update.zero_stage = 0: DeepSpeed keeps no float32 master of {dtype} weights then; use 1 to 3",
    )


def _gather_layers(module: PackedModel, *, zero_stage: int) -> None:
    """Leave it to DeepSpeed which weights are gathered, and under ZeRO-3 let it gather whole layers."""
    if module.layer_gathering:
        module.layer_gathering.remove()
    if zero_stage == 3:
        gather_whole_layers(module)


class DeepSpeedEngine:
    """A model, its gradients and its optimizer, sharded over all ranks; see TrainEngine for the methods.

    `wrapped` is the engine of the deepspeed package, `training_state` its parameters and optimizer; for tests.
    """

    def __init__(
        self,
        module: PackedModel,
        config: OptimizerConfig,
        *,
        zero_stage: int,
        total_steps: int,
        world: World,
        alias_buffer: AliasBuffer | None = None,
        tensor_parallel_size: int = 1,
        is_offloaded: bool = False,
        further: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Shard the module and make its optimizer.

        Args:
            module: model on the device of the run, unsharded, or for ZeRO-3 as ZeroSharder leaves it.
            config: settings of the optimizer.
            zero_stage: 0 to 3.
            total_steps: optimizer steps of the whole run, for the learning rate schedule.
            world: all ranks.
            alias_buffer: buffer that holds the parameters if a rollout engine aliases them.
            tensor_parallel_size: number of consecutive ranks over which matrices are sharded; they get the same inputs.
            is_offloaded: whether DeepSpeed's offload moves the optimizer's tensors to the host between updates.
            further: update.deepspeed.

        Raises:
            ConfigError: the settings exclude each other, or the model cannot be sharded; see Shards.
        """
        dtype = next(module.parameters()).dtype
        _check_master(zero_stage, dtype)
        self._shards = Shards(module, tensor_parallel_size)
        settings = self._shards.settings | deepspeed_settings(
            config, zero_stage=zero_stage, dtype=dtype, device=world.device, further=further
        )
        _gather_layers(module, zero_stage=zero_stage)
        factor = lr_factor(config, total_steps)
        parameters = dict.fromkeys([*(alias_buffer.ordered() if alias_buffer else ()), *module.parameters()])
        with flat_parameters_in(alias_buffer) if alias_buffer else nullcontext():
            self.wrapped, *_ = deepspeed.initialize(
                model=module,
                optimizer=make_optimizer(parameters, config, zero_stage=zero_stage, is_offloaded=is_offloaded),
                lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
                config=settings,
            )
        if tensor_parallel_size > 1:  # DeepSpeed compares the ranks' first inputs, other types than tensors by identity
            self.wrapped.first_dataloader_check.remove()
        self._shards.verify()
        self._merged, self.base, self.adapters = (
            ShardedSource(find(self.model), self._shards, zero_stage=zero_stage)
            for find in (served_weights, base_weights, adapter_factors)
        )
        self._num_replicas = world.size // tensor_parallel_size
        self._zero_stage = zero_stage
        delay_reduction(self.wrapped, zero_stage=zero_stage)
        adapters = adapter_settings(self.model)
        self.training_state = TrainingState(
            self.wrapped, zero_stage=zero_stage, world=world, adapters=adapters, shards=self._shards
        )

    @property
    def module(self) -> nn.Module:
        """The PackedModel inside DeepSpeed's engine."""
        return self.wrapped.module

    @property
    def model(self) -> Any:
        """The Hugging Face model inside the module."""
        return self.wrapped.module.model

    @property
    def first_wait(self) -> FirstWait:
        """Where ranks first wait for each other; see TrainEngine."""
        if self._is_alone:
            return FirstWait.STEP
        is_model_parallel = self._shards.size > 1 or self.module.sequence_parallel_group is not None
        if self._zero_stage == 3 or is_model_parallel:
            return FirstWait.FORWARD
        return FirstWait.BACKWARD if self._zero_stage == 2 else FirstWait.STEP

    @property
    def _is_alone(self) -> bool:
        return self._num_replicas * self._shards.size == 1

    def forward(self, **inputs: Any) -> Any:
        """Run the model; under ZeRO-3 every rank must call it equally often."""
        try:
            return self.wrapped(**inputs)
        except torch.OutOfMemoryError:
            if self._zero_stage == 3 and self._is_alone:  # the work can start again with a smaller micro-batch
                release_weights(self.wrapped)
            raise

    @torch.no_grad()
    def reference_forward(self, **inputs: Any) -> Any:
        """Run the model without its adapters and without gradient, which gives the outputs before training.

        Raises:
            ValueError: the model has no adapters.
        """
        if not self.has_adapters:
            raise ValueError("reference_forward: the model has no adapters, so its own weights are trained")
        with adapters_disabled(self.model):
            return self.forward(**inputs)

    @property
    def has_adapters(self) -> bool:
        """Whether only low-rank adapters are trained; see TrainEngine."""
        return has_adapters(self.model)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a loss; see TrainEngine.

        DeepSpeed averages gradients over the data-parallel ranks; the factor turns the average into the sum.
        """
        self.wrapped.set_gradient_accumulation_boundary(is_last)
        self.wrapped.backward(loss * self._num_replicas)

    def drop_gradients(self) -> None:
        """Drop the gradients, so that the optimizer step can start again; see TrainEngine."""
        drop_gradients(self.wrapped, zero_stage=self._zero_stage)

    def step(self) -> float:
        """Take an optimizer step and return the gradient norm before clipping; see TrainEngine.

        Raises:
            FloatingPointError: the gradient norm is not finite.
        """
        reduce_delayed(self.wrapped)
        if self._zero_stage == 0:  # DeepSpeed clips without returning the norm
            norm = self._shards.norm(self.module.parameters())
            self.wrapped.step()
        else:
            self.wrapped.step()
            norm = float(self.wrapped.get_global_grad_norm() or 0.0)
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm is {norm}")
        return norm

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return float(self.wrapped.get_lr()[0])

    def named_shapes(self) -> list[NamedShape]:
        """Return name (of the model's checkpoint), full shape and dtype of every weight; see TrainEngine."""
        return self._merged.named_shapes()

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Yield the named weights unsharded, valid in the body; see TrainEngine.

        Weights with merged adapters are new tensors, computed at each access.
        """
        return self._merged.gathered(names)

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapters under the names of peft's files, on the host; see TrainEngine."""
        parameters = adapter_parameters(self.model)
        with unsharded(parameters.values(), zero_stage=self._zero_stage):
            return {name: p.detach().cpu().clone() for name, p in parameters.items()}

    def offload(self) -> None:
        """Move gradients, float32 master weights and optimizer moments to pinned host memory; see TrainEngine.

        Raises:
            ConfigError: DeepSpeed has no offload for this ZeRO stage and dtype.
        """
        check(
            hasattr(self.wrapped.optimizer, "offload_states"),
            f"memory.swap = deepspeed: DeepSpeed cannot offload update.zero_stage = {self._zero_stage} here; "
            "use 2 or 3, or swap = off",
        )
        self.wrapped.offload_states(include=_OFFLOADED)

    def reload(self) -> None:
        """Move what offload moved back to the device."""
        self.wrapped.reload_states()

    def optimizer_tensors(self) -> list[Tensor]:
        """Return the float32 master weights and moments of this rank; see TrainEngine."""
        return self.training_state.optimizer_tensors()

    def gradient_buffers(self) -> list[Tensor]:
        """Return the buffers in which DeepSpeed reduces gradients; see TrainEngine."""
        return self.training_state.gradient_buffers()

    def weight_tensors(self) -> list[Tensor]:
        """Return the weights and buffers that forward reads; see TrainEngine."""
        return self.training_state.weights()

    def drop_gathered(self) -> None:
        """Free the unsharded weights that ZeRO-3 keeps for the next forward."""
        if self._zero_stage == 3:
            self.wrapped.optimizer.empty_partition_cache()

    def optimizer_bytes(self) -> int:
        """Return the bytes that offload moves on this rank: three float32 per trained element of its shard."""
        numel = sum(self._shards.num_local(p) for p in self.module.parameters() if p.requires_grad)
        return 12 * numel // (self._num_replicas if self._zero_stage > 0 else 1)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the engine's part of a checkpoint, over all ranks: three float32 per trained element."""
        return 12 * sum(math.prod(self._shards.shape(p)) for p in self.module.parameters() if p.requires_grad)

    def snapshot(self) -> Snapshot:
        """Return this rank's part of the training state, which must be on the device; every rank calls it."""
        return self.training_state.snapshot()

    def load(self, folder: Path) -> None:
        """Load the snapshots of all ranks, written with any number of ranks and any ZeRO stage.

        Raises:
            FileNotFoundError: the folder has no snapshot.
            ConfigError: the snapshots have other adapters or are from another model.
        """
        self.training_state.load(SavedTensors(folder))
