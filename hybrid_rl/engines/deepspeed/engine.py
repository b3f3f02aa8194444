"""DeepSpeed as the training engine of actor and critic: ZeRO 0 to 3 behind one interface."""

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_rl.checkpoints.snapshot import SavedTensors, Snapshot
from hybrid_rl.config import OptimizerConfig, check
from hybrid_rl.distributed import World
from hybrid_rl.models.lora import (
    ServedTensors,
    adapter_parameters,
    adapter_settings,
    adapters_disabled,
    has_adapters,
    served_weights,
)
from hybrid_rl.models.packed import PackedModel

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
# DeepSpeed compiles its Adams where they run, with the ninja that lies beside this Python even if .venv is not active.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
import deepspeed
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils import set_z3_leaf_modules
from transformers.modeling_layers import GradientCheckpointingLayer

from hybrid_rl.engines.deepspeed.alias import flat_parameters_in
from hybrid_rl.engines.deepspeed.shards import Shards
from hybrid_rl.engines.deepspeed.states import TrainingState
from hybrid_rl.weights.alias import AliasBuffer

deepspeed_logger.setLevel(logging.WARNING)
if not torch.cuda.is_available():
    # At the first start it would compile C++ for half a minute, for a sum over ranks that only inference takes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

_BUCKET_ELEMENTS = 50_000_000  # DeepSpeed's 500 million take 2 GB in bfloat16 for a model of any size
# Not lp_params: the bfloat16 weights stay, they serve SCORE and SYNC between two updates.
_STATES = [
    OffloadStateTypeEnum.optim_states,
    OffloadStateTypeEnum.hp_params,
    OffloadStateTypeEnum.lp_grads,
    OffloadStateTypeEnum.contiguous_grad_buffer,
]


def lr_factor(config: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    """Return optimizer step -> factor on the peak learning rate."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
        shape = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape[config.schedule]

    return factor


def _make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, zero_stage: int, is_offloaded: bool
) -> torch.optim.Optimizer:
    parameters = [p for p in parameters if p.requires_grad]
    matrices, rest = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.kind == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiled where it runs, the first time for a minute

        return DeepSpeedCPUAdam(groups, **options)
    if is_offloaded and zero_stage == 3:  # which offloads the states of no other
        from deepspeed.ops.adam import FusedAdam  # compiled where it runs, by nvcc, the first time for over a minute

        return FusedAdam(groups, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def _settings(config: OptimizerConfig, *, zero_stage: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return what DeepSpeed is configured with."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "steps_per_print": 1 << 60,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": zero_stage,
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "allgather_bucket_size": _BUCKET_ELEMENTS,
        },
    }
    if config.kind == "cpu_adam":
        offload = {"device": "cpu", "pin_memory": device.type == "cuda"}
        settings["zero_optimization"]["offload_optimizer"] = offload
    if dtype == torch.bfloat16:
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings


class DeepSpeedEngine:
    """A model, its gradients and its optimizer, sharded over all ranks."""

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
    ) -> None:
        """Take charge of a module.

        Args:
            alias_buffer: the buffer that holds the parameters, if a rollout engine aliases them.
            tensor_parallel_size: consecutive ranks that get the same inputs and have the model's matrices between them.
            is_offloaded: whether DeepSpeed's own offload will move the optimizer's states.
        Raises:
            ConfigError: the settings exclude each other, or the model cannot be cut; see Shards.
        """
        dtype = next(module.parameters()).dtype
        check(
            zero_stage > 0 or dtype == torch.float32,
            f"update.zero_stage = 0: DeepSpeed keeps no float32 master of {dtype} weights then; use 1 to 3",
        )
        self._shards = Shards(module, tensor_parallel_size)
        settings = _settings(config, zero_stage=zero_stage, dtype=dtype, device=world.device) | self._shards.settings
        if zero_stage == 3 and not has_adapters(module.model):
            # A layer's weights come and go at once instead of module by module, which is half of what ZeRO-3 keeps the
            # host busy with. Not with adapters: the first layer's input has no gradient then, and its backward fails.
            set_z3_leaf_modules(module, [GradientCheckpointingLayer], raise_if_not_found=False)
        factor = lr_factor(config, total_steps)
        parameters = alias_buffer.ordered() if alias_buffer else module.parameters()
        with flat_parameters_in(alias_buffer) if alias_buffer else nullcontext():
            self._engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=_make_optimizer(parameters, config, zero_stage=zero_stage, is_offloaded=is_offloaded),
                lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
                config=settings,
            )
        if tensor_parallel_size > 1:  # compares the ranks' first inputs, by identity if they are no tensors
            self._engine.first_dataloader_check.remove()
        self._shards.prove()
        self._served = served_weights(self.model)
        self._num_replicas = world.size // tensor_parallel_size
        self._zero_stage = zero_stage
        adapters = adapter_settings(self.model)
        self._training_state = TrainingState(
            self._engine, zero_stage=zero_stage, world=world, adapters=adapters, shards=self._shards
        )

    @property
    def module(self) -> nn.Module:
        """The model that was given, without DeepSpeed's wrapping."""
        return self._engine.module

    @property
    def model(self) -> Any:
        """The Hugging Face model inside it."""
        return self._engine.module.model

    def forward(self, **inputs: Any) -> Any:
        """Run the model; under ZeRO-3 every rank must call it equally often."""
        return self._engine(**inputs)

    @torch.no_grad()
    def reference_forward(self, **inputs: Any) -> Any:
        """Run the model without its adapters and without gradient: as it was before training; else like forward.

        Raises:
            ValueError: it has no adapters.
        """
        if not self.has_adapters:
            raise ValueError("a model that is trained itself, without adapters, is no reference for itself")
        with adapters_disabled(self.model):
            return self._engine(**inputs)

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters learn, and the model itself is frozen."""
        return has_adapters(self.model)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a loss that is already normalised over all ranks and micro-batches.

        DeepSpeed averages gradients over the ranks that have other tokens; the factor undoes that, so that they add up.
        """
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self._num_replicas)

    def step(self) -> float:
        """Clip, take an optimizer step and a schedule step; return the gradient norm before clipping.

        Raises:
            FloatingPointError: the gradient norm is not finite.
        """
        if self._zero_stage == 0:  # DeepSpeed clips then, but does not tell the norm
            norm = self._shards.norm(self.module.parameters())
            self._engine.step()
        else:
            self._engine.step()
            norm = float(self._engine.get_global_grad_norm() or 0.0)
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm is {norm}")
        return norm

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return float(self._engine.get_lr()[0])

    def named_shapes(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Return name (as in the model's own checkpoint), full shape and dtype of every weight, tied ones once.

        Adapters do not appear: they are merged into the weights that they change.
        """
        return [(name, self._shards.shape(weight.base), weight.base.dtype) for name, weight in self._served.items()]

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the named weights whole; where ranks hold parts of them a collective, and gone afterwards.

        Merged weights are new tensors, computed each time that they are read.
        """
        wanted = {name: self._served[name] for name in names}
        with self._whole([p for weight in wanted.values() for p in weight.parameters]):
            served = ServedTensors(wanted)
            if self._shards.size > 1:  # now, while every rank is here, and not when it reads one
                yield {name: self._shards.whole(wanted[name].base, served[name]) for name in names}
            else:
                yield served

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapters under the names of peft's files, on the host; under ZeRO-3 a collective."""
        parameters = adapter_parameters(self.model)
        with self._whole(list(parameters.values())):
            return {name: p.detach().cpu().clone() for name, p in parameters.items()}

    def _whole(self, parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        return deepspeed.zero.GatheredParameters(parameters) if self._zero_stage == 3 else nullcontext()

    def offload(self) -> None:
        """Move gradients, fp32 master weights and optimizer moments to pinned host memory.

        Raises:
            ConfigError: DeepSpeed cannot, as of ZeRO 1 in bfloat16.
        """
        check(
            hasattr(self._engine.optimizer, "offload_optimizer"),
            f"memory.swap = deepspeed: DeepSpeed cannot offload update.zero_stage = {self._zero_stage} here; "
            "use 2 or 3, or swap = off",
        )
        self._engine.offload_states(include=_STATES)

    def reload(self) -> None:
        """Move them back."""
        self._engine.reload_states()

    def optimizer_tensors(self) -> list[Tensor]:
        """Return float32 masters and moments of this rank; the moments begin to exist here."""
        return self._training_state.tensors()

    def gradient_buffers(self) -> list[Tensor]:
        """Return what DeepSpeed gathers gradients in; it may be zeroed between two steps."""
        return self._training_state.gradient_buffers()

    def weight_tensors(self) -> list[Tensor]:
        """Return the weights and buffers that forward reads, this rank's part of them under ZeRO-3."""
        return self._training_state.weights()

    def drop_gathered(self) -> None:
        """Free the whole weights that ZeRO-3 keeps for the next forward."""
        if self._zero_stage == 3:
            self._engine.optimizer.empty_partition_cache()

    def optimizer_bytes(self) -> int:
        """Return the bytes that offload moves on this rank: three float32 per trained parameter of its shard."""
        numel = sum(self._shards.num_held(p) for p in self.module.parameters() if p.requires_grad)
        return 12 * numel // (self._num_replicas if self._zero_stage > 0 else 1)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of it, over all ranks: three float32 per trained parameter."""
        return 12 * sum(math.prod(self._shards.shape(p)) for p in self.module.parameters() if p.requires_grad)

    def snapshot(self) -> Snapshot:
        """Return this rank's share of all that learns, while it is on the device; every rank calls it."""
        return self._training_state.snapshot()

    def load(self, folder: Path) -> None:
        """Read what the ranks' snapshots wrote, however many they were and with whatever ZeRO stage.

        Raises:
            FileNotFoundError: there is no such part in the folder.
            ConfigError: it was saved with other adapters or of another model.
        """
        self._training_state.load(SavedTensors(folder))
