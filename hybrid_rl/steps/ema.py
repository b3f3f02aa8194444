"""Copies of the policy that follow it slowly: a moving reference on the GPU, and an EMA on the host."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.checkpoints.snapshot import SavedTensors, Snapshot, divide_among_ranks, piece_name, piece_notes
from hybrid_rl.config import check
from hybrid_rl.distributed import World
from hybrid_rl.engines import TrainEngine
from hybrid_rl.memory.tenants import FrozenModule, PooledModule
from hybrid_rl.models.packed import PackedModel
from hybrid_rl.models.sharding import full_shape, held_weights, is_sharded, own_part, own_range
from hybrid_rl.weights.bucket import plan_buckets
from hybrid_rl.weights.protocols import NamedShape

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

    Every rank holds the whole reference or its shards, which must be on the device; their tenant notices the in-place
    change.

    Source: Gorbatovski et al. 2024 (TR-DPO, arXiv 2404.09656), soft update.
    """
    parameters, held = dict(reference.model.named_parameters()), held_weights(reference.model)
    if reference.layer_gathering:
        reference.layer_gathering.free_gathered()
    for name, weight in _gathered_weights(actor):
        part = own_part(parameters[name], weight)
        old = _filled(held[name], part)
        old.copy_(torch.lerp(old.float(), part.float(), alpha))


def _filled(held: Tensor, part: Tensor) -> Tensor:
    """Return the view of what a rank holds of a weight that its part fills; padding may follow it in a shard."""
    return held if held.shape == part.shape else held[: len(part)]


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
        ours = {name: full_shape(p) for name, p in module.model.named_parameters()}
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
        self._parameters = dict(module.named_parameters())
        self._shapes = {name: full_shape(p) for name, p in self._parameters.items()}

    def __call__(self, **inputs: Any) -> Any:
        """Run the model; see `models.packed.Actor`."""
        return self._module(**inputs)

    def blend(self, actor: TrainEngine, alpha: float) -> None:
        """Move towards the actor; see `blend_reference`."""
        blend_reference(self._module, actor, alpha)

    def snapshot(self) -> Snapshot:
        """Return a copy of this rank's shards, or of its share of whole weights; the module may be off the GPU."""
        weights, tensors = self._weights(), {}
        if is_sharded(self._module):
            for name, held in weights.items():
                start, end = own_range(self._parameters[name], math.prod(self._shapes[name]))
                tensors[piece_name(name, start)] = held[: end - start].to("cpu", copy=True)
            return Snapshot(tensors=tensors, notes=piece_notes(self._shapes))
        sizes = {name: math.prod(shape) for name, shape in self._shapes.items()}
        owners = divide_among_ranks(sizes, self._world.size)
        mine = [name for name in weights if owners[name] == self._world.rank]
        return Snapshot(tensors={name: weights[name].to("cpu", copy=True) for name in mine})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read the weights that snapshots wrote, of whole weights or shards on any number of ranks.

        Raises:
            ConfigError: the folder holds no weights, or the weights of another model.
        """
        saved = SavedTensors(folder)
        saved.check_shapes(self._shapes)
        for name, held in self._weights().items():
            part = own_part(self._parameters[name], saved[name])
            _filled(held, part).copy_(part)

    def _weights(self) -> dict[str, Tensor]:
        """Return name -> what this rank holds of a weight, on the device or in the tenant's host copy."""
        if self._tenant is not None:
            return self._tenant.parameters()
        return {name: held.detach() for name, held in held_weights(self._module).items()}


class EmaWeights:
    """The exponential moving average of the actor's weights, in float32 in host memory.

    ema = decay * ema + (1 - decay) * actor after every step. Each rank holds the average of its share of the weights.
    """

    def __init__(self, actor: TrainEngine, decay: float, world: World) -> None:
        """Start from the actor's weights; a collective under ZeRO-3."""
        self._actor = actor
        self._decay = decay
        self._world = world
        self._shapes = {name: (shape, dtype) for name, shape, dtype in actor.named_shapes()}
        sizes = {name: math.prod(shape) for name, (shape, _) in self._shapes.items()}
        self._owners = divide_among_ranks(sizes, world.size)
        self._tensors: dict[str, Tensor] = {}
        for name, weight in _gathered_weights(actor):
            if self._owners[name] == world.rank:
                self._tensors[name] = torch.empty_like(weight, dtype=torch.float32, device="cpu").copy_(weight)

    @torch.no_grad()
    def update(self) -> None:
        """Move the EMA towards the actor's current weights; a collective under ZeRO-3."""
        for name, weight in _gathered_weights(self._actor):
            if name in self._tensors:
                self._tensors[name].lerp_(weight.float().cpu(), 1 - self._decay)

    def named_shapes(self) -> list[NamedShape]:
        """Return name, shape and dtype of every weight, as the actor has them; see WeightSource."""
        return [(name, *shape) for name, shape in self._shapes.items()]

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the named averages in the actor's dtype on the device of every rank; a collective."""
        found = {}
        for name in names:
            shape, dtype = self._shapes[name]
            if name in self._tensors:
                found[name] = self._tensors[name].to(self._world.device, dtype)
            else:
                found[name] = torch.empty(shape, dtype=dtype, device=self._world.device)
            self._world.broadcast(found[name], sender=self._owners[name])
        yield found

    def snapshot(self) -> Snapshot:
        """Return a copy of this rank's share of the EMA in float32."""
        return Snapshot(tensors={name: tensor.clone() for name, tensor in self._tensors.items()})

    def load(self, folder: Path) -> None:
        """Read the weights that the snapshots of any number of ranks wrote.

        Raises:
            ConfigError: the folder holds no weights, or the weights of another model.
        """
        saved = SavedTensors(folder)
        saved.check_shapes({name: shape for name, (shape, _) in self._shapes.items()})
        for name, tensor in self._tensors.items():
            tensor.copy_(saved[name])
