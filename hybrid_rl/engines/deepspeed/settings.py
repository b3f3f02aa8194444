"""Settings, optimizer and learning rate schedule that DeepSpeed is started with."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hybrid_rl.config import OptimizerConfig

BUCKET_ELEMENTS = 50_000_000  # DeepSpeed's default of 500 million takes 2 GB in bfloat16, whatever the model's size


def lr_factor(config: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    """Return the function that maps the number of optimizer steps taken to the factor of the peak learning rate."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
        shape = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape[config.schedule]

    return factor


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, zero_stage: int, is_offloaded: bool
) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that require gradients; weight decay only on matrices.

    Args:
        is_offloaded: whether DeepSpeed's offload moves the optimizer's tensors to the host between updates.
    """
    parameters = [p for p in parameters if p.requires_grad]
    matrices, rest = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.kind == "cpu_adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiled at its first use, which takes a minute

        return DeepSpeedCPUAdam(groups, **options)
    if is_offloaded and zero_stage == 3:  # DeepSpeed offloads no other optimizer under ZeRO-3
        from deepspeed.ops.adam import FusedAdam  # compiled with nvcc at its first use, which takes over a minute

        return FusedAdam(groups, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def deepspeed_settings(
    config: OptimizerConfig, *, zero_stage: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Return the `config` of deepspeed.initialize."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "steps_per_print": 1 << 60,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": zero_stage,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
        },
    }
    if config.kind == "cpu_adam":
        offload = {"device": "cpu", "pin_memory": device.type == "cuda"}
        settings["zero_optimization"]["offload_optimizer"] = offload
    if dtype == torch.bfloat16:
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings
