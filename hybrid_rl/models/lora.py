"""Low-rank adapters (LoRA) inside a model: injection, what engine and exports receive, and the reference policy.

peft injects the adapters into the Hugging Face model, so heads, packing and ZeRO need no special case. Adapters have
the dtype of the model, because DeepSpeed casts all of it; in bfloat16 the optimizer keeps float32 master copies of
them, as of any trained weight.

Sources: Hu et al. 2021 (LoRA, arXiv 2106.09685); Kalajdzievski 2023 (rank-stabilised scale, arXiv 2312.03732).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybrid_rl.config import ConfigError, LoraConfig, check
from hybrid_rl.models.routing import corrections, find_routers

_ADAPTER = "default"  # peft's name for the only adapter of a model


def linear_names(model: PreTrainedModel, heads: Sequence[nn.Module]) -> list[str]:
    """Return the last components of the names of all linear layers except the heads, such as q_proj, sorted.

    The experts of a mixture are not among them: transformers keeps each projection of all experts in one tensor.
    """
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m not in heads]
    return sorted({name.rsplit(".", 1)[-1] for name in layers})


def check_targets(model: PreTrainedModel, config: LoraConfig, *, heads: Sequence[nn.Module]) -> list[str]:
    """Return the names of the layers that get adapters: those of the config, or all of `linear_names`.

    Args:
        heads: modules that get no adapter.
    Raises:
        ConfigError: a target is not a linear layer of the model; the message lists the linear layers.
    """
    names = linear_names(model, heads)
    targets = names if config.target_modules is None else config.target_modules
    unknown = sorted(set(targets) - set(names))
    experts = " (experts get no adapters: each projection of all experts is one tensor)" if find_routers(model) else ""
    check(
        not unknown,
        f"models.lora.target_modules names {', '.join(unknown)}: {type(model).__name__} has no such linear layer"
        f"{experts}; it has {', '.join(names)}",
    )
    return list(targets)


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, heads: Sequence[nn.Module]) -> None:
    """Freeze a model and inject adapters, whose product is 0 until the first step, into its linear layers.

    Args:
        heads: modules that get no adapter.
    Raises:
        ConfigError: see check_targets; or the model reads the weight of a target without calling its layer.
    """
    import peft

    names = linear_names(model, heads)
    targets = check_targets(model, config, heads=heads)
    is_transposed = any(isinstance(m, Conv1D) for name, m in model.named_modules() if name.split(".")[-1] in targets)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=targets,
        fan_in_fan_out=is_transposed,
        task_type="CAUSAL_LM",
    )
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:  # the model reads the weight without calling the layer, as Mamba's out_proj
        raise ConfigError(f"models.lora.target_modules, of {', '.join(names)}: {error}") from error


def has_adapters(model: nn.Module) -> bool:
    """Return whether `add_adapters` was called on the model."""
    return hasattr(model, "peft_config")


def adapter_settings(model: Any) -> dict[str, Any]:
    """Return rank, alpha and target modules of a model's adapters, which a checkpoint must match; {} without any."""
    if not has_adapters(model):
        return {}
    settings = model.peft_config[_ADAPTER]
    found = {"rank": settings.r, "alpha": settings.lora_alpha, "target_modules": sorted(settings.target_modules)}
    return found | ({"rslora": True} if settings.use_rslora else {})


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return name -> layer of all layers with an adapter, under their names in the model without adapters."""
    if not has_adapters(model):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the adapters in the body, in which the model computes exactly what it did when it was loaded."""
    layers = _adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@dataclass(frozen=True, kw_only=True)
class ServedWeight:
    """A weight as engine and exports see it, with its adapter merged."""

    base: Tensor
    layer: Any = None
    """The peft layer that holds the adapter of the weight; None if it has none."""

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that `compute` reads, which ZeRO-3 must gather first."""
        if self.layer is None:
            return [self.base]
        return [self.base, self.layer.lora_A[_ADAPTER].weight, self.layer.lora_B[_ADAPTER].weight]

    @torch.no_grad()
    def compute(self) -> Tensor:
        """Return W + scale * B A, accumulated in float32 and rounded once; without an adapter, W."""
        if self.layer is None:
            return self.base.detach()
        base, a, b = (p.detach() for p in self.parameters)
        dtype = torch.promote_types(base.dtype, torch.float32)
        product = b.to(dtype) @ a.to(dtype) * self.layer.scaling[_ADAPTER]
        return (base.to(dtype) + (product.t() if self.layer.fan_in_fan_out else product)).to(base.dtype)


@dataclass(frozen=True, kw_only=True)
class ServedFactor:
    """A matrix of an adapter as an engine computes with it, which multiplies by no further scale."""

    base: Tensor
    scale: float
    """Scale of the adapter's product in the factor B; 1 in the factor A."""

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that `compute` reads, which ZeRO-3 must gather first."""
        return [self.base]

    @torch.no_grad()
    def compute(self) -> Tensor:
        """Return the matrix times its scale, multiplied in float32 and rounded once."""
        held = self.base.detach()
        if self.scale == 1:
            return held
        return (held.to(torch.promote_types(held.dtype, torch.float32)) * self.scale).to(held.dtype)


Served = ServedWeight | ServedFactor
"""A tensor that engine or exports receive, computed from parameters of the model."""


class ServedTensors(Mapping[str, Tensor]):
    """Name -> tensor, each computed when it is read, so that no merged copy of the whole model exists."""

    def __init__(self, weights: Mapping[str, Served]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].compute()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def served_weights(model: nn.Module) -> dict[str, ServedWeight]:
    """Return every weight under its name in the base model's checkpoint, with its adapter; tied weights occur once."""
    layers = _adapted_layers(model)
    weights = {}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if any(part in ("lora_A", "lora_B") for part in owner.split(".")):
            continue
        owner = owner.removesuffix(".base_layer")
        layer = layers.get(owner) if leaf == "weight" else None
        weights[f"{owner}.{leaf}" if owner else leaf] = ServedWeight(base=parameter, layer=layer)
    return weights | {name: ServedWeight(base=buffer) for name, buffer in corrections(model).items()}


def base_weights(model: nn.Module) -> dict[str, ServedWeight]:
    """Return every weight without its adapter, named as in `served_weights`."""
    return {name: ServedWeight(base=weight.base) for name, weight in served_weights(model).items()}


def base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of all weights without the adapters, named as in `served_weights`."""
    return {name: each.base for name, each in base_weights(model).items() if isinstance(each.base, nn.Parameter)}


def frozen_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not trained, named as in `served_weights`."""
    return {name: parameter for name, parameter in base_parameters(model).items() if not parameter.requires_grad}


def adapter_factors(model: nn.Module) -> dict[str, ServedFactor]:
    """Return the matrices of the adapters, named as in `adapter_parameters`; {} without any."""
    scales: dict[str, float] = {}
    for name, layer in _adapted_layers(model).items():
        scales |= {adapter_name(name, "lora_A"): 1.0, adapter_name(name, "lora_B"): layer.scaling[_ADAPTER]}
    return {name: ServedFactor(base=p, scale=scales[name]) for name, p in adapter_parameters(model).items()}


def adapter_name(layer: str, part: str) -> str:
    """Return the name of an adapter's `lora_A` or `lora_B` in peft's checkpoint files."""
    return f"base_model.model.{layer}.{part}.weight"


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the adapters under their names in peft's checkpoint files."""
    return {
        adapter_name(layer_name, part): getattr(layer, part)[_ADAPTER].weight
        for layer_name, layer in _adapted_layers(model).items()
        for part in ("lora_A", "lora_B")
    }


def save_adapter(folder: Path, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter in the format that peft.PeftModel.from_pretrained loads.

    Args:
        folder: is created.
        model: the Hugging Face model with adapters.
        tensors: name, as in `adapter_parameters`, -> gathered tensor.
    """
    folder.mkdir(parents=True)
    settings = model.peft_config[_ADAPTER]
    settings.base_model_name_or_path = model.config._name_or_path
    settings.save_pretrained(folder)
    save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, folder / "adapter_model.safetensors")
