"""The tensors of a training engine as sources of weight syncs and exports."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import deepspeed
from torch import Tensor, nn

from hybrid_rl.engines.deepspeed.shards import Shards
from hybrid_rl.models.lora import Served, ServedTensors
from hybrid_rl.weights.protocols import NamedShape


def unsharded(tensors: Iterable[Tensor], *, zero_stage: int) -> AbstractContextManager[Any]:
    """Gather the ZeRO-3 partitions of the parameters among the tensors in the body; a collective under ZeRO-3."""
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    return deepspeed.zero.GatheredParameters(parameters) if zero_stage == 3 else nullcontext()


class ShardedSource:
    """Named tensors that are computed from parameters of a sharded model; see WeightSource for the methods."""

    def __init__(self, served: Mapping[str, Served], shards: Shards, *, zero_stage: int) -> None:
        """Take name -> tensor; each has the shape of its `base`."""
        self._served = served
        self._shards = shards
        self._zero_stage = zero_stage

    def named_shapes(self) -> list[NamedShape]:
        """Return name, full shape and dtype of every tensor."""
        return [(name, self._shards.shape(each.base), each.base.dtype) for name, each in self._served.items()]

    @contextmanager
    def gathered(self, names: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the named tensors unsharded, valid in the body; each is computed at each access."""
        wanted = {name: self._served[name] for name in names}
        with unsharded([p for each in wanted.values() for p in each.parameters], zero_stage=self._zero_stage):
            served = ServedTensors(wanted)
            if self._shards.size > 1:  # at once, because the ranks may access different tensors
                yield {name: self._shards.unshard(wanted[name].base, served[name]) for name in names}
            else:
                yield served
