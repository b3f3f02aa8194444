"""Tensor parallelism: a model whose matrices DeepSpeed's AutoTP shards over consecutive ranks.

DeepSpeed's gather_params replaces the memory of a parameter, which ZeRO 1 and 2 then no longer update. Unsharded
tensors are new tensors here.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn

from hybrid_rl.config import check
from hybrid_rl.models.packed import PackedModel
from hybrid_rl.models.sharding import full_shape
from hybrid_rl.models.tensor_parallel import ShardPlan, check_shard_plan
from hybrid_rl.models.verification import is_close, probe_inputs


class Shards:
    """Which parameters of a model are sharded over `size` consecutive ranks, and how; with size 1 none is.

    With a larger size, verify, unshard and norm are collectives of these ranks.
    """

    def __init__(self, module: PackedModel, size: int) -> None:
        """Plan the shards of an unsharded model, which DeepSpeed shards afterwards.

        Raises:
            ConfigError: see check_shard_plan.
        """
        self.size = size
        self._module = module
        self._plan = check_shard_plan(module.model, size) if size > 1 else ShardPlan()
        self._shapes = {p: full_shape(p) for p in module.parameters()}
        dimensions = {p: self._plan.dimension(name) for name, p in module.model.named_parameters()}
        self._dimensions = {p: d for p, d in dimensions.items() if d is not None}
        self._expected = self._outputs() if size > 1 else []

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of DeepSpeed's AutoTP; empty for size 1."""
        if self.size == 1:
            return {}
        kinds: list[tuple[tuple[str, ...], dict[str, Any]]] = [
            (self._plan.rows, {"partition_type": "column"}),  # DeepSpeed counts the dimensions of the transposed matrix
            (self._plan.columns, {"partition_type": "row"}),
            (self._plan.summed, {"partition_type": "skip", "grad_allreduce": True}),
        ]
        specs = [
            {"patterns": [rf"model\.{re.escape(n)}\.weight$" for n in names]} | kind for names, kind in kinds if names
        ]
        return {
            "tensor_parallel": {
                "autotp_size": self.size,
                "partition_config": {"use_default_specs": False, "layer_specs": specs},
            }
        }

    def verify(self) -> None:
        """Check that the sharded model gives the hidden states and gradients of the unsharded model.

        Raises:
            ConfigError: they differ.
        """
        if self.size == 1:
            return
        name = type(self._module.model).__name__
        for (what, found), (_, expected) in zip(self._outputs(), self._expected, strict=True):
            check(
                is_close(found, expected, 0.25),
                f"update.tensor_parallel_size = {self.size}: {name} has other {what} when it is sharded; use 1",
            )
        self._expected = []

    def _outputs(self) -> list[tuple[str, Tensor]]:
        """Return hidden states and the gradients of unsharded vectors, which a missing sum over ranks would change."""
        both, _ = probe_inputs(self._module.model)
        hidden = self._module.hidden(**both)
        vectors = {
            name: p
            for name, p in self._module.model.base_model.named_parameters()
            if p.ndim < 2 and p not in self._dimensions
        }
        direction = torch.arange(hidden.numel(), device=hidden.device).view_as(hidden).cos()
        gradients = torch.autograd.grad(hidden, list(vectors.values()), direction.to(hidden.dtype))
        return [
            ("hidden states", hidden.detach()),
            *((f"gradients of {n}", g) for n, g in zip(vectors, gradients, strict=True)),
        ]

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the full shape of a parameter, also of one that ZeRO-3 has partitioned, or of a buffer."""
        return self._shapes[tensor] if isinstance(tensor, nn.Parameter) else tuple(tensor.shape)

    def num_local(self, parameter: nn.Parameter) -> int:
        """Return the number of elements of this rank's shard of a parameter."""
        return math.prod(self.shape(parameter)) // (self.size if parameter in self._dimensions else 1)

    def unshard(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """Return the full tensor of which every rank passes its shard; the tensor itself if it is not sharded.

        Args:
            parameter: parameter, or a buffer, which is not sharded.
            tensor: shard of the parameter, or of a tensor with its shape, such as a moment.
        """
        dimension = self._dimensions.get(parameter)
        if dimension is None:
            return tensor
        parts = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather(list(parts), tensor.contiguous(), group=groups.get_tensor_model_parallel_group())
        return parts.flatten(0, 1) if dimension == 0 else torch.cat(tuple(parts), dim=dimension)

    def shard(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor with the shape of the parameter, contiguous."""
        dimension = self._dimensions.get(parameter)
        if dimension is None:
            return full
        return full.chunk(self.size, dimension)[groups.get_tensor_model_parallel_rank()].contiguous()

    def norm(self, parameters: Iterable[nn.Parameter]) -> float:
        """Return the norm of all gradients; unsharded parameters count once."""
        gradients: dict[bool, list[Tensor]] = {True: [], False: []}  # by whether the parameter is sharded
        for parameter in parameters:
            if parameter.grad is not None:
                gradients[parameter in self._dimensions].append(parameter.grad)
        unsharded = nn.utils.get_total_norm(gradients[False])
        if self.size == 1:
            return float(unsharded)
        squared = nn.utils.get_total_norm(gradients[True]).square()
        dist.all_reduce(squared, group=groups.get_tensor_model_parallel_group())
        return float((squared + unsharded.square()).sqrt())
