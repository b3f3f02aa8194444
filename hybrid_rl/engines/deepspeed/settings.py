"""Settings, optimizer and learning rate schedule that DeepSpeed is started with."""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from hybrid_rl.config import Config, ConfigError, OptimizerConfig
from hybrid_rl.engines.passed_on import check_names, merged, sentence_of
from hybrid_rl.models.sharding import full_shape

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
    matrices = [p for p in parameters if len(full_shape(p)) >= 2]
    rest = [p for p in parameters if len(full_shape(p)) < 2]
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
    config: OptimizerConfig,
    *,
    zero_stage: int,
    dtype: torch.dtype,
    device: torch.device,
    further: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the `config` of deepspeed.initialize.

    Args:
        further: update.deepspeed.
    """
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
    return merged(settings, further)


class _Recorded(dict[str, Any]):
    """A dictionary that records which of its keys, and of its dictionaries' keys, are looked up one by one."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__({k: _Recorded(v) if isinstance(v, Mapping) else v for k, v in content.items()})
        self.wanted: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.wanted.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.wanted.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key."""
        self.wanted.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Return the dictionary, which records what is looked for in it."""
        return self


def check_deepspeed(config: Config, *, dtype: torch.dtype, device: torch.device) -> None:
    """Check that DeepSpeed takes update.deepspeed; DeepSpeed itself ignores a name that it does not know.

    Raises:
        ConfigError: DeepSpeed looks for no key of a name, or refuses a value.
    """
    further = config.update.deepspeed
    if not further:
        return
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    library = f"DeepSpeed {deepspeed.__version__}"
    stage = config.update.zero_stage
    given = deepspeed_settings(config.update.actor, zero_stage=stage, dtype=dtype, device=device, further=further)
    settings = _Recorded(given)
    try:
        DeepSpeedConfig(settings)
    except Exception as error:  # of DeepSpeed, of pydantic, or an AssertionError
        raise ConfigError(f"update.deepspeed: {library} refuses it: {sentence_of(error)}") from error
    check_names("update.deepspeed", further, settings.wanted, library=library)
    for key, value in further.items():
        inner = settings[key]
        has_class = key == "zero_optimization" or not isinstance(inner, _Recorded) or not inner.wanted
        if not has_class:  # whose constructor has refused unknown keys
            check_names(f"update.deepspeed.{key}", value, inner.wanted, library=library)
