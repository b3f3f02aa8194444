"""The models of a run: read from their folders, checked, and made ready for packed tokens."""

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybrid_rl.config import Config, ConfigError, LoraConfig, ModelsConfig, check
from hybrid_rl.models.attention import choose_attention
from hybrid_rl.models.fused_layers import check_family, fuse_layers
from hybrid_rl.models.lora import add_adapters, check_targets
from hybrid_rl.models.packed import (
    Actor,
    LogprobHead,
    PackedModel,
    ValueHead,
    ValueModel,
    check_head,
    logit_shape,
    packed_inputs,
    settle_layout,
)
from hybrid_rl.models.sequence_parallel import check_heads
from hybrid_rl.models.tensor_parallel import check_shard_plan

__all__ = [
    "Actor",
    "LogprobHead",
    "PackedModel",
    "ValueHead",
    "ValueModel",
    "check_models",
    "choose_dtype",
    "dense_attention",
    "empty_model",
    "eos_token_ids",
    "load_actor",
    "load_config",
    "load_tokenizer",
    "load_value_model",
    "packed_inputs",
]


def choose_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of parameters: as set, or bfloat16 on a GPU and float32 on a CPU."""
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, setting)


def load_config(path: str, *, field: str) -> PretrainedConfig:
    """Return a model's config with every dropout at 0.

    Raises:
        ConfigError: names the field when the folder holds no model.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field} = {path}: no Hugging Face model there ({str(error).splitlines()[0]})") from error
    for part in (config, config.get_text_config()):  # the language model's part, of one that sees images too
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def check_models(config: Config) -> None:
    """Check what the models' folders can tell before anything is loaded.

    A reward model may have a tokenizer of its own: its text is then encoded again, to a length that is not known here.

    Raises:
        ConfigError: a folder holds no model; a sequence would be longer than a model allows; critic or reference has
            another tokenizer than the actor, or the critic would start as a reward model that has; models.attention,
            models.fused_layers, models.lora or how ranks share the work does not fit a model.
    """
    paths = {name: getattr(config.models, name) for name in ("actor", "critic", "reference", "reward")}
    paths = {f"models.{name}": path for name, path in paths.items() if path is not None}
    prompt, response = config.prompts.max_prompt_tokens, config.rollout.max_response_tokens
    configs = {field: load_config(path, field=field) for field, path in paths.items()}
    tokenizer = load_tokenizer(config.models.actor)
    for field, path in paths.items():
        has_own_tokens = load_other_tokenizer(path, tokenizer) is not None
        if has_own_tokens and field == "models.reward":
            check(
                config.models.critic is not None or not config.has_critic,
                f"models.critic is null and would start as models.reward = {path}, whose tokenizer is not the actor's: "
                "give a critic, such as the actor's folder",
            )
            continue
        check(
            not has_own_tokens,
            f"{field} = {path}: its tokenizer is not the actor's, so it would read other tokens than were sampled",
        )
        limit = getattr(configs[field].get_text_config(), "max_position_embeddings", None)
        check(
            limit is None or prompt + response <= limit,
            f"prompts.max_prompt_tokens {prompt} + rollout.max_response_tokens {response} = {prompt + response}: "
            f"{field} = {path} takes at most {limit} tokens",
        )
    if config.has_critic:
        configs.setdefault("models.critic", configs.get("models.reward", configs["models.actor"]))
    _check_classes(config, configs)


def dense_attention(path: str) -> str:
    """Return the attention of a causal language model outside packing: sdpa, or eager where sdpa leaves something out.

    Raises:
        ConfigError: see load_config.
    """
    config, field = load_config(path, field="models.actor"), f"models.actor = {path}"
    model_class = _model_class(config, field, is_policy=True)
    return choose_attention("auto", torch.device("cpu"), torch.float32, model_class, config, field=field)


def _check_classes(config: Config, configs: dict[str, PretrainedConfig]) -> None:
    """Check that every model is of a class that runs with the attention, and has the layers to adapt, that are set."""
    lora = config.models.lora
    for field, model_config in configs.items():
        is_policy = field in ("models.actor", "models.reference")
        model_class = _model_class(model_config, field, is_policy=is_policy)
        choose_attention(
            config.models.attention, torch.device("cpu"), torch.float32, model_class, model_config, field=field
        )
        check_family(config.models.fused_layers, model_config.model_type, field=field)
        if config.update.sequence_parallel_size > 1:
            check_heads(model_config, config.update.sequence_parallel_size, where=field)
        is_trained, size = field in ("models.actor", "models.critic"), config.update.tensor_parallel_size
        if is_trained and size > 1:
            check_shard_plan(_empty(model_class, model_config, is_policy=is_policy)[0], size)
        if is_trained and lora.rank and lora.target_modules:
            model, head = _empty(model_class, model_config, is_policy=is_policy)
            check_targets(model, lora, heads=[head])


def _empty(model_class: type[PreTrainedModel], model_config: PretrainedConfig, *, is_policy: bool) -> tuple[Any, Any]:
    with torch.device("meta"):
        model: Any = model_class(model_config)
    return model, model.get_output_embeddings() if is_policy else getattr(model, "score", None)


def empty_model(path: str, *, field: str, is_policy: bool) -> tuple[Any, Any]:
    """Return a folder's model without memory, on the meta device, and its head; of a value model with one output.

    Raises:
        ConfigError: names the field when the folder holds no such model.
    """
    model_config = load_config(path, field=field)
    if not is_policy:
        model_config.num_labels = 1
    model_class = _model_class(model_config, f"{field} = {path}", is_policy=is_policy)
    model, head = _empty(model_class, model_config, is_policy=is_policy)
    check(head is not None, f"{field} = {path}: {model_class.__name__} has no head")
    return model, head


def _model_class(model_config: PretrainedConfig, field: str, *, is_policy: bool) -> type[PreTrainedModel]:
    auto_class = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    model_class = auto_class._model_mapping.get(type(model_config), None)
    kind = "causal language model" if is_policy else "sequence classifier"
    check(model_class is not None, f"{field}: transformers has no {kind} of type {model_config.model_type}")
    return model_class


def _load(auto_class: Any, path: str, config: ModelsConfig, device: torch.device, *, field: str, **extra: Any) -> Any:
    dtype = choose_dtype(config.dtype, device)
    model_config = load_config(path, field=field)
    for name, value in extra.items():
        setattr(model_config, name, value)
    model_class = _model_class(model_config, f"{field} = {path}", is_policy=auto_class is AutoModelForCausalLM)
    attention = choose_attention(config.attention, device, dtype, model_class, model_config, field=field)
    try:
        model, info = auto_class.from_pretrained(
            path, config=model_config, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{field} = {path}: cannot be loaded ({str(error).splitlines()[0]})") from error
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # from_pretrained leaves evaluation mode, in which transformers ignores gradient checkpointing.
    return model.to(device).train(), set(info["missing_keys"])


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
        lora: with a rank, all weights are frozen and adapters learn instead.
    Raises:
        ConfigError: names the field when the model cannot be loaded or run on packed sequences.
    """
    model, _ = _load(AutoModelForCausalLM, path, config, device, field=field)
    head = model.get_output_embeddings()
    check(type(head) is nn.Linear, f"{field} = {path}: {type(model).__name__} has no linear output projection")
    head.__class__ = LogprobHead
    head.shape = logit_shape(model.config)
    actor = Actor(model)
    settle_layout(actor, config, path, field=field)
    fuse_layers(actor, config, path, field=field)
    check_head(actor, path, field=field)
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
    """Return the sequence classifier of a folder; with new_head, a folder without a head gets one of zeros.

    Args:
        lora: with a rank, all weights but the head's are frozen and adapters learn instead.
    Raises:
        ConfigError: the folder has no trained head and new_head is false; the model cannot be loaded or packed.
    """
    model, missing = _load(AutoModelForSequenceClassification, path, config, device, field=field, num_labels=1)
    check(hasattr(model, "score"), f"{field} = {path}: {type(model).__name__} has no `score` head")
    if any(name.startswith("score.") for name in missing):
        check(new_head, f"{field} = {path}: the folder holds no trained `score` head, so it cannot judge responses")
        nn.init.zeros_(model.score.weight)
    model.score.__class__ = ValueHead
    value_model = ValueModel(model)
    settle_layout(value_model, config, path, field=field)
    fuse_layers(value_model, config, path, field=field)
    if lora and lora.rank:
        add_adapters(model, lora, heads=[model.score])
        model.score.requires_grad_(True)
    return value_model


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder.

    Raises:
        ConfigError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no tokenizer there ({str(error).splitlines()[0]})") from error


def load_other_tokenizer(path: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model folder if its tokens are not those of the given one, else None.

    Raises:
        ConfigError: there is none.
    """
    other = load_tokenizer(path)
    return None if other.get_vocab() == tokenizer.get_vocab() else other


def eos_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a response: the tokenizer's EOS and those of the folder's generation config.

    Raises:
        ConfigError: there is none.
    """
    try:
        from_folder = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        from_folder = None
    ids = from_folder if isinstance(from_folder, list) else [from_folder]
    found = sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
    check(bool(found), f"models.actor = {path}: neither tokenizer nor generation config names an EOS token")
    return found
