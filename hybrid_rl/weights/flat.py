"""The trainer's weights in one shared buffer, which is also the flat buffer that DeepSpeed steps on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import deepspeed.runtime.bf16_optimizer
import deepspeed.runtime.zero.stage_1_and_2
import torch
from torch import Tensor, nn

from hybrid_rl.distributed import World
from hybrid_rl.models.lora import served_weights
from hybrid_rl.weights.bucket import SharedBucket, SharedWeights
from hybrid_rl.weights.layout import flat_bytes, flat_slots

# ZeRO 1 and 2, and the optimizer that ZeRO 1 has in bfloat16: both take PyTorch's function when they are made.
_FLATTENING = (deepspeed.runtime.zero.stage_1_and_2, deepspeed.runtime.bf16_optimizer)
_FUNCTION = "_flatten_dense_tensors"


class FlatWeights:
    """The parameters of a model, moved into one buffer that another process may open."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, world: World) -> None:
        """Move the parameters of a Hugging Face model, all of one dtype and without adapters."""
        self._parameters = {name: weight.base for name, weight in served_weights(model).items()}
        shapes = [(name, tuple(p.shape), p.dtype) for name, p in self._parameters.items()]
        self.slots = flat_slots(shapes, num_ranks=world.size)
        self._bucket = SharedBucket(flat_bytes(self.slots, num_ranks=world.size), world.device)
        self._bucket.tensor.zero_()  # DeepSpeed's room for alignment takes part in its steps
        for slot in self.slots:
            view = slot.view(self._bucket.tensor)
            view.copy_(self._parameters[slot.name])
            self._parameters[slot.name].data = view
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
            torch.cuda.empty_cache()

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return self._bucket.tensor.nbytes

    def ordered(self) -> list[nn.Parameter]:
        """Return the parameters as they lie."""
        return [self._parameters[slot.name] for slot in self.slots]

    def share(self) -> SharedWeights:
        """Return what one engine needs to open the buffer; on a GPU each result may be opened once."""
        return SharedWeights(handle=self._bucket.handle(), slots=self.slots)

    def unlink(self) -> None:
        """Remove the buffer's name once everyone has opened it, see SharedBucket."""
        self._bucket.unlink()

    def moved(self) -> list[str]:
        """Return the names of the parameters that somebody moved elsewhere, and so parted from the engine."""
        base = self._bucket.tensor.data_ptr()
        return [s.name for s in self.slots if self._parameters[s.name].data_ptr() != base + s.offset]

    @contextmanager
    def adopted(self) -> Iterator[None]:
        """Let a DeepSpeed engine that is made inside work in this buffer, instead of in a copy of its own.

        Raises:
            RuntimeError: it does not, which another version of DeepSpeed may bring.
        """
        original = getattr(torch._utils, _FUNCTION)

        def flatten(tensors: Sequence[Tensor]) -> Tensor:
            return self._flat(tensors) if self._holds(tensors[0]) else original(tensors)

        for module in _FLATTENING:
            setattr(module, _FUNCTION, flatten)
        try:
            yield
        finally:
            for module in _FLATTENING:
                setattr(module, _FUNCTION, original)
        if self.moved():
            raise RuntimeError(f"DeepSpeed {deepspeed.__version__} moved {self.moved()[0]} out of the shared buffer")

    def _holds(self, tensor: Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._bucket.tensor.data_ptr() < self.num_bytes

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return neighbours in the buffer as one flat tensor; zeros from elsewhere may follow, for the buffer has such.

        Raises:
            RuntimeError: they are no neighbours, so that DeepSpeed would use other memory than the engine.
        """
        first = tensors[0].data_ptr() - self._bucket.tensor.data_ptr()
        end = first
        for tensor in tensors:
            is_alignment = tensor is tensors[-1] and not self._holds(tensor)
            if tensor.data_ptr() != self._bucket.tensor.data_ptr() + end and not is_alignment:
                raise RuntimeError(f"a parameter of shape {tuple(tensor.shape)} is not where the shared layout has it")
            end += tensor.nbytes
        return self._bucket.tensor[first:end].view(tensors[0].dtype)
