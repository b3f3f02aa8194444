"""Names, shapes and dtypes of the tensors in a model folder, read from the headers of its files without their data."""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from hybrid_rl.config import ConfigError, check
from hybrid_rl.models.folders import find_file, reading

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name in a safetensors header -> dtype of a weight that is not quantized."""


@dataclass(frozen=True, kw_only=True)
class FolderTensors:
    """The tensors in the files of a model folder."""

    floats: dict[str, Tensor] = field(default_factory=dict)
    """Name -> tensor on the meta device, of those in floating point."""
    others: dict[str, str] = field(default_factory=dict)
    """Name -> dtype of all others, such as integers and 8-bit floating point."""


def read_tensors(path: str, *, where: str, named_file: str | None = None) -> FolderTensors | None:
    """Return the tensors of a folder; None if it holds no weights, or if a model of the hub is not in the local cache.

    Args:
        where: setting and folder, for messages.
        named_file: the file that the folder's config.json names as `transformers_weights`.
    Raises:
        ConfigError: a file is damaged or missing, or it is not clear which files are the model's.
    """
    files = _weight_files(path, where, named_file)
    if files is None:
        return None
    found, origins = FolderTensors(), dict[str, Path]()
    for file in files:
        with reading(f"{where}: {file.name} is damaged"):
            headers = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
        for name, header in headers.items():
            check(
                name not in origins, f"{where}: both {origins.get(name, file).name} and {file.name} hold tensor {name}"
            )
            origins[name] = file
            if isinstance(header, Tensor):
                found.floats[name] = header
            else:
                found.others[name] = header
    return found


def read_tensor(path: str, name: str, *, where: str, named_file: str | None = None) -> Tensor:
    """Return one tensor of a folder, with its data; see read_tensors for the parameters.

    Raises:
        ConfigError: no file of the folder holds it.
    """
    for file in _weight_files(path, where, named_file) or []:
        with reading(f"{where}: {file.name} is damaged"):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as opened:
                    if name in opened.keys():  # noqa: SIM118  (it is no mapping)
                        return opened.get_tensor(name)
            else:
                tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
                if name in tensors:
                    return tensors[name]
    raise ConfigError(f"{where}: no file of the folder holds {name}")


def _weight_files(path: str, where: str, named_file: str | None) -> list[Path] | None:
    """Return the files that transformers would load, safetensors first; None if there are none."""
    names = (
        [named_file] if named_file else [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME]
    )
    found = {name: file for name in names if (file := find_file(path, name))}
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        check(
            not {single, index} <= found.keys(),
            f"{where}: the folder holds two sets of weights, {single} and the files of {index}; delete one of them",
        )
    if not found:
        return None
    name, file = next(iter(found.items()))
    return _shards(path, file, where) if name.endswith(".index.json") else [file]


def ignored_files(path: str) -> list[str]:
    """Return the pickled weights of a folder that also holds safetensors, which alone are loaded."""
    if not any(find_file(path, name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        return []
    return [name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if find_file(path, name)]


def _shards(path: str, index: Path, where: str) -> list[Path] | None:
    """Return the files that an index names; None if a model of the hub is only partly in the local cache."""
    with reading(f"{where}: {index.name} is damaged"):
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = {name: find_file(path, name) for name in names}
    missing = [name for name, file in files.items() if file is None]
    if missing and not Path(path).is_dir():
        return None
    check(not missing, f"{where}: {index.name} names {len(missing)} files that are not there: {shorten(missing)}")
    check(bool(files), f"{where}: {index.name} names no file")
    return [file for file in files.values() if file is not None]


def _read_safetensors(file: Path) -> Mapping[str, Tensor | str]:
    headers: dict[str, Tensor | str] = {}
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (it is no mapping)
            tensor = opened.get_slice(name)
            dtype = _FLOATS.get(tensor.get_dtype())
            headers[name] = (
                torch.empty(tensor.get_shape(), dtype=dtype, device="meta") if dtype else str(tensor.get_dtype())
            )
    return headers


def _read_pickle(file: Path) -> Mapping[str, Tensor | str]:
    """Return the tensors of a file of torch.save, of which only tensors and plain containers are unpickled."""
    tensors: Any = torch.load(file, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(file))
    if not isinstance(tensors, Mapping) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError("it holds something else than names and tensors")
    return {
        name: tensor if tensor.dtype in _FLOATS.values() else str(tensor.dtype).removeprefix("torch.")
        for name, tensor in tensors.items()
    }


def shorten(names: Sequence[str], limit: int = 3) -> str:
    """Return the first names, and the number of the others."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
