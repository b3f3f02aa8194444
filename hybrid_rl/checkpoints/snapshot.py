"""Host copies of the state that a checkpoint holds. Each rank writes one file; any number of ranks can read them."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybrid_rl.atomic import writing
from hybrid_rl.config import ConfigError, check


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The tensors of this rank in one part of a checkpoint, such as the actor, copied so that training can go on."""

    tensors: dict[str, Tensor]
    """Name -> tensor on the host; no two ranks have the same name. See piece_name for tensors in pieces."""
    notes: dict[str, str] = field(default_factory=dict)
    """Metadata, the same on every rank."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, folder: Path, rank: int) -> Path:
        """Write this rank's file, flush it to the disk, and return it.

        Raises:
            FileWriteError: the file cannot be written.
        """
        path = folder / f"part_{rank:05d}.safetensors"
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            save_file(self.tensors, path, metadata=self.notes)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return path


_SHAPES = "shapes"
"""Note that holds the shapes of the tensors in pieces, as JSON."""


def piece_name(name: str, start: int) -> str:
    """Return the name of a piece of a flattened tensor, whose snapshot has the notes of piece_notes.

    Args:
        start: number of the piece's first element in the tensor.
    """
    return f"{name}@{start}"


def piece_notes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the notes of a snapshot with pieces of tensors, given name -> shape of the whole tensors."""
    return {_SHAPES: json.dumps(shapes)}


def divide_among_ranks(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Return name -> rank that keeps or saves a tensor, about equally many elements for each rank.

    Args:
        sizes: name -> number of elements.
    """
    held, owners = [0] * num_ranks, {}
    for name, size in sizes.items():
        owners[name] = held.index(min(held))
        held[owners[name]] += size
    return owners


class SavedTensors:
    """The tensors that the snapshots of all ranks wrote into a folder; each is read when it is indexed.

    Pieces of a tensor are one tensor.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files of all ranks.

        Raises:
            ConfigError: the folder has none, or one is no safetensors file.
        """
        self._folder = folder
        paths = sorted(folder.glob("part_*.safetensors"))
        check(bool(paths), f"the checkpoint {folder.parent} has no part {folder.name}")
        self._files = [_open(path) for path in paths]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self.notes: dict[str, str] = self._files[0].metadata() or {}
        self._whole_shapes = {name: tuple(s) for name, s in json.loads(self.notes.get(_SHAPES, "{}")).items()}
        self._pieces: dict[str, list[tuple[int, str]]] = {name: [] for name in self._whole_shapes}
        for key in self._file_of:
            name, _, start = key.rpartition("@")
            if name in self._pieces:
                self._pieces[name].append((int(start), key))

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._shapes())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._pieces:
            return self._file_of[name].get_tensor(name)
        pieces = [self._file_of[key].get_tensor(key) for _, key in sorted(self._pieces[name])]
        return torch.cat(pieces).view(self._whole_shapes[name])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of all tensors."""
        in_pieces = {key for pieces in self._pieces.values() for _, key in pieces}
        whole = {name: file for name, file in self._file_of.items() if name not in in_pieces}
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in whole.items()} | self._whole_shapes

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the saved tensors have a model's names and shapes.

        Args:
            shapes: name -> shape of the model's tensors.
        Raises:
            ConfigError: a tensor is missing, has another shape, or is not the model's.
        """
        saved = self._shapes()
        different = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
        if different:
            example = different[0]
            raise ConfigError(
                f"the checkpoint {self._folder.parent} is of another model: {len(different)} tensors of "
                f"{self._folder.name} differ, such as {example}, of shape {_words(saved.get(example))} there and "
                f"{_words(shapes.get(example))} in the model; give the models that the run was started with"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: damaged, or not a safetensors file ({error}); restore it") from error


def _words(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
