"""Saving of models as Hugging Face folders, and the proof before a run that it will succeed after the run."""

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from hybrid_rl.models.folders import reading


def save_model(folder: Path, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write config, generation config and the given weights of a model.

    The generation config is written as its folder had it. save_pretrained would refuse one that names, say, a
    temperature without do_sample, which many folders do.

    Args:
        tensors: weights on the host, by the model's parameter names.
    """
    kept = getattr(model, "generation_config", None)
    try:
        if kept is not None:
            model.generation_config = GenerationConfig()
        model.save_pretrained(folder, state_dict=dict(tensors))
    finally:
        if kept is not None:
            model.generation_config = kept
    if kept is not None:
        kept.to_json_file(folder / GENERATION_CONFIG_NAME)


def check_export(model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, *, where: str) -> None:
    """Check that config and tokenizer can be saved, by saving them to a temporary folder.

    Args:
        where: setting and folder, for messages.
    Raises:
        ConfigError: transformers refuses to save what it has read.
    """
    with tempfile.TemporaryDirectory() as folder:
        with reading(f"{where}: config.json cannot be saved again, so the trained model could not be exported"):
            copy.deepcopy(model_config).save_pretrained(folder)
        with reading(f"{where}: the tokenizer cannot be saved again, so the trained model could not be exported"):
            tokenizer.save_pretrained(folder)
