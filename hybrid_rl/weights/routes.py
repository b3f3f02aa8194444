"""Routes from the trainer's tensors into an engine's parameters, recorded while the engine loads each tensor once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_rl.weights.bucket import Slot
from hybrid_rl.weights.checksum import checksums
from hybrid_rl.weights.experts import spellings
from hybrid_rl.weights.protocols import TensorSlice


@dataclass(frozen=True, kw_only=True)
class Route:
    """A slice of a trainer tensor, and the slice of the engine's parameter that holds it."""

    owner: nn.Module
    leaf: str
    """Name of the parameter in its module; looked up at each use, because the module may replace the tensor."""
    target: TensorSlice
    source: TensorSlice

    def view(self) -> Tensor:
        """Return the slice of the parameter that the engine computes with at the moment."""
        held = getattr(self.owner, self.leaf).detach()
        size, stride, offset = self.target
        return held.as_strided(size, stride, held.storage_offset() + offset)


class CopyRecorder(TorchDispatchMode):
    """Records every copy_ that reads from one storage, as (destination, source).

    A vLLM model knows the place of a checkpoint tensor (rows of a fused projection, shard) only as code in its
    load_weights. Recording that code once gives the destinations as views, with which later weight syncs do without it.
    """

    def __init__(self, bucket: Tensor, *, copies: bool) -> None:
        """Record copies out of the bucket; copies: whether they are executed too."""
        super().__init__()
        self._bucket_address = bucket.untyped_storage().data_ptr()
        self._copies = copies
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.num_foreign = 0
        """Number of copies whose source was computed from the slot; these cannot be repeated."""
        self._rearranged: dict[int, tuple[Tensor, Tensor]] = {}  # address -> (clone, what was cloned)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            clone = func(*args, **(kwargs or {}))
            if args[0].untyped_storage().data_ptr() == self._bucket_address and clone.is_contiguous():
                self._rearranged[clone.untyped_storage().data_ptr()] = (clone, args[0])
            return clone
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        pair = self._origin(args[0], args[1])
        if pair is None:
            self.num_foreign += 1
        else:
            self.seen.append(pair)
            if not self._copies:
                return args[0]
        return func(*args, **(kwargs or {}))

    def _origin(self, destination: Tensor, source: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a copy as (destination, view of the bucket); None if its source is not from the bucket.

        A model may rearrange a tensor: it clones a strided view of the bucket and reshapes the clone, as vLLM does with
        BLOOM's query_key_value. A copy of whole entries of the clone's first dimension equals a copy of such entries of
        the view.
        """
        if source.dtype != destination.dtype:
            return None
        address = source.untyped_storage().data_ptr()
        if address == self._bucket_address:
            return destination, source
        if address not in self._rearranged or not (source.is_contiguous() and destination.is_contiguous()):
            return None
        clone, cloned = self._rearranged[address]
        size = clone.stride(0)
        first, is_between = divmod(int(source.storage_offset()) - int(clone.storage_offset()), size)
        count, has_part = divmod(source.numel(), size)
        if is_between or has_part:
            return None
        return destination.view(count, *cloned.shape[1:]), cloned[first : first + count]


class Routes:
    """Routes of all slots of a bucket into the parameters of a model that has load_weights, as vLLM's models do."""

    def __init__(self, model: Any, bucket: Tensor) -> None:
        self._model = model
        self._bucket = bucket
        self._routes: dict[str, list[Route]] = {}
        self._slots: dict[str, Slot] = {}
        self._owners: dict[int, tuple[nn.Module, str]] = {}
        for module in model.modules():
            for leaf, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                self._owners.setdefault(tensor.untyped_storage().data_ptr(), (module, leaf))

    def record(self, slot: Slot, *, copies: bool) -> None:
        """Let the model load one slot, and record its routes.

        Args:
            copies: whether the values are copied too.

        Raises:
            RuntimeError: the model does not load the tensor, or computes its parameters from it; by name.
        """
        recorder = self._load(slot, copies=copies)
        if recorder.num_foreign:
            raise RuntimeError(
                f"{slot.name}: this vLLM model transforms it while loading ({recorder.num_foreign} computed copies), "
                "so it cannot be synchronized in place; use rollout.engine = hf for this architecture"
            )
        if not recorder.seen:
            raise RuntimeError(f"no engine parameter takes these trainer tensors: {slot.name}")
        self._slots[slot.name] = slot
        self._routes[slot.name] = _joined([self._route(slot, *pair) for pair in recorder.seen])

    def _load(self, slot: Slot, *, copies: bool) -> CopyRecorder:
        """Let the model load one slot, under the names that it knows."""
        failure: Exception | None = None
        for weights in spellings(slot.name, slot.view(self._bucket)):
            recorder = CopyRecorder(self._bucket, copies=copies)
            try:
                with recorder:
                    self._model.load_weights(weights)
            except Exception as error:
                failure = failure or error
            else:
                failure = None
                if recorder.seen or recorder.num_foreign:
                    break
        if failure:
            raise RuntimeError(f"{slot.name}: the engine's model cannot load it, {failure}") from failure
        return recorder

    def _route(self, slot: Slot, destination: Tensor, source: Tensor) -> Route:
        found = self._owners.get(destination.untyped_storage().data_ptr())
        if found is None:
            raise RuntimeError(f"{slot.name}: this vLLM model loads it into memory outside of its parameters")
        owner, leaf = found
        first = getattr(owner, leaf).storage_offset()
        start = slot.offset // slot.dtype.itemsize
        return Route(
            owner=owner,
            leaf=leaf,
            target=(tuple(destination.shape), tuple(destination.stride()), int(destination.storage_offset()) - first),
            source=(tuple(source.shape), tuple(source.stride()), int(source.storage_offset()) - start),
        )

    def pairs(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """Return the recorded copies of a tensor as views (destination, source)."""
        slot = self._slots[name]
        flat = slot.view(self._bucket).flatten()
        return [
            (route.view(), flat.as_strided(*route.source[:2], flat.storage_offset() + route.source[2]))
            for route in self._routes[name]
        ]

    def checksums(self, names: Sequence[str]) -> dict[str, list[tuple[TensorSlice, int]]]:
        """Return, per tensor, the checksum of each slice, read from the parameters that the model computes with."""
        routes = [(name, route) for name in names for route in self._routes[name]]
        held: dict[str, list[tuple[TensorSlice, int]]] = {name: [] for name in names}
        sums = checksums([route.view() for _, route in routes]).tolist()
        for (name, route), total in zip(routes, sums, strict=True):
            held[name].append((route.source, total))
        return held

    def check_complete(self) -> None:
        """Check that every element of every parameter has a route, except the padding rows of a vocabulary.

        Raises:
            RuntimeError: an element of a parameter has none; by name.
        """
        written: dict[int, int] = {}
        for route in self._all():
            key = id(getattr(route.owner, route.leaf))
            written[key] = written.get(key, 0) + torch.Size(route.target[0]).numel()
        modules = [m for m in self._model.modules() if hasattr(m, "num_embeddings_padded") and hasattr(m, "weight")]
        padded = {id(module.weight) for module in modules}
        for name, parameter in self._model.named_parameters():
            count = written.get(id(parameter), 0)
            if count == 0 or (count < parameter.numel() and id(parameter) not in padded):
                raise RuntimeError(
                    f"engine parameter {name}: {count} of {parameter.numel()} elements come from the trainer"
                )

    def alias(self) -> None:
        """Make every parameter a view of the bucket, so that the model computes with the trainer's values.

        Raises:
            RuntimeError: the tensors of a parameter have another layout in the bucket than in the parameter; by name.
        """
        self.check_complete()
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        places: dict[int, int] = {}
        for trainer_name, routes in self._routes.items():
            slot = self._slots[trainer_name]
            for route in routes:
                key = id(getattr(route.owner, route.leaf))
                place = slot.offset // slot.dtype.itemsize + route.source[2] - route.target[2]
                same = _strides(route.source) == _strides(route.target)
                if not same or places.setdefault(key, place) != place:
                    raise RuntimeError(
                        f"{trainer_name} does not lie in the trainer as in engine parameter {names[key]}; "
                        "use sync.mode = copy"
                    )
        for name, parameter in self._model.named_parameters():
            flat, place = self._bucket.view(parameter.dtype), places[id(parameter)]
            if place + parameter.numel() > len(flat):
                raise RuntimeError(f"engine parameter {name} would end after the end of the trainer's buffer")
            parameter.data = flat.as_strided(parameter.shape, parameter.stride(), place)

    def close(self) -> None:
        """Drop every reference to the bucket; the parameters are empty afterwards."""
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self._bucket = torch.empty(0, dtype=torch.uint8)
        self._routes, self._slots, self._owners = {}, {}, {}

    def _all(self) -> list[Route]:
        return [route for routes in self._routes.values() for route in routes]


def _joined(routes: Sequence[Route]) -> list[Route]:
    """Return the routes in order, with routes that continue each other joined into one, such as those of experts."""
    joined: list[Route] = []
    for route in routes:
        both = _join(joined[-1], route) if joined else None
        joined[-1:] = [*joined[-1:], route] if both is None else [both]
    return joined


def _join(first: Route, second: Route) -> Route | None:
    """Return one route of 1-D slices for two whose elements follow each other on both sides; None for others."""
    if first.owner is not second.owner or first.leaf != second.leaf:
        return None
    count, further = torch.Size(first.target[0]).numel(), torch.Size(second.target[0]).numel()
    for start, end in ((first.target, second.target), (first.source, second.source)):
        if end[2] != start[2] + count or not (_is_contiguous(start) and _is_contiguous(end)):
            return None
    target, source = (((count + further,), (1,), part[2]) for part in (first.target, first.source))
    return Route(owner=first.owner, leaf=first.leaf, target=target, source=source)


def _is_contiguous(tensor_slice: TensorSlice) -> bool:
    expected = 1
    for size, stride in reversed(_strides(tensor_slice)):
        if stride != expected:
            return False
        expected *= size
    return True


def _strides(tensor_slice: TensorSlice) -> list[tuple[int, int]]:
    """Return size and stride of the dimensions whose size is not 1."""
    return [(size, stride) for size, stride in zip(*tensor_slice[:2], strict=True) if size != 1]
