"""What learns in a training engine, whole and in float32, whatever the ZeRO stage and the number of ranks.

DeepSpeed's own files hold one rank's shard of one ZeRO stage; its universal format needs a converter between two runs
and knows no ZeRO 0. Its functions that gather and set one parameter's state, used here, know every stage from 1 on.
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

from hybrid_rl.checkpoints.snapshot import SavedTensors, Snapshot
from hybrid_rl.config import check
from hybrid_rl.distributed import World
from hybrid_rl.engines.deepspeed.shards import Shards

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


class TrainingState:
    """Master weights, moments, and steps taken, of the parameters that learn. Every method is a collective."""

    def __init__(self, engine: Any, *, zero_stage: int, world: World, adapters: dict[str, Any], shards: Shards) -> None:
        """Look at a DeepSpeed engine; adapters: see hybrid_rl.models.lora.adapter_settings."""
        self._engine = engine
        self._zero = engine.optimizer
        self._base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._stage = zero_stage
        self._world = world
        self._adapters = adapters
        self._shards = shards

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return int(self._engine.lr_scheduler.last_epoch)

    def snapshot(self) -> Snapshot:
        """Return this rank's share, copied to the host: whole parameters, spread evenly over the ranks.

        The states must be where the optimizer works with them.
        """
        keys = (MASTER, *MOMENTS) if self.num_steps else (MASTER,)  # moments begin to exist with the first step
        if self.num_steps:
            self._link_moments()
        tensors, held = {}, [0] * self._world.size
        for name, parameter in self._learning():
            owner = held.index(min(held))
            held[owner] += math.prod(self._shards.shape(parameter))
            for key in keys:
                whole = self._shards.whole(parameter, self._get(parameter, key))
                if owner == self._world.rank:
                    tensors[f"{name}/{key}"] = whole.detach().to("cpu", torch.float32, copy=True)
        return Snapshot(
            tensors=tensors, notes={"num_steps": str(self.num_steps), "adapters": json.dumps(self._adapters)}
        )

    def load(self, parts: SavedTensors) -> None:
        """Set all of it, the weights that compute included; for an engine that has taken no step yet.

        Raises:
            ConfigError: the parts are of other weights or adapters.
        """
        saved, num_steps = json.loads(parts.notes["adapters"]), int(parts.notes["num_steps"])
        check(saved == self._adapters, f"models.lora gives {self._adapters}, but the checkpoint was saved with {saved}")
        keys = (MASTER, *MOMENTS) if num_steps else (MASTER,)
        different = sorted({f"{name}/{key}" for name, _ in self._learning() for key in keys} ^ parts.names)
        check(not different, f"the checkpoint is of another model: {len(different)} weights differ, as {different[:3]}")
        if num_steps:
            self._make_moments(num_steps)
        for name, parameter in self._learning():
            for key in keys:
                self._set(parameter, key, self._shards.share(parameter, parts[f"{name}/{key}"]))
            self._set_computing(parameter, self._shards.share(parameter, parts[f"{name}/{MASTER}"]))
        self._set_schedule(num_steps)

    def tensors(self) -> list[Tensor]:
        """Return what only the optimizer reads: masters, unless they are the weights, and moments, made if need be."""
        flat = self._flat()
        if any(key not in self._base.state[tensor] for tensor in flat for key in MOMENTS):
            self._make_moments(self.num_steps)
        weights = {storage_of(tensor) for tensor in self.weights()}
        masters = [tensor for tensor in flat if storage_of(tensor) not in weights]
        return [*masters, *(self._base.state[tensor][key] for tensor in flat for key in MOMENTS)]

    def gradient_buffers(self) -> list[Tensor]:
        """Return the buffers that DeepSpeed keeps between two updates; zeros and rubbish lie in them then."""
        if self._stage == 3:
            buckets = [bucket.buffer for bucket in self._zero.ipg_buckets.values() if bucket.buffer is not None]
            return [self._zero.grad_partitions_flat_buffer, *buckets]
        return list(getattr(self._zero, "fp32_groups_gradients_flat", []))  # of ZeRO 1 in bfloat16

    def weights(self) -> list[Tensor]:
        """Return all that forward reads: parameters, this rank's part of them under ZeRO-3, and buffers."""
        parameters: list[Any] = list(self._engine.module.parameters())
        shares = [p.ds_tensor for p in parameters] if self._stage == 3 else parameters
        return [*shares, *self._engine.module.buffers()]

    def _learning(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad)

    def _get(self, parameter: nn.Parameter, key: str) -> Tensor:
        if self._stage == 0:
            return parameter if key == MASTER else self._base.state[parameter][key]
        return safe_get_full_fp32_param(parameter) if key == MASTER else safe_get_full_optimizer_state(parameter, key)

    def _set(self, parameter: Any, key: str, value: Tensor) -> None:
        if self._stage == 0:
            self._get(parameter, key).data.copy_(value)
        elif self._stage < 3:
            if key == MASTER:
                safe_set_full_fp32_param(parameter, value)
            elif parameter._hp_mapping is not None:  # else nothing of it is on this rank
                safe_set_full_optimizer_state(parameter, value, key)
        else:  # DeepSpeed's own cut of a whole parameter fails where ranks do not divide it
            share = self._share(parameter, value)
            if key == MASTER:
                safe_set_local_fp32_param(parameter, share)
            else:
                safe_set_local_optimizer_state(parameter, share, key)

    def _share(self, parameter: Any, value: Tensor) -> Tensor:
        """Return this rank's part of a parameter under ZeRO-3: equal parts, the last ones padded."""
        numel = parameter.ds_tensor.numel()
        padded = value.new_zeros(numel * self._world.size)
        padded[: value.numel()] = value.flatten()
        return padded[numel * self._world.rank :][:numel].to(parameter.ds_tensor.device)

    def _set_computing(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the weight that forward and backward use, rounded from the master."""
        if self._stage < 3:
            parameter.data.copy_(value)
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if self._world.is_main:
                parameter.data.copy_(value)

    def _flat(self) -> list[Tensor]:
        """Return the tensors that the optimizer steps on."""
        if self._stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        return [tensor for group in self._base.param_groups for tensor in group["params"]]

    def _make_moments(self, num_steps: int) -> None:
        """Give the optimizer moments to write into; it would make them itself in its first step."""
        for flat in self._flat():
            steps: Any = num_steps  # as DeepSpeed's Adams count
            if isinstance(self._base, torch.optim.AdamW):
                steps = torch.tensor(float(num_steps), device=flat.device)
            state = self._base.state[flat]
            state["step"] = steps
            for key in MOMENTS:  # those that are there already may lie in a pool
                state.setdefault(key, torch.zeros_like(flat, requires_grad=False))
        self._link_moments()

    def _link_moments(self) -> None:
        """Tell parameters where their moments are under ZeRO 1 and 2; DeepSpeed forgets it when it moves them."""
        if self._stage not in (1, 2):
            return
        groups = self._zero.bit16_groups if hasattr(self._zero, "bit16_groups") else self._zero.bf16_groups
        for parameters, flat in zip(groups, self._flat(), strict=True):
            lazy_init_hp_params_optimizer_state(parameters, flat, self._base.state)

    def _set_schedule(self, num_steps: int) -> None:
        """Set the learning rate of the next step; it is a function of the steps taken."""
        scheduler = self._engine.lr_scheduler
        scheduler.last_epoch = num_steps
        rates = [
            base * factor(num_steps) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates


def storage_of(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common."""
    return tensor.untyped_storage().data_ptr()
