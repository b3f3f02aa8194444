"""Liger's Triton kernels for the norms, gated activations and rotary embeddings of decoder layers.

transformers makes several passes over memory for each of these and stores the intermediate results for backward. Liger
makes one pass and stores less.

Source: Hsu et al. 2024 (Liger Kernel, arXiv 2410.10989).
"""

import sys

import torch
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_liger_kernel_available

from hybrid_rl.config import ModelsConfig, check
from hybrid_rl.models.packed import PackedModel
from hybrid_rl.models.verification import is_close, probe_inputs

FAMILIES = ("gemma", "gemma2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Values of `model_type` whose results and gradients tests/gpu/test_fused_layers.py compares with transformers'."""
_KERNELS = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True}
_LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}  # hybrid_rl_kernels computes the log-probs


def uses_liger(setting: str, model_type: str, *, is_half_on_gpu: bool) -> bool:
    """Return whether a model runs with Liger's kernels: as set, or for auto where they are installed and verified.

    A machine without a GPU can only plan for another one and assumes that they are installed there.

    Args:
        setting: models.fused_layers.
        model_type: of the model's config.
        is_half_on_gpu: the model is in 16 bits on a GPU; Triton has no CPU backend, float32 is for exact comparisons.
    """
    is_installed = is_liger_kernel_available() or not torch.cuda.is_available()
    return setting == "liger" or (setting == "auto" and is_half_on_gpu and is_installed and model_type in FAMILIES)


def check_family(setting: str, model_type: str, *, field: str) -> None:
    """Check that a model whose models.fused_layers is liger belongs to a family that is verified with Liger.

    Raises:
        ConfigError: it does not.
    """
    check(
        setting != "liger" or model_type in FAMILIES,
        f"models.fused_layers = liger: checked for {', '.join(FAMILIES)}; {field} is of type {model_type}; use auto",
    )


@torch.no_grad()
def fuse_layers(module: PackedModel, config: ModelsConfig, path: str, *, field: str) -> None:
    """Replace a model's layers by Liger's kernels where `uses_liger` says so, and verify its hidden states.

    Args:
        path, field: folder of the model and setting that names it.
    Raises:
        ConfigError: liger is set where it cannot run, or the hidden states change.
    """
    model = module.model
    is_half_on_gpu = model.device.type == "cuda" and model.dtype != torch.float32
    if not uses_liger(config.fused_layers, model.config.model_type, is_half_on_gpu=is_half_on_gpu):
        return
    check_family(config.fused_layers, model.config.model_type, field=f"{field} = {path}")
    check(is_half_on_gpu, "models.fused_layers = liger: needs a GPU and models.dtype = bfloat16; use auto")
    check(is_liger_kernel_available(), "models.fused_layers = liger: liger-kernel is not installed; use auto")
    _, inputs = probe_inputs(model)
    expected = module.hidden(**inputs)
    # Liger also replaces the classes in the module that defines the model; models loaded later must start unchanged.
    definitions = sys.modules[type(model).__module__]
    classes = {name: value for name, value in vars(definitions).items() if isinstance(value, type)}
    apply_liger_kernel(model, _KERNELS | _LOSSES)
    vars(definitions).update(classes)
    check(
        is_close(module.hidden(**inputs), expected, 0.1),
        f"{field} = {path}: {type(model).__name__} computes other hidden states with Liger's kernels; set "
        "models.fused_layers: off",
    )
