"""The buffer of sync.mode = alias, which holds the trainer's weights; the engine's parameters are views of it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hybrid_rl.distributed import World
from hybrid_rl.weights.bucket import AliasedWeights, IpcBucket
from hybrid_rl.weights.layout import alias_bytes, alias_slots


class AliasBuffer:
    """The weights of a model in one buffer, which another process can open."""

    @torch.no_grad()
    def __init__(self, weights: Mapping[str, nn.Parameter], world: World) -> None:
        """Move the weights of a Hugging Face model into the buffer.

        Weights on a GPU pass through the host, so that the GPU never holds them twice.

        Args:
            weights: name in the model's checkpoint -> parameter, all of one dtype; tied parameters occur once.
            world: all ranks, for which DeepSpeed aligns its parameter groups.
        """
        self._parameters = dict(weights)
        shapes = [(name, tuple(p.shape), p.dtype) for name, p in self._parameters.items()]
        self.slots = alias_slots(shapes, num_ranks=world.size)
        if world.device.type == "cuda":
            for parameter in self._parameters.values():
                parameter.data = parameter.data.cpu()
            torch.cuda.empty_cache()
        self._bucket = IpcBucket(alias_bytes(self.slots, num_ranks=world.size), world.device)
        self._bucket.tensor.zero_()  # DeepSpeed's alignment padding takes part in optimizer steps
        for slot in self.slots:
            view = slot.view(self._bucket.tensor)
            view.copy_(self._parameters[slot.name])
            self._parameters[slot.name].data = view
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._bucket.tensor.nbytes

    def ordered(self) -> list[nn.Parameter]:
        """Return the parameters in the order of the buffer."""
        return [self._parameters[slot.name] for slot in self.slots]

    @torch.no_grad()
    def share(self, weights: Mapping[str, nn.Parameter]) -> int:
        """Let parameters of another model, which nothing may write to, be views of the equal ones in the buffer.

        Args:
            weights: name -> parameter of the other model.

        Returns:
            the number of parameters that are views now; the others have another name, shape or value.
        """
        count = 0
        for name, parameter in weights.items():
            held = self._parameters.get(name)
            if held is not None and held.dtype == parameter.dtype and torch.equal(held, parameter):
                parameter.data = held.data
                count += 1
        if self._bucket.tensor.is_cuda:
            torch.cuda.empty_cache()
        return count

    def export(self) -> AliasedWeights:
        """Return the handle and the layout for one engine; on a GPU each result can be opened once."""
        return AliasedWeights(handle=self._bucket.handle(), slots=self.slots)

    def moved(self) -> list[str]:
        """Return the names of the parameters that are no longer in the buffer and that the engine does not follow."""
        base = self._bucket.tensor.data_ptr()
        return [s.name for s in self.slots if self._parameters[s.name].data_ptr() != base + s.offset]

    def contains(self, tensor: Tensor) -> bool:
        """Return whether the tensor's memory lies in the buffer."""
        return 0 <= tensor.data_ptr() - self._bucket.tensor.data_ptr() < self.num_bytes

    def flat_view(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return adjacent tensors of the buffer as one 1-D tensor of the same memory.

        The last tensor may lie elsewhere if it is padding: the buffer has room for padding after each group.

        Raises:
            RuntimeError: the tensors are not adjacent; DeepSpeed would step on memory that the engine does not see.
        """
        first = tensors[0].data_ptr() - self._bucket.tensor.data_ptr()
        end = first
        for tensor in tensors:
            is_padding = tensor is tensors[-1] and not self.contains(tensor)
            if tensor.data_ptr() != self._bucket.tensor.data_ptr() + end and not is_padding:
                raise RuntimeError(
                    f"a parameter of shape {tuple(tensor.shape)} is not where the layout of the alias buffer has it"
                )
            end += tensor.nbytes
        return self._bucket.tensor[first:end].view(tensors[0].dtype)
