"""Rotary embeddings of a vLLM model whose modules were built on the host, computed again on the engine's device."""

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move a model's buffers to the device, and compute the tables of its rotary embeddings there.

    Powers and cosines of host and device differ in their last bits, and an engine with copies of the weights computes
    them on the device.
    """
    for module in model.modules():
        for name, tensor in module.named_buffers(recurse=False):
            module._buffers[name] = tensor.to(device)
        with device:
            _compute_tables(module)


def _compute_tables(module: Any) -> None:
    """Compute the tables of one module on the default device; other modules than rotary embeddings have none."""
    if hasattr(module, "long_short_cos_sin_cache"):  # Phi-3 and Phi-4 with LongRoPE
        module.long_short_cos_sin_cache.copy_(_long_and_short(module))
    elif hasattr(module, "_compute_cos_sin_cache"):
        module.cos_sin_cache.copy_(module._compute_cos_sin_cache())
    elif hasattr(module, "original_inv_freq"):  # of transformers, in models that vLLM runs through it
        for name, tensor in type(module)(module.config).named_buffers(recurse=False):
            module._buffers[name] = tensor


def _long_and_short(module: Any) -> Tensor:
    """Return the table for short contexts, followed by the one for long contexts."""
    positions = (module.original_max_position_embeddings, module.max_position_embeddings)
    factors, scales = (module.short_factor, module.long_factor), (module.short_mscale, module.long_mscale)
    parts = zip(positions, factors, scales, strict=True)
    return torch.cat([module._compute_cos_sin_cache(*part) for part in parts])
