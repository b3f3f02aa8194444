"""Liger's Triton kernels for what a decoder layer does beside its products: norms, gated activation, rotary embedding.

transformers makes several passes over memory for each, and keeps what they leave for backward. Liger makes one and
keeps less (Hsu et al. 2024, arXiv 2410.10989). Of 1.5B parameters on an H200, packs of 24576 tokens: log-probs 134
thousand tokens a second without and 174 with, updates 40 and 50 in 97 and 77 GiB (profiling/bench_update.py).
"""

import sys

import torch
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from hybrid_rl.config import ModelsConfig, check
from hybrid_rl.models.packed import PackedModel, is_close, probe_inputs

FAMILIES = ("gemma", "gemma2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Values of `model_type` whose results and gradients tests/gpu/test_fused_layers.py holds to those of transformers."""
_KERNELS = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True}
_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}  # the log-probs have kernels of their own


def uses_liger(setting: str, model_type: str, *, is_half_on_gpu: bool) -> bool:
    """Return whether a model computes with Liger's kernels: as set, or where they are installed and have been checked.

    A machine without a GPU, which can only plan for another, takes them to be there: `make install` puts them there.

    Args:
        setting: models.fused_layers.
        is_half_on_gpu: the model is in 16 bits on a GPU; Triton has no CPU, and float32 is for exact comparisons.
    """
    is_there = is_liger_kernel_available() or not torch.cuda.is_available()
    return setting == "liger" or (setting == "auto" and is_half_on_gpu and is_there and model_type in FAMILIES)


def check_family(setting: str, model_type: str, *, field: str) -> None:
    """Check that Liger's kernels, if set, have been checked for a model; ConfigError if not."""
    check(
        setting != "liger" or model_type in FAMILIES,
        f"models.fused_layers = liger: checked for {', '.join(FAMILIES)}; {field} is of type {model_type}; use auto",
    )


@torch.no_grad()
def fuse_layers(module: PackedModel, config: ModelsConfig, path: str, *, field: str) -> None:
    """Let a model compute its layers by Liger's kernels, see uses_liger, and prove that it computes the same.

    Raises:
        ConfigError: liger is set where it cannot run; hidden states are others than before.
    """
    model = module.model
    is_half_on_gpu = model.device.type == "cuda" and model.dtype != torch.float32
    if not uses_liger(config.fused_layers, model.config.model_type, is_half_on_gpu=is_half_on_gpu):
        return
    check_family(config.fused_layers, model.config.model_type, field=f"{field} = {path}")
    check(is_half_on_gpu, "models.fused_layers = liger: needs a GPU and models.dtype = bfloat16; use auto")
    check(is_liger_kernel_available(), "models.fused_layers = liger: liger-kernel is not installed; use auto")
    _, alone = probe_inputs(model)
    before = module.hidden(**alone)
    home = sys.modules[type(model).__module__]
    classes = {name: value for name, value in vars(home).items() if isinstance(value, type)}
    apply_liger_kernel(model, _KERNELS | _LOSSES)
    vars(home).update(classes)  # Liger also changes what later models are made of, before they can prove anything
    check(
        is_close(module.hidden(**alone), before, 0.1),
        f"{field} = {path}: {type(model).__name__} computes other hidden states with Liger's kernels; set "
        "models.fused_layers: off",
    )
