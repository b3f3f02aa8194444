"""The training state of an engine, unsharded and in float32 for every ZeRO stage and number of ranks.

DeepSpeed's checkpoints hold shards of one ZeRO stage and number of ranks; its universal format needs a conversion
between two runs and does not support ZeRO 0. The functions used here, which gather and set the state of one parameter,
support every stage from 1 on.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from hybrid_rl.checkpoints.snapshot import SavedTensors, Snapshot, divide_among_ranks
from hybrid_rl.config import check
from hybrid_rl.distributed import World
from hybrid_rl.engines.deepspeed.shards import Shards
from hybrid_rl.models.sharding import own_part

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


class TrainingState:
    """Master weights, moments and number of steps of the trained parameters.

    A master weight is the float32 value that the optimizer updates; a bfloat16 model weight is its rounded copy. The
    moments are Adam's. snapshot and load are collectives of all ranks.
    """

    def __init__(self, engine: Any, *, zero_stage: int, world: World, adapters: dict[str, Any], shards: Shards) -> None:
        """Take an engine of the deepspeed package.

        Args:
            adapters: settings of low-rank adapters; see hybrid_rl.models.lora.adapter_settings.
            shards: tensor-parallel shards of the model.
        """
        self._engine = engine
        self._zero = engine.optimizer
        self._base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._stage = zero_stage
        self._world = world
        self._adapters = adapters
        self._shards = shards

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps taken."""
        return int(self._engine.lr_scheduler.last_epoch)

    def snapshot(self) -> Snapshot:
        """Return the part of the training state that this rank saves, copied to the host.

        Each rank saves the unsharded state of some parameters, about equally many elements. The state must be on the
        device of the optimizer.
        """
        keys = (MASTER, *MOMENTS) if self.num_steps else (MASTER,)  # the first step creates the moments
        if self.num_steps:
            self._link_moments()
        sizes = {name: math.prod(self._shards.shape(parameter)) for name, parameter in self._trained()}
        tensors, owners = {}, divide_among_ranks(sizes, self._world.size)
        for name, parameter in self._trained():
            for key in keys:
                full = self._shards.unshard(parameter, self._get(parameter, key))
                if owners[name] == self._world.rank:
                    tensors[f"{name}/{key}"] = full.detach().to("cpu", torch.float32, copy=True)
        return Snapshot(
            tensors=tensors, notes={"num_steps": str(self.num_steps), "adapters": json.dumps(self._adapters)}
        )

    def load(self, parts: SavedTensors) -> None:
        """Set the training state, including the model weights, of an engine that has taken no step.

        Raises:
            ConfigError: the saved tensors are of another model or other adapters.
        """
        saved, num_steps = json.loads(parts.notes.get("adapters", "{}")), int(parts.notes.get("num_steps", 0))
        check(
            saved == self._adapters,
            f"models.lora gives {self._adapters}, but the checkpoint was saved with {saved}: set models.lora back",
        )
        keys = (MASTER, *MOMENTS) if num_steps else (MASTER,)
        parts.check_shapes(
            {f"{name}/{key}": tuple(self._shards.shape(p)) for name, p in self._trained() for key in keys}
        )
        if num_steps:
            self._make_moments(num_steps)
        for name, parameter in self._trained():
            for key in keys:
                self._set(parameter, key, self._shards.shard(parameter, parts[f"{name}/{key}"]))
            self._set_model_weight(parameter, self._shards.shard(parameter, parts[f"{name}/{MASTER}"]))
        self._set_schedule(num_steps)

    def optimizer_tensors(self) -> list[Tensor]:
        """Return the tensors that only the optimizer reads: master weights and moments, which are created if missing.

        Master weights that are the model weights themselves are left out.
        """
        flat = self.stepped_tensors()
        if any(key not in self._base.state[tensor] for tensor in flat for key in MOMENTS):
            self._make_moments(self.num_steps)
        weights = {storage_of(tensor) for tensor in self.weights()}
        masters = [tensor for tensor in flat if storage_of(tensor) not in weights]
        return [*masters, *(self._base.state[tensor][key] for tensor in flat for key in MOMENTS)]

    def gradient_buffers(self) -> list[Tensor]:
        """Return the gradient buffers that DeepSpeed keeps; their contents have no meaning between two updates."""
        if self._stage == 3:
            buckets = [bucket.buffer for bucket in self._zero.ipg_buckets.values() if bucket.buffer is not None]
            return [self._zero.grad_partitions_flat_buffer, *buckets]
        return list(getattr(self._zero, "fp32_groups_gradients_flat", []))  # ZeRO 1 in bfloat16

    def weights(self) -> list[Tensor]:
        """Return the tensors that forward reads: parameters (this rank's shards of them under ZeRO-3) and buffers."""
        parameters: list[Any] = list(self._engine.module.parameters())
        held = [p.ds_tensor for p in parameters] if self._stage == 3 else parameters
        return [*held, *self._engine.module.buffers()]

    def stepped_tensors(self) -> list[Tensor]:
        """Return the tensors that the optimizer updates: flat shards of many parameters, or under ZeRO 0 parameters."""
        if self._stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        return [tensor for group in self._base.param_groups for tensor in group["params"]]

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and parameter of all parameters that require gradients."""
        return ((name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad)

    def _get(self, parameter: nn.Parameter, key: str) -> Tensor:
        """Return the master weight or a moment, gathered from the ZeRO ranks."""
        if self._stage == 0:
            return parameter if key == MASTER else self._base.state[parameter][key]
        return safe_get_full_fp32_param(parameter) if key == MASTER else safe_get_full_optimizer_state(parameter, key)

    def _set(self, parameter: Any, key: str, value: Tensor) -> None:
        """Set the master weight or a moment from its full value; each rank keeps its ZeRO shard."""
        if self._stage == 0:
            self._get(parameter, key).data.copy_(value)
        elif self._stage < 3:
            if key == MASTER:
                safe_set_full_fp32_param(parameter, value)
            elif parameter._hp_mapping is not None:  # None: this rank has no element of it
                safe_set_full_optimizer_state(parameter, value, key)
        else:  # DeepSpeed's function for full values fails where the number of ranks does not divide them
            shard = self._zero3_shard(parameter, value)
            if key == MASTER:
                safe_set_local_fp32_param(parameter, shard)
            else:
                safe_set_local_optimizer_state(parameter, shard, key)

    def _zero3_shard(self, parameter: Any, value: Tensor) -> Tensor:
        """Return this rank's ZeRO-3 shard of a full value; all shards have one length, zeros pad the last."""
        part, shard = own_part(parameter, value), parameter.ds_tensor
        return nn.functional.pad(part, (0, shard.numel() - part.numel())).to(shard.device)

    def _set_model_weight(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the weight that forward and backward read, rounded from the master weight."""
        if self._stage < 3:
            parameter.data.copy_(value)
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if self._world.is_main:
                parameter.data.copy_(value)

    def _make_moments(self, num_steps: int) -> None:
        """Create the moments, as the optimizer itself would in its first step, and set its step counts."""
        for flat in self.stepped_tensors():
            steps: Any = num_steps  # DeepSpeed's optimizers count with an int
            if isinstance(self._base, torch.optim.AdamW):
                steps = torch.tensor(float(num_steps), device=flat.device)
            state = self._base.state[flat]
            state["step"] = steps
            for key in MOMENTS:  # moments that exist may be in a memory pool, so they stay
                state.setdefault(key, torch.zeros_like(flat, requires_grad=False))
        self._link_moments()

    def _link_moments(self) -> None:
        """Link parameters to their moments under ZeRO 1 and 2, a link that is lost when DeepSpeed moves the moments."""
        if self._stage not in (1, 2):
            return
        groups = self._zero.bit16_groups if hasattr(self._zero, "bit16_groups") else self._zero.bf16_groups
        for parameters, flat in zip(groups, self.stepped_tensors(), strict=True):
            lazy_init_hp_params_optimizer_state(parameters, flat, self._base.state)

    def _set_schedule(self, num_steps: int) -> None:
        """Set the learning rate of the next step, which is a function of the steps taken."""
        scheduler = self._engine.lr_scheduler
        scheduler.last_epoch = num_steps
        rates = [
            base * factor(num_steps) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which is equal for all views of it."""
    return tensor.untyped_storage().data_ptr()
