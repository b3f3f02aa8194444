"""Saving of models as Hugging Face folders, and the proof before a run that it will succeed after the run."""

import copy
import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hybrid_rl.models.folders import reading

NamedShape = tuple[str, tuple[int, ...], torch.dtype]
"""Name, full shape and dtype of a weight."""


FILE_BYTES = 4 << 30
"""Largest size of a file of weights, unless one tensor is larger."""


class ModelWriter:
    """Writes a model as a Hugging Face folder, one file of weights after the other.

    The host holds the weights of one file, and those that are added at once.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        """Write config, generation config and the model's own code to a new folder."""
        self._folder = folder
        self._model = model
        self._pending: dict[str, Tensor] = {}
        self._files: list[dict[str, int]] = []  # name -> bytes of the tensors of each file
        save_config(folder, model)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add weights on the host by the model's parameter names; all weights of a layer are added together.

        transformers stores some weights under other names than the model's, or several of a layer as one tensor.
        """
        ignored = self._model._keys_to_ignore_on_save or ()
        kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
        for name, tensor in revert_weight_conversion(self._model, kept).items():
            if self._pending and self._num_pending + tensor.nbytes > FILE_BYTES:
                self._write_file()
            self._pending[name] = tensor.contiguous()

    def finish(self) -> None:
        """Write the last file, name all files by their number, and write the index of several files."""
        self._write_file()
        names = [SAFE_WEIGHTS_NAME]
        if len(self._files) > 1:
            stem, suffix = Path(SAFE_WEIGHTS_NAME).stem, Path(SAFE_WEIGHTS_NAME).suffix
            names = [f"{stem}-{n:05d}-of-{len(self._files):05d}{suffix}" for n in range(1, len(self._files) + 1)]
            places = {tensor: name for name, file in zip(names, self._files, strict=True) for tensor in file}
            total = sum(size for file in self._files for size in file.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (self._folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
        for number, name in enumerate(names):
            self._path(number).rename(self._folder / name)

    @property
    def _num_pending(self) -> int:
        return sum(tensor.nbytes for tensor in self._pending.values())

    def _path(self, number: int) -> Path:
        return self._folder / f"unfinished-{number:05d}.safetensors"

    def _write_file(self) -> None:
        save_file(self._pending, self._path(len(self._files)), metadata={"format": "pt"})
        self._files.append({name: tensor.nbytes for name, tensor in self._pending.items()})
        self._pending = {}


def layers_together(tensors: Iterable[NamedShape]) -> list[list[NamedShape]]:
    """Return the tensors, in order, in groups that ModelWriter.add takes: those of a layer, and each other module's."""
    groups: dict[str, list[NamedShape]] = {}
    for name, shape, dtype in tensors:
        layer = re.match(r"(.*?\.\d+)\.", name)
        groups.setdefault(layer[1] if layer else name.rpartition(".")[0], []).append((name, shape, dtype))
    return list(groups.values())


def save_config(folder: Path, model: Any) -> None:
    """Write config, generation config and the model's own code to a folder, which is created.

    The generation config is written as its folder had it. save_pretrained would refuse one that names, say, a
    temperature without do_sample, which many folders do.
    """
    kept = getattr(model, "generation_config", None)
    try:
        if kept is not None:
            model.generation_config = GenerationConfig()
        model.save_pretrained(folder, state_dict={})
    finally:
        if kept is not None:
            model.generation_config = kept
    (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)  # a file without tensors
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
