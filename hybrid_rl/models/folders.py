"""Configs and classes of the models in folders, read without running code of a folder and without loading weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import ADAPTER_CONFIG_NAME, cached_file

from hybrid_rl.config import ConfigError, check


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


def load_config(path: str, *, field: str) -> PretrainedConfig:
    """Return the config of a model folder with every dropout set to 0.

    Args:
        field: setting that names the folder, for messages.
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
        _check_keys(keys, where)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for part in (config, config.get_text_config()):  # they differ for a model that also takes images
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _check_keys(keys: Any, where: str) -> None:
    """Check that config.json describes a model that transformers knows and that has floating-point weights.

    Raises:
        ConfigError: it does not.
    """
    check(isinstance(keys, dict), f"{where}: config.json must be a JSON object, got {keys!r:.60}")
    own_code = keys.get("auto_map")
    check(
        not own_code or keys.get("model_type") in CONFIG_MAPPING,
        f"{where}: the model needs Python code of its own (auto_map in config.json), which is never run here; use a "
        "model whose class is part of transformers",
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
    where = f"{field} = {path}"
    model_config = load_config(path, field=field)
    if not is_policy:
        model_config.num_labels = 1
    model_class = find_model_class(model_config, where, is_policy=is_policy)
    with reading(f"{where}: config.json describes no {model_class.__name__}"):
        model, head = build_on_meta(model_class, model_config, is_policy=is_policy)
    check(head is not None, f"{where}: {model_class.__name__} has no head")
    return model, head
