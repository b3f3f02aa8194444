"""What a model will run with: its class, attention, layout and fused layers, from its config and the settings alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hybrid_rl.config import ModelsConfig, check
from hybrid_rl.models.attention import choose_attention
from hybrid_rl.models.folders import build_on_meta, find_model_class, no_head, reading
from hybrid_rl.models.fused_layers import check_family, uses_liger
from hybrid_rl.models.loading import choose_dtype
from hybrid_rl.models.packed import can_pack


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What a model will run with."""

    model: Any
    """The model on the meta device, without weights."""
    head: nn.Module
    """Its linear head."""
    dtype: torch.dtype
    """Data type of its parameters."""
    attention: str
    """Attention implementation, see models.attention."""
    is_padded: bool
    """Whether its sequences are padded, see PackedModel."""
    has_liger: bool
    """Whether Liger's kernels replace its layers."""

    def __str__(self) -> str:
        name, dtype = type(self.model).__name__, str(self.dtype).removeprefix("torch.")
        layout = ", padded" if self.is_padded else ""
        layers = "fused layers of Liger" if self.has_liger else "no fused layers"
        return f"{name} in {dtype}, attention {self.attention}{layout}, {layers}"


def choose_model(
    config: ModelsConfig, model_config: PretrainedConfig, device: torch.device, *, field: str, is_policy: bool
) -> ModelChoice:
    """Return what a model will run with on a device, which need not be there.

    A model that turns out to be inexact on packed sequences when it is loaded runs padded, with a warning.

    Args:
        config: settings of the models.
        model_config: of the model.
        device: of the run.
        field: setting that names the model, for messages.
        is_policy: a causal language model; else a sequence classifier with one label.
    Raises:
        ConfigError: there is no such class, it has no linear head, or it does not run with the settings.
    """
    dtype = choose_dtype(config.dtype, device)
    model_class = find_model_class(model_config, field, is_policy=is_policy)
    attention = choose_attention(config.attention, device, dtype, model_class, model_config, field=field)
    check_family(config.fused_layers, model_config.model_type, field=field)
    with reading(f"{field}: config.json describes no {model_class.__name__}"):
        model, head = build_on_meta(model_class, model_config, is_policy=is_policy)
    check(type(head) is nn.Linear, f"{field}: {no_head(model, is_policy=is_policy)}")
    is_padded, is_half_on_gpu = not can_pack(model), device.type == "cuda" and dtype != torch.float32
    if is_padded and attention == "varlen":
        name = model_class.__name__
        check(config.attention == "auto", f"models.attention = varlen: {field}: {name} runs padded; use sdpa or auto")
        attention = "sdpa" if model_class._supports_sdpa else "eager"
    has_liger = uses_liger(config.fused_layers, model_config.model_type, is_half_on_gpu=is_half_on_gpu)
    return ModelChoice(
        model=model, head=head, dtype=dtype, attention=attention, is_padded=is_padded, has_liger=has_liger
    )
