"""vLLM's side of low-rank adapters: one adapter, whose memory is filled from the trainer's bucket.

A LoRARequest names a folder, which vLLM reads only for an adapter that it does not have yet. Here the adapter is
registered from memory before the first request.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybrid_rl.config import LoraConfig
from hybrid_rl.weights.bucket import Slot, copy_tensors
from hybrid_rl.weights.checksum import checksums
from hybrid_rl.weights.choice import adapter_rank
from hybrid_rl.weights.protocols import TensorSlice
from hybrid_rl.weights.routes import CopyRecorder

_ID = 1  # vLLM numbers adapters from 1
_FUSED_NAMES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""Layer -> name of the layer into which vLLM fuses it."""


def adapter_arguments(adapters: LoraConfig, known: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of vllm.LLM for one adapter of these settings, whose target_modules are given.

    Args:
        known: names of the arguments of this version of vLLM; one without lora_target_modules allocates memory for
            adapters of every layer, the head included.
    """
    assert adapters.target_modules is not None
    names = dict.fromkeys(adapters.target_modules)
    for layer, fused in _FUSED_NAMES.items():  # versions of vLLM differ in which of the two names they compare
        if layer in names:
            names[fused] = None
    arguments = {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": adapter_rank(adapters.rank),
        "lora_target_modules": list(names),
        "compilation_config": {"cudagraph_specialize_lora": False},  # no graphs for requests without the adapter
    }
    return {name: value for name, value in arguments.items() if name in known}


def adapter_request() -> Any:
    """Return the LoRARequest of every generation with an adapter; its path is never read."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=_ID, lora_path="in memory")


class AdapterSlot:
    """The memory of vLLM's adapter in one worker, and where each of the trainer's matrices belongs in it."""

    @torch.no_grad()
    def __init__(self, runner: Any, bucket: Tensor, slots: Sequence[Slot]) -> None:
        """Let vLLM load the adapter from the bucket once, and record its copies.

        Args:
            runner: vLLM's model runner, whose adapter memory is mapped.
            bucket: the trainer's, filled.
            slots: places of the matrices, named as in peft's files.

        Raises:
            RuntimeError: vLLM cannot load the adapter, has no layer for a matrix, or computes what it stores from it.
        """
        self._manager = runner.lora_manager._adapter_manager
        self._slots = {slot.name: slot for slot in slots}
        self._buffers = list(_buffers(self._manager.modules.values()))
        for buffer in self._buffers:  # memory that a sleep of the engine has dropped
            buffer.zero_()
        try:
            with CopyRecorder(bucket, copies=True) as recorder:
                self._register(runner, {slot.name: slot.view(bucket) for slot in slots})
        except Exception as error:  # vLLM's loading raises whatever fails in it
            raise RuntimeError(
                f"vLLM cannot load the adapters of {type(runner.model).__name__}: {type(error).__name__}: {error}; "
                "use models.lora.sync = merged"
            ) from error
        self._pairs = self._sorted(recorder.seen, bucket)
        self._check_complete()
        self._targets = [target for pairs in self._pairs.values() for target, _ in pairs]
        self._sources = [source for pairs in self._pairs.values() for _, source in pairs]

    def _register(self, runner: Any, tensors: dict[str, Tensor]) -> None:
        """Make vLLM copy the matrices into its memory, and drop its references to the bucket."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        first = next(iter(tensors.values()))
        rank = min(first.shape)
        # The trainer multiplies the scale into the second factor, so that here it is 1.
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=_ID,
            tensors=tensors,
            peft_helper=PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device=str(first.device),
            dtype=first.dtype,
            weights_mapper=_renaming(getattr(runner.model, "hf_to_vllm_mapper", None)),
        )
        self._manager.remove_all_adapters()
        self._manager.add_adapter(adapter)
        self._manager.activate_adapter(_ID)
        adapter.loras.clear()

    def _sorted(self, seen: Sequence[tuple[Tensor, Tensor]], bucket: Tensor) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return the recorded copies (target, source) by the name of the matrix that they read."""
        places = [(slot.offset, slot.offset + slot.nbytes, slot.name) for slot in self._slots.values()]
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self._slots}
        for target, source in seen:
            place = source.data_ptr() - bucket.data_ptr()
            (name,) = [name for first, end, name in places if first <= place < end]
            pairs[name].append((target, source))
        return pairs

    def _check_complete(self) -> None:
        """Check that each matrix, or on several GPUs this worker's part of it, is copied.

        Raises:
            RuntimeError: one is not; by name.
        """
        for name, pairs in self._pairs.items():
            found, size = sum(source.numel() for _, source in pairs), torch.Size(self._slots[name].shape).numel()
            is_part = any(getattr(module, "tp_size", 1) > 1 for module in self._manager.modules.values())
            if found == 0 or (found < size and not is_part):
                raise RuntimeError(
                    f"{name}: vLLM's adapter holds {found} of its {size} elements as they are; "
                    "use models.lora.sync = merged for this architecture"
                )

    @torch.no_grad()
    def load(self) -> None:
        """Copy the bucket into vLLM's memory, whose other parts become zero."""
        torch._foreach_zero_(self._buffers)
        copy_tensors(self._targets, self._sources)
        self._manager._last_mapping = None  # which rows use the adapter is in memory that a sleep drops, too

    def checksums(self, names: Sequence[str]) -> dict[str, list[tuple[TensorSlice, int]]]:
        """Return, per matrix, the checksum of each slice that this worker computes with."""
        held: dict[str, list[tuple[TensorSlice, int]]] = {name: [] for name in names}
        pairs = [(name, pair) for name in names for pair in self._pairs[name]]
        sums = checksums([target for _, (target, _) in pairs]).tolist()
        for (name, (_, source)), total in zip(pairs, sums, strict=True):
            start = self._slots[name].offset // self._slots[name].dtype.itemsize
            offset = int(source.storage_offset()) - start
            held[name].append(((tuple(source.shape), tuple(source.stride()), offset), total))
        return held


def _renaming(mapper: Any) -> Any:
    """Return what renames weights as vLLM's mapper of a model does, without fusing layers; None for no mapper."""
    for name in ("get_rename_mapper", "get_unstacked_mapper"):  # the second one in vLLM 0.26
        if hasattr(mapper, name):
            return getattr(mapper, name)()
    return mapper


def _buffers(modules: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the memory of all adapters in vLLM's layers."""
    for module in modules:
        yield from module.lora_a_stacked
        yield from module.lora_b_stacked


@contextmanager
def plain_layers(runner: Any) -> Iterator[None]:
    """Put the layers without adapters back in the body, whose names a model's load_weights expects."""
    wrapped = runner.lora_manager._adapter_manager.modules if hasattr(runner, "lora_manager") else {}
    parents = {name: runner.model.get_submodule(name.rpartition(".")[0]) for name in wrapped}
    for name, module in wrapped.items():
        setattr(parents[name], name.rpartition(".")[2], module.base_layer)
    try:
        yield
    finally:
        for name, module in wrapped.items():
            setattr(parents[name], name.rpartition(".")[2], module)
