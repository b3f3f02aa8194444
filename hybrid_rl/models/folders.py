"""Configs and classes of the models in folders, read without loading weights.

Python code of a folder runs only with models.trust_remote_code; without it a config names no such code, so that nothing
that reads the config later can run it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import ADAPTER_CONFIG_NAME, cached_file

from hybrid_rl.config import ConfigError, check

CODE = "auto_map"
"""Key of config.json that names the Python classes in the files of a folder."""
TRUST = "read that code, then set models.trust_remote_code: true to run it"
"""Remedy where a folder needs Python code of its own."""


@contextmanager
def reading(finding: str) -> Iterator[None]:
    """Turn an error in the body, in which a library reads a user's file, into a ConfigError.

    Each library raises types of its own for a damaged file, a plain Exception among them.

    Args:
        finding: start of the message, which the library's reason follows in brackets.
    """
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(f"{finding} ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return the first sentence of a library's message, or the error's type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    has_clear_type = isinstance(error, OSError | ValueError | RuntimeError)
    return first if has_clear_type and first else f"{type(error).__name__}: {first}"


def find_file(path: str, name: str) -> Path | None:
    """Return a file of a model folder, or of a model of the hub that is in the local cache; None if it is not there."""
    if Path(path).is_dir():
        file = Path(path, name)
        return file if file.is_file() else None
    found = cached_file(
        path,
        name,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if found is None else Path(found)


def load_config(path: str, *, field: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the config of a model folder with every dropout set to 0.

    Args:
        field: setting that names the folder, for messages.
        trust_remote_code: run the Python code that the folder names; without it the config names no code.
    Raises:
        ConfigError: the folder holds no model, an adapter or a quantized model, or needs code of its own.
    """
    where = f"{field} = {path}"
    with reading(f"{where}: no Hugging Face model there"):
        check(
            find_file(path, ADAPTER_CONFIG_NAME) is None,
            f"{where}: the folder holds an adapter ({ADAPTER_CONFIG_NAME}); merge it into its base model and give the "
            "merged model's folder",
        )
        keys, _ = PretrainedConfig.get_config_dict(path)
        _check_keys(keys, where, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not trust_remote_code:
        vars(config).pop(CODE, None)
    for part in (config, config.get_text_config()):  # they differ for a model that also takes images
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _check_keys(keys: Any, where: str, *, trust_remote_code: bool) -> None:
    """Check that config.json describes a model that transformers knows and that has floating-point weights.

    Raises:
        ConfigError: it does not.
    """
    check(isinstance(keys, dict), f"{where}: config.json must be a JSON object, got {keys!r:.60}")
    check(
        trust_remote_code or not keys.get(CODE) or keys.get("model_type") in CONFIG_MAPPING,
        f"{where}: the model needs Python code of its own ({CODE} in config.json): {TRUST}, or use a model whose class "
        "is part of transformers",
    )
    for part in (keys, keys.get("text_config")):
        quantization = (part.get("quantization_config") or part.get("compression_config")) if part else None
        method = quantization.get("quant_method", "bitsandbytes") if isinstance(quantization, dict) else quantization
        check(
            not quantization,
            f"{where}: the model is quantized ({method}; quantization_config in config.json), and only floating-point "
            "weights can be trained and synchronized; use the model that it was made from",
        )


def find_model_class(model_config: PretrainedConfig, field: str, *, is_policy: bool) -> type[PreTrainedModel]:
    """Return the class for a config, of transformers or of the folder: a causal language model or sequence classifier.

    Raises:
        ConfigError: there is no such class.
    """
    auto_class = AutoModelForCausalLM if is_policy else AutoModelForSequenceClassification
    reference = (getattr(model_config, CODE, None) or {}).get(auto_class.__name__)
    if reference:
        with reading(f"{field}: the code of its folder gives no {reference}"):
            own_class = get_class_from_dynamic_module(reference, model_config._name_or_path)
            own_class.register_for_auto_class(auto_class.__name__)  # so that an export holds the code, too
            return own_class
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
    return model, model.get_output_embeddings() if is_policy else find_value_head(model)[1]


def find_value_head(model: Any) -> tuple[str, Any]:
    """Return name and module of a sequence classifier's head, which reads the last hidden state; "" and None without.

    transformers calls it `score` in most classes. In the others it is the one linear layer beside the base model, if
    no further layer lies between the two, such as the pooler of an encoder.
    """
    if type(getattr(model, "score", None)) is nn.Linear:
        return "score", model.score
    if getattr(model.base_model, "pooler", None) is not None:
        return "", None
    others = [
        (name, module)
        for name, module in model.named_children()
        if name != model.base_model_prefix and not isinstance(module, nn.Dropout | nn.Identity)
    ]
    return others[0] if len(others) == 1 and type(others[0][1]) is nn.Linear else ("", None)


def empty_model(path: str, *, field: str, is_policy: bool, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """Return the model of a folder on the meta device, without its weights, and its head.

    Args:
        field: setting that names the folder, for messages.
        is_policy: a causal language model; else a sequence classifier with one label.
        trust_remote_code: see load_config.
    Raises:
        ConfigError: the folder holds no such model.
    """
    where = f"{field} = {path}"
    model_config = load_config(path, field=field, trust_remote_code=trust_remote_code)
    if not is_policy:
        model_config.num_labels = 1
    model_class = find_model_class(model_config, where, is_policy=is_policy)
    with reading(f"{where}: config.json describes no {model_class.__name__}"):
        model, head = build_on_meta(model_class, model_config, is_policy=is_policy)
    check(head is not None, f"{where}: {no_head(model, is_policy=is_policy)}")
    return model, head


def no_head(model: Any, *, is_policy: bool) -> str:
    """Return the clause about a model whose head is not one linear layer on its last hidden states."""
    name = type(model).__name__
    if is_policy:
        return f"{name} has no linear output projection"
    layers = ", ".join(n for n, _ in model.named_children() if n != model.base_model_prefix) or "no layer"
    return (
        f"{name} has {layers} beside its base model, not one linear layer on the last hidden state; use another class"
    )
