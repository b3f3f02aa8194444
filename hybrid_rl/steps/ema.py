"""Copies of the policy that follow it slowly: a moving reference on the GPU, and an EMA on the host."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.checkpoints.snapshot import SavedTensors, Snapshot
from hybrid_rl.config import check
from hybrid_rl.distributed import World
from hybrid_rl.engines import TrainEngine
from hybrid_rl.memory.tenants import FrozenModule, PooledModule
from hybrid_rl.models.packed import PackedModel
from hybrid_rl.weights.bucket import plan_buckets

GATHERED_BYTES = 1 << 30
"""Bytes of weights that are gathered at a time where ZeRO-3 shards them."""


def _gathered_weights(actor: TrainEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield name and unsharded weight, valid until the next one; under ZeRO-3 every rank must iterate to the end."""
    for bucket in plan_buckets(actor.named_shapes(), GATHERED_BYTES):
        with actor.gathered([slot.name for slot in bucket]) as tensors:
            yield from tensors.items()


@torch.no_grad()
def blend_reference(reference: PackedModel, actor: TrainEngine, alpha: float) -> None:
    """Set reference = (1 - alpha) * reference + alpha * actor in place, computed in float32; a collective under ZeRO-3.

    Every rank holds the whole reference, which must be on the device; its tenant notices the in-place change.

    Source: Gorbatovski et al. 2024 (TR-DPO, arXiv 2404.09656), soft update.
    """
    parameters = dict(reference.model.named_parameters())
    for name, weight in _gathered_weights(actor):
        old = parameters[name]
        old.copy_(torch.lerp(old.float(), weight.float(), alpha))


class MovingReference:
    """A reference that moves towards the actor every few steps, and is therefore a part of checkpoints."""

    def __init__(
        self, module: PackedModel, actor: TrainEngine, tenant: FrozenModule | PooledModule | None, world: World
    ) -> None:
        """Wrap a reference.

        Args:
            tenant: moves the module off the GPU between phases; None where the module stays.
        Raises:
            ConfigError: names or shapes of its weights differ from the actor's.
        """
        ours = {name: tuple(p.shape) for name, p in module.model.named_parameters()}
        theirs = {name: shape for name, shape, _ in actor.named_shapes()}
        different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        check(
            not different,
            "models.reference_sync_steps: models.reference must have the weights of models.actor, but "
            f"{len(different)} differ in name or shape, such as {', '.join(different[:3])}",
        )
        self._module = module
        self._tenant = tenant
        self._world = world

    def __call__(self, **inputs: Any) -> Any:
        """Run the model; see `models.packed.Actor`."""
        return self._module(**inputs)

    def blend(self, actor: TrainEngine, alpha: float) -> None:
        """Move towards the actor; see `blend_reference`."""
        blend_reference(self._module, actor, alpha)

    def snapshot(self) -> Snapshot:
        """Return a copy of the weights on rank 0, and an empty one on other ranks; the module may be off the GPU."""
        weights = self._weights() if self._world.is_main else {}
        return Snapshot(tensors={name: weight.to("cpu", copy=True) for name, weight in weights.items()})

    def load(self, folder: Path) -> None:
        """Read the weights that a snapshot wrote.

        Raises:
            ConfigError: the folder holds no weights, or the weights of another model.
        """
        saved, weights = SavedTensors(folder), self._weights()
        saved.check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()})
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(saved[name])

    def _weights(self) -> dict[str, Tensor]:
        """Return name -> view of the weight, on the device or in the tenant's host copy."""
        if self._tenant is not None:
            return self._tenant.parameters()
        return {name: p.detach() for name, p in self._module.named_parameters()}


class EmaWeights:
    """The exponential moving average of the actor's weights, in float32 in the host memory of rank 0.

    ema = decay * ema + (1 - decay) * actor after every step. Other ranks hold no tensors.
    """

    def __init__(self, actor: TrainEngine, decay: float, world: World) -> None:
        """Start from the actor's weights; a collective under ZeRO-3."""
        self._actor = actor
        self._decay = decay
        self._world = world
        self._tensors: dict[str, Tensor] = {}
        for name, weight in _gathered_weights(actor):
            if world.is_main:
                self._tensors[name] = torch.empty_like(weight, dtype=torch.float32, device="cpu").copy_(weight)

    @torch.no_grad()
    def update(self) -> None:
        """Move the EMA towards the actor's current weights; a collective under ZeRO-3."""
        for name, weight in _gathered_weights(self._actor):
            if self._world.is_main:
                self._tensors[name].lerp_(weight.float().cpu(), 1 - self._decay)

    def weights(self) -> dict[str, Tensor]:
        """Return name -> EMA in the actor's dtype, for an export; empty on ranks other than 0."""
        dtypes = {name: dtype for name, _, dtype in self._actor.named_shapes()}
        return {name: tensor.to(dtypes[name]) for name, tensor in self._tensors.items()}

    def snapshot(self) -> Snapshot:
        """Return a copy of the EMA in float32."""
        return Snapshot(tensors={name: tensor.clone() for name, tensor in self._tensors.items()})

    def load(self, folder: Path) -> None:
        """Read the weights that a snapshot wrote.

        Raises:
            ConfigError: the folder holds no weights, or the weights of another model.
        """
        saved = SavedTensors(folder)
        if self._world.is_main:
            saved.check_shapes({name: tuple(tensor.shape) for name, tensor in self._tensors.items()})
        for name, tensor in self._tensors.items():
            tensor.copy_(saved[name])
