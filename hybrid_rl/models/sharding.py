"""Protocol by which models load as shards: each rank holds 1 / W of every weight, from the first byte that is read."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn

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


def reading_shards(sharder: WeightSharder | None) -> AbstractContextManager[None]:
    """Return the context in which a model's weights are read; without a sharder they stay whole."""
    return sharder.shard_as_read() if sharder else nullcontext()


def gathering(sharder: WeightSharder | None, module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the parameters of a layer are whole and can be written to."""
    return sharder.whole(module.parameters()) if sharder else nullcontext()
