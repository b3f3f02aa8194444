"""Loading of the models of a run from their folders, as models that run on packed tokens."""

from typing import Any

import torch
from torch import nn

from hybrid_rl.config import LoraConfig, ModelsConfig, check
from hybrid_rl.models.attention import choose_attention
from hybrid_rl.models.folders import find_model_class, find_value_head, load_config, no_head, reading
from hybrid_rl.models.fused_layers import fuse_layers
from hybrid_rl.models.heads import LogprobHead, ValueHead, logit_scaling
from hybrid_rl.models.lora import add_adapters
from hybrid_rl.models.packed import Actor, ValueModel
from hybrid_rl.models.sharding import WeightSharder, gathering, reading_shards
from hybrid_rl.models.value_heads import load_head
from hybrid_rl.models.verification import verify_logits, verify_packing, verify_value_head
from hybrid_rl.models.weight_files import read_tensors
from hybrid_rl.models.weight_match import check_match, check_tied, log_choices, quiet_transformers


def choose_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of parameters: the setting, or for auto bfloat16 on a GPU and float32 on a CPU."""
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, setting)


def load_dense(path: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """Return the causal language model of a folder for padded batches, on the host.

    Its attention is sdpa, or eager where sdpa is not exact.

    Raises:
        ConfigError: see load_config.
    """
    field = f"models.actor = {path}"
    config = load_config(path, field="models.actor", trust_remote_code=trust_remote_code)
    model_class = find_model_class(config, field, is_policy=True)
    attention = choose_attention("auto", torch.device("cpu"), torch.float32, model_class, config, field=field)
    return model_class.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
    )


def load_actor(
    path: str,
    config: ModelsConfig,
    device: torch.device,
    *,
    field: str = "models.actor",
    lora: LoraConfig | None = None,
    sharder: WeightSharder | None = None,
) -> Actor:
    """Return the causal language model of a folder, in training mode without dropout, on the device.

    Args:
        field: setting that names the folder, for messages.
        lora: with a rank above 0, all weights are frozen and adapters are trained instead.
        sharder: shards the weights over the ranks while they are read; None loads the whole model on this rank.
    Raises:
        ConfigError: the model cannot be loaded, or cannot run on packed or padded sequences exactly.
    """
    model, _ = _load(path, config, device, field=field, is_policy=True, sharder=sharder)
    head = model.get_output_embeddings()
    check(type(head) is nn.Linear, f"{field} = {path}: {no_head(model, is_policy=True)}")
    head.__class__ = LogprobHead
    head.scaling = logit_scaling(model.config)
    actor = Actor(model)
    if sharder:
        sharder.finish(actor)
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
    sharder: WeightSharder | None = None,
) -> ValueModel:
    """Return the sequence classifier of a folder, in training mode without dropout, on the device.

    Args:
        field: setting that names the folder, for messages.
        new_head: a folder without a trained head is accepted, and its head is initialised with zeros.
        lora: with a rank above 0, all weights but the head's are frozen and adapters are trained instead.
        sharder: see load_actor.
    Raises:
        ConfigError: the folder has no trained head and new_head is false; the model cannot be loaded, or cannot run
            on packed or padded sequences exactly.
    """
    model, new = _load(path, config, device, field=field, is_policy=False, new_head=new_head, sharder=sharder)
    name, head = find_value_head(model)
    check(head is not None, f"{field} = {path}: {no_head(model, is_policy=False)}")
    for parameter in new:
        nn.init.zeros_(model.get_parameter(parameter))
    head.__class__ = ValueHead
    value_model = ValueModel(model, head=name)
    if sharder:
        sharder.finish(value_model)
    verify_packing(value_model, config, path, field=field)
    fuse_layers(value_model, config, path, field=field)
    verify_value_head(value_model, path, field=field)
    if lora and lora.rank:
        add_adapters(model, lora, heads=[head])
        head.requires_grad_(True)
    return value_model


def _load(
    path: str,
    config: ModelsConfig,
    device: torch.device,
    *,
    field: str,
    is_policy: bool,
    new_head: bool = False,
    sharder: WeightSharder | None,
) -> tuple[Any, list[str]]:
    """Return a model in training mode on the device, and the names of its weights that are new.

    Args:
        is_policy: a causal language model; else a sequence classifier with one label.
        new_head: see load_value_model.
        sharder: see load_actor.
    """
    where, dtype = f"{field} = {path}", choose_dtype(config.dtype, device)
    model_config = load_config(path, field=field, trust_remote_code=config.trust_remote_code)
    if not is_policy:
        model_config.num_labels = 1
    model_class = find_model_class(model_config, where, is_policy=is_policy)
    attention = choose_attention(config.attention, device, dtype, model_class, model_config, field=field)
    with reading(f"{where}: cannot be loaded"), quiet_transformers(), reading_shards(sharder):
        model, info = model_class.from_pretrained(
            path,
            config=model_config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    tensors = None if is_policy else read_tensors(path, where=where, named_file=_named_file(model_config))
    difference = check_match(model, info, where, is_policy=is_policy, new_head=new_head, tensors=tensors)
    if difference.head:
        head = find_value_head(model)[1]
        with gathering(sharder, head):
            load_head(head, path, difference.head, where=where, named_file=_named_file(model_config))
    check_tied(model, where, sharder)
    log_choices(path, where, difference)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # from_pretrained returns a model in evaluation mode, in which transformers ignores gradient checkpointing.
    return model.to(device).train(), difference.new


def _named_file(model_config: Any) -> str | None:
    """Return the file of weights that config.json names, if it names one."""
    return getattr(model_config, "transformers_weights", None)
