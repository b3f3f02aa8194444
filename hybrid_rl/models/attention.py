"""Attention over packed sequences: the choice of an implementation, and its arguments that mark sequence boundaries."""

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
    """Compute causal attention within each packed sequence by torch's varlen kernel.

    Args:
        query: [1, heads, N, D] in 16 bits.
        key, value: [1, key heads, N, D].
        scaling: factor on the attention scores; None is 1 / sqrt(D).
        cu_seq_lens_q: [S + 1] int32, bounds of the sequences in N.
        max_length_q: tokens of the longest sequence.
        sliding_window: number of tokens, its own included, that a token attends to; None is all before it.
    Returns:
        [1, N, heads, D], and None in place of attention weights.
    Raises:
        ValueError: the model does not pass the lengths on, or needs a feature that the kernel lacks.
    """
    from torch.nn.attention.varlen import varlen_attn

    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("varlen attention needs the lengths of the packed sequences; this model does not pass them on")
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise ValueError(
                f"varlen attention cannot apply {name}; set models.attention to sdpa, eager or flash_attention_2"
            )
    groups = query.shape[1] // key.shape[1]
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    output: Any = varlen_attn(
        query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=window
    )
    return output[None], None


# Registered without a mask function: transformers would derive a mask from position_ids and synchronize with the GPU in
# every forward.
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
    """Return the attention implementation: the setting, or the fastest one that is available and exact for the model.

    Only flash-attn and eager apply the soft cap on attention scores of Gemma 2; transformers' sdpa ignores it.

    Args:
        setting: models.attention.
        device, dtype: of the model.
        model_class, config: of the model.
        field: setting that names the model, for messages.
    Raises:
        ConfigError: the model class does not support the implementation, or it would compute something else.
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
        reason = f" with config.attn_logit_softcapping = {softcap}" if softcap is not None else ""
        others = ", ".join(name for name, is_supported in supported.items() if is_supported)
        check(
            supported[setting],
            f"models.attention = {setting}: {field} is a {model_class.__name__}{reason}, which is exact with {others}",
        )
        return setting
    is_half_on_gpu = device.type == "cuda" and dtype != torch.float32
    available = {
        "flash_attention_2": is_half_on_gpu and importlib.util.find_spec("flash_attn") is not None,
        "varlen": is_half_on_gpu,
        "sdpa": True,
        "eager": True,
    }
    return next(name for name, is_supported in supported.items() if is_supported and available[name])


VARLEN_IMPLEMENTATIONS = ("varlen", "flash_attention_2")
"""Implementations that take sequence bounds; the others compute, and mask, every pair of tokens in a micro-batch."""


def uses_varlen(setting: str, *, is_gpu: bool) -> bool:
    """Return whether models.attention = `setting` makes a token cost the same in a micro-batch of any size."""
    return is_gpu and setting in ("auto", *VARLEN_IMPLEMENTATIONS)


def repeats_keys(setting: str) -> bool:
    """Return whether attention stores keys and values repeated for every query head; only flash-attn does not."""
    is_found = setting == "auto" and importlib.util.find_spec("flash_attn") is not None
    return setting != "flash_attention_2" and not is_found


def packing_arguments(model: PreTrainedModel, cu_seqlens: Tensor, max_length: int, num_tokens: int) -> dict[str, Any]:
    """Return the arguments that, together with position ids, confine attention to each packed sequence.

    Args:
        cu_seqlens: [S + 1] int32, bounds of the sequences in num_tokens.
        max_length: tokens of the longest sequence.
        num_tokens: N.
    """
    implementation = model.config._attn_implementation
    if implementation in VARLEN_IMPLEMENTATIONS:
        return {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": max_length,
            "max_length_k": max_length,
        }
    if getattr(model.config.get_text_config(), "sliding_window", None) is not None:
        return {}  # the model builds one mask per kind of layer, from the places where position ids restart
    # Not every model builds its mask from position_ids: OPT would attend across sequences.
    mask = _block_causal_mask(cu_seqlens, num_tokens)
    if implementation == "eager":  # adds the mask to the attention scores
        lowest = torch.finfo(model.dtype).min
        mask = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill_(~mask, lowest)
    return {"attention_mask": mask}


def _block_causal_mask(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return [1, 1, N, N] bool: each token attends to itself and to earlier tokens of its own sequence."""
    position = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.bucketize(position, cu_seqlens, right=True)
    return ((sequence[:, None] == sequence) & (position[:, None] >= position))[None, None]
