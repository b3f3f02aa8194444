"""Slow copies of the policy: a reference that follows it, and its exponential average on the host."""

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

_GATHERED_BYTES = 1 << 30  # of whole weights at once, where ZeRO-3 keeps only shards


def _weights(actor: TrainEngine) -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole weight, to be read before the next one; under ZeRO-3 all ranks must read to the end."""
    for bucket in plan_buckets(actor.named_shapes(), _GATHERED_BYTES):
        with actor.gathered([slot.name for slot in bucket]) as tensors:
            yield from tensors.items()


@torch.no_grad()
def blend_reference(reference: PackedModel, actor: TrainEngine, alpha: float) -> None:
    """Set reference = (1 - alpha) reference + alpha actor in place, computed in float32; a collective under ZeRO-3.

    Every rank holds a whole reference, as FrozenModule does: it must be resident, and notices the change by itself.
    The rule is TR-DPO's soft update (arXiv 2404.09656), and its alpha too.
    """
    parameters = dict(reference.model.named_parameters())
    for name, weight in _weights(actor):
        old = parameters[name]
        old.copy_(torch.lerp(old.float(), weight.float(), alpha))


class MovingReference:
    """A reference that is blended with the actor now and then, and therefore part of a checkpoint."""

    def __init__(
        self, module: PackedModel, actor: TrainEngine, tenant: FrozenModule | PooledModule | None, world: World
    ) -> None:
        """Take a reference and, where it is sent off the GPU between phases, the tenant that does so.

        Raises:
            ConfigError: its weights have other names or shapes than the actor's.
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
        """Run the model; see models.Actor."""
        return self._module(**inputs)

    def blend(self, actor: TrainEngine, alpha: float) -> None:
        """Move towards the actor; see blend_reference."""
        blend_reference(self._module, actor, alpha)

    def snapshot(self) -> Snapshot:
        """Return a copy of the weights, on rank 0, and nothing on the others; the module may be off the GPU."""
        weights = self._weights() if self._world.is_main else {}
        return Snapshot(tensors={name: weight.to("cpu", copy=True) for name, weight in weights.items()})

    def load(self, folder: Path) -> None:
        """Read what a snapshot wrote.

        Raises:
            FileNotFoundError: there is no such file.
        """
        saved = SavedTensors(folder)
        with torch.no_grad():
            for name, tensor in self._weights().items():
                tensor.copy_(saved[name])

    def _weights(self) -> dict[str, Tensor]:
        """Return name -> weight where it is now, sharing memory."""
        if self._tenant is not None:
            return self._tenant.parameters()
        return {name: p.detach() for name, p in self._module.named_parameters()}


class MovingAverage:
    """The exponential moving average of the policy, in float32 in the host memory of rank 0; others hold nothing.

    ema = decay * ema + (1 - decay) * actor, from the weights that the actor has when this is made.
    """

    def __init__(self, actor: TrainEngine, decay: float, world: World) -> None:
        self._actor = actor
        self._decay = decay
        self._world = world
        self._tensors: dict[str, Tensor] = {}
        for name, weight in _weights(actor):
            if world.is_main:
                self._tensors[name] = torch.empty_like(weight, dtype=torch.float32, device="cpu").copy_(weight)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the actor's weights as they are now; a collective under ZeRO-3."""
        for name, weight in _weights(self._actor):
            if self._world.is_main:
                self._tensors[name].lerp_(weight.float().cpu(), 1 - self._decay)

    def weights(self) -> dict[str, Tensor]:
        """Return name -> average in the actor's dtype, for an export; empty on other ranks than 0."""
        dtypes = {name: dtype for name, _, dtype in self._actor.named_shapes()}
        return {name: tensor.to(dtypes[name]) for name, tensor in self._tensors.items()}

    def snapshot(self) -> Snapshot:
        """Return a copy of the average, in float32."""
        return Snapshot(tensors={name: tensor.clone() for name, tensor in self._tensors.items()})

    def load(self, folder: Path) -> None:
        """Read what a snapshot wrote.

        Raises:
            FileNotFoundError: there is no such file.
        """
        saved = SavedTensors(folder)
        for name, tensor in self._tensors.items():
            tensor.copy_(saved[name])
