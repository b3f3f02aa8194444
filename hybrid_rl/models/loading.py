"""Loading of the models of a run from their folders, as models that run on packed tokens."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from hybrid_rl.config import ConfigError, LoraConfig, ModelsConfig, check
from hybrid_rl.models.attention import choose_attention
from hybrid_rl.models.fused_layers import fuse_layers
from hybrid_rl.models.heads import LogprobHead, ValueHead, logit_scaling
from hybrid_rl.models.lora import add_adapters
from hybrid_rl.models.packed import Actor, ValueModel
from hybrid_rl.models.verification import verify_logits, verify_packing


def choose_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of parameters: the setting, or for auto bfloat16 on a GPU and float32 on a CPU."""
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, setting)


def load_config(path: str, *, field: str) -> PretrainedConfig:
    """Return the config of a model folder with every dropout set to 0.

    Args:
        field: setting that names the folder, for messages.
    Raises:
        ConfigError: the folder holds no model.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field} = {path}: no Hugging Face model there ({str(error).splitlines()[0]})") from error
    for part in (config, config.get_text_config()):  # they differ for a model that also takes images
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def dense_attention(path: str) -> str:
    """Return the attention of a causal language model on padded batches: sdpa, or eager where sdpa is not exact.

    Raises:
        ConfigError: see load_config.
    """
    config, field = load_config(path, field="models.actor"), f"models.actor = {path}"
    model_class = find_model_class(config, field, is_policy=True)
    return choose_attention("auto", torch.device("cpu"), torch.float32, model_class, config, field=field)


def find_model_class(model_config: PretrainedConfig, field: str, *, is_policy: bool) -> type[PreTrainedModel]:
    """Return the class of transformers for a config: a causal language model, or a sequence classifier.

    Raises:
        ConfigError: transformers has no such class.
    """
    auto_class = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    model_class = auto_class._model_mapping.get(type(model_config), None)
    kind = "causal language model" if is_policy else "sequence classifier"
    check(model_class is not None, f"{field}: transformers has no {kind} of type {model_config.model_type}")
    return model_class


def build_on_meta(
    model_class: type[PreTrainedModel], model_config: PretrainedConfig, *, is_policy: bool
) -> tuple[Any, Any]:
    """Return a model on the meta device, which allocates no memory, and its head, or None if it has none."""
    with torch.device("meta"):
        model: Any = model_class(model_config)
    return model, model.get_output_embeddings() if is_policy else getattr(model, "score", None)


def empty_model(path: str, *, field: str, is_policy: bool) -> tuple[Any, Any]:
    """Return the model of a folder on the meta device, without its weights, and its head.

    Args:
        field: setting that names the folder, for messages.
        is_policy: a causal language model; else a sequence classifier with one label.
    Raises:
        ConfigError: the folder holds no such model.
    """
    model_config = load_config(path, field=field)
    if not is_policy:
        model_config.num_labels = 1
    model_class = find_model_class(model_config, f"{field} = {path}", is_policy=is_policy)
    model, head = build_on_meta(model_class, model_config, is_policy=is_policy)
    check(head is not None, f"{field} = {path}: {model_class.__name__} has no head")
    return model, head


def load_actor(
    path: str,
    config: ModelsConfig,
    device: torch.device,
    *,
    field: str = "models.actor",
    lora: LoraConfig | None = None,
) -> Actor:
    """Return the causal language model of a folder, in training mode without dropout, on the device.

    Args:
        field: setting that names the folder, for messages.
        lora: with a rank above 0, all weights are frozen and adapters are trained instead.
    Raises:
        ConfigError: the model cannot be loaded, or cannot run on packed or padded sequences exactly.
    """
    model, _ = _load(AutoModelForCausalLM, path, config, device, field=field)
    head = model.get_output_embeddings()
    check(type(head) is nn.Linear, f"{field} = {path}: {type(model).__name__} has no linear output projection")
    head.__class__ = LogprobHead
    head.scaling = logit_scaling(model.config)
    actor = Actor(model)
    verify_packing(actor, config, path, field=field)
    fuse_layers(actor, config, path, field=field)
    verify_logits(actor, path, field=field)
    if lora and lora.rank:
        add_adapters(model, lora, heads=[head])
    return actor


def load_value_model(
    path: str,
    config: ModelsConfig,
    device: torch.device,
    *,
    field: str,
    new_head: bool = False,
    lora: LoraConfig | None = None,
) -> ValueModel:
    """Return the sequence classifier of a folder, in training mode without dropout, on the device.

    Args:
        field: setting that names the folder, for messages.
        new_head: a folder without a trained head is accepted, and its head is initialised with zeros.
        lora: with a rank above 0, all weights but the head's are frozen and adapters are trained instead.
    Raises:
        ConfigError: the folder has no trained head and new_head is false; the model cannot be loaded, or cannot run
            on packed or padded sequences exactly.
    """
    model, missing = _load(AutoModelForSequenceClassification, path, config, device, field=field, num_labels=1)
    check(hasattr(model, "score"), f"{field} = {path}: {type(model).__name__} has no `score` head")
    if any(name.startswith("score.") for name in missing):
        check(new_head, f"{field} = {path}: the folder holds no trained `score` head, so it cannot score responses")
        nn.init.zeros_(model.score.weight)
    model.score.__class__ = ValueHead
    value_model = ValueModel(model)
    verify_packing(value_model, config, path, field=field)
    fuse_layers(value_model, config, path, field=field)
    if lora and lora.rank:
        add_adapters(model, lora, heads=[model.score])
        model.score.requires_grad_(True)
    return value_model


def _load(auto_class: Any, path: str, config: ModelsConfig, device: torch.device, *, field: str, **extra: Any) -> Any:
    """Return a model in training mode on the device, and the names of the weights that its folder lacks.

    Args:
        extra: values that replace those of the folder's config.
    """
    dtype = choose_dtype(config.dtype, device)
    model_config = load_config(path, field=field)
    for name, value in extra.items():
        setattr(model_config, name, value)
    model_class = find_model_class(model_config, f"{field} = {path}", is_policy=auto_class is AutoModelForCausalLM)
    attention = choose_attention(config.attention, device, dtype, model_class, model_config, field=field)
    try:
        model, info = auto_class.from_pretrained(
            path, config=model_config, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{field} = {path}: cannot be loaded ({str(error).splitlines()[0]})") from error
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # from_pretrained returns a model in evaluation mode, in which transformers ignores gradient checkpointing.
    return model.to(device).train(), set(info["missing_keys"])
