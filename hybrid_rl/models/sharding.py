"""Protocol by which models load as shards: each rank holds 1 / W of every weight, from the first byte that is read."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from hybrid_rl.models.packed import PackedModel


class WeightSharder(Protocol):
    """Shards the weights of one model over all ranks while it loads. Every method but the first is a collective."""

    def shard_as_read(self) -> AbstractContextManager[None]:
        """Shard each weight that transformers reads in the body as soon as it is a parameter of the model."""
        ...

    def are_equal(self, model: Any, first: str, second: str) -> bool:
        """Return whether two weights of the files that transformers has tied have the same values."""
        ...

    def whole(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Gather parameters in the body, and shard what the body, the same on every rank, has written to them."""
        ...

    def finish(self, module: PackedModel) -> None:
        """Shard the weights that are whole, and let the model gather the weights of each layer when it runs."""
        ...


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter, also of one whose shards lie on several ranks."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_sharded(module: nn.Module) -> bool:
    """Return whether each rank holds a shard of the module's weights, so that its forward is a collective."""
    return any(hasattr(parameter, "ds_tensor") for parameter in module.parameters())


def held_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor that holds this rank's values of a parameter: its shard, or the parameter itself."""
    return {name: getattr(parameter, "ds_tensor", parameter) for name, parameter in module.named_parameters()}


def own_range(parameter: Any, numel: int) -> tuple[int, int]:
    """Return the first element and the end of this rank's part of a flattened parameter of `numel` elements."""
    if not hasattr(parameter, "ds_tensor"):
        return 0, numel
    size = parameter.ds_tensor.ds_numel  # ranks have equally many elements, and the last ones may have padding
    start = min(size * parameter.ds_zero_partition_rank, numel)
    return start, min(start + size, numel)


def own_part(parameter: nn.Parameter, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor with the shape of a parameter: elements of it in one dimension, or all."""
    start, end = own_range(parameter, whole.numel())
    return whole.flatten()[start:end] if hasattr(parameter, "ds_tensor") else whole


def reading_shards(sharder: WeightSharder | None) -> AbstractContextManager[None]:
    """Return the context in which a model's weights are read; without a sharder they stay whole."""
    return sharder.shard_as_read() if sharder else nullcontext()


def gathering(sharder: WeightSharder | None, module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the parameters of a layer are whole and can be written to."""
    return sharder.whole(module.parameters()) if sharder else nullcontext()
