"""Attention over packed sequences: which implementation serves a model, and how it learns where sequences end."""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from hybrid_rl.config import check


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence through torch's own varlen kernel; query is [1, heads, N, D]."""
    from torch.nn.attention.varlen import varlen_attn

    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("varlen attention needs the lengths of the packed sequences; this model drops them on the way")
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise ValueError(f"varlen attention cannot apply {name}; set models.attention to another one")
    groups = query.shape[1] // key.shape[1]
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    output: Any = varlen_attn(
        query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=window
    )
    return output[None], None


# Without a mask of its own: transformers would look for one in position_ids, and so wait for the GPU in every forward.
AttentionInterface.register("varlen", varlen_attention)


def choose_attention(
    setting: str,
    device: torch.device,
    dtype: torch.dtype,
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    *,
    field: str,
) -> str:
    """Return the attention implementation: as set, or the fastest that is there and computes what the model means.

    Only flash-attn and eager apply the soft cap of attention scores of Gemma 2; transformers' sdpa leaves it out.

    Raises:
        ConfigError: the implementation that was set would compute something else, or the class does not know it.
    """
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    is_backend = model_class._supports_attention_backend
    supported = {
        "flash_attention_2": model_class._supports_flash_attn,
        "varlen": is_backend and softcap is None,
        "sdpa": model_class._supports_sdpa and softcap is None,
        "eager": True,
    }
    if setting != "auto":
        why = f" with config.attn_logit_softcapping = {softcap}" if softcap is not None else ""
        others = ", ".join(name for name, ok in supported.items() if ok)
        check(
            supported[setting],
            f"models.attention = {setting}: {field} is a {model_class.__name__}{why}, which runs right with {others}",
        )
        return setting
    is_half_on_gpu = device.type == "cuda" and dtype != torch.float32
    there = {
        "flash_attention_2": is_half_on_gpu and importlib.util.find_spec("flash_attn") is not None,
        "varlen": is_half_on_gpu,
        "sdpa": True,
        "eager": True,
    }
    return next(name for name, ok in supported.items() if ok and there[name])


PACKED = ("varlen", "flash_attention_2")
"""Implementations that are told where sequences end; the others compute, and mask, every pair of tokens in a pack."""


def packs_freely(setting: str, *, is_gpu: bool) -> bool:
    """Return whether a token costs the same in a pack of any size, as far as a setting says."""
    return is_gpu and setting in ("auto", *PACKED)


def repeats_keys(setting: str) -> bool:
    """Return whether attention gets keys repeated for every head; flash-attn, set or found here, does not."""
    is_found = setting == "auto" and importlib.util.find_spec("flash_attn") is not None
    return setting != "flash_attention_2" and not is_found


def packing_arguments(model: PreTrainedModel, cu_seqlens: Tensor, max_length: int, num_tokens: int) -> dict[str, Any]:
    """Return what a model must be told, beside position ids, so that each packed sequence sees only itself."""
    implementation = model.config._attn_implementation
    if implementation in PACKED:
        return {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": max_length,
            "max_length_k": max_length,
        }
    if getattr(model.config.get_text_config(), "sliding_window", None) is not None:
        return {}  # it makes one mask for each kind of layer, from where position ids restart
    # Not every model makes its mask from position_ids: OPT's sequences would see their neighbours.
    mask = _block_causal_mask(cu_seqlens, num_tokens)
    if implementation == "eager":  # adds its mask to the scores
        lowest = torch.finfo(model.dtype).min
        mask = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill_(~mask, lowest)
    return {"attention_mask": mask}


def _block_causal_mask(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return [1, 1, N, N] bool: each token sees itself and what stands before it in its own sequence."""
    place = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.bucketize(place, cu_seqlens, right=True)
    return ((sequence[:, None] == sequence) & (place[:, None] >= place))[None, None]
