"""A model whose matrices are cut over a few ranks by DeepSpeed's AutoTP: what is cut, made whole, and proved right.

DeepSpeed's own gather_params puts other memory behind a parameter than the flat buffer that ZeRO 1 and 2 step on, so
that it would be trained no more. What is made whole here is a new tensor.
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
from hybrid_rl.models.tensor_parallel import ShardPlan, check_shard_plan
from hybrid_rl.models.verification import is_close, probe_inputs


class Shards:
    """The parameters of one model as `size` consecutive ranks hold them between them; with 1, each is whole.

    With more, prove, whole and norm are collectives of those ranks.
    """

    def __init__(self, module: PackedModel, size: int) -> None:
        """Look at a whole model, which DeepSpeed will cut.

        Raises:
            ConfigError: see check_shard_plan.
        """
        self.size = size
        self._module = module
        self._plan = check_shard_plan(module.model, size) if size > 1 else ShardPlan()
        self._shapes = {p: tuple(p.shape) for p in module.parameters()}
        dimensions = {p: self._plan.dimension(name) for name, p in module.model.named_parameters()}
        self._dimensions = {p: d for p, d in dimensions.items() if d is not None}
        self._expected = self._behaviour() if size > 1 else []

    @property
    def settings(self) -> dict[str, Any]:
        """What DeepSpeed must be told."""
        if self.size == 1:
            return {}
        kinds: list[tuple[tuple[str, ...], dict[str, Any]]] = [
            (self._plan.rows, {"partition_type": "column"}),  # of the transposed matrix
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

    def prove(self) -> None:
        """Check that what DeepSpeed cut computes what the whole model did, and its gradients.

        Raises:
            ConfigError: it does not.
        """
        if self.size == 1:
            return
        name = type(self._module.model).__name__
        for (what, found), (_, expected) in zip(self._behaviour(), self._expected, strict=True):
            check(
                is_close(found, expected, 0.25),
                f"update.tensor_parallel_size = {self.size}: {name} has other {what} when it is cut; use 1",
            )
        self._expected = []

    def _behaviour(self) -> list[tuple[str, Tensor]]:
        """Return hidden states and the gradients of the whole vectors, which a lost sum over the ranks would change."""
        both, _ = probe_inputs(self._module.model)
        hidden = self._module.hidden(**both)
        vectors = {
            name: p
            for name, p in self._module.model.base_model.named_parameters()
            if p.ndim < 2 and p not in self._dimensions
        }
        towards = torch.arange(hidden.numel(), device=hidden.device).view_as(hidden).cos()
        gradients = torch.autograd.grad(hidden, list(vectors.values()), towards.to(hidden.dtype))
        return [
            ("hidden states", hidden.detach()),
            *((f"gradients of {n}", g) for n, g in zip(vectors, gradients, strict=True)),
        ]

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of the whole parameter, also where ZeRO-3 has partitioned it."""
        return self._shapes[parameter]

    def num_held(self, parameter: nn.Parameter) -> int:
        """Return how many of a parameter's elements this rank works on."""
        return math.prod(self.shape(parameter)) // (self.size if parameter in self._dimensions else 1)

    def whole(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """Return the whole of a parameter or of a tensor like it, its moment say: a new one, unless it is whole."""
        dimension = self._dimensions.get(parameter)
        if dimension is None:
            return tensor
        parts = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather(list(parts), tensor.contiguous(), group=groups.get_tensor_model_parallel_group())
        return parts.flatten(0, 1) if dimension == 0 else torch.cat(tuple(parts), dim=dimension)

    def share(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, contiguous."""
        dimension = self._dimensions.get(parameter)
        if dimension is None:
            return whole
        return whole.chunk(self.size, dimension)[groups.get_tensor_model_parallel_rank()].contiguous()

    def norm(self, parameters: Iterable[nn.Parameter]) -> float:
        """Return the norm of all gradients, each whole parameter's counted once."""
        cut: dict[bool, list[Tensor]] = {True: [], False: []}
        for parameter in parameters:
            if parameter.grad is not None:
                cut[parameter in self._dimensions].append(parameter.grad)
        whole = nn.utils.get_total_norm(cut[False])
        if self.size == 1:
            return float(whole)
        squared = nn.utils.get_total_norm(cut[True]).square()
        dist.all_reduce(squared, group=groups.get_tensor_model_parallel_group())
        return float((squared + whole.square()).sqrt())
