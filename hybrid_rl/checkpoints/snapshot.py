"""Host copies of the state that a checkpoint holds. Each rank writes one file; any number of ranks can read them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybrid_rl.atomic import writing
from hybrid_rl.config import ConfigError, check


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The tensors of this rank in one part of a checkpoint, such as the actor, copied so that training can go on."""

    tensors: dict[str, Tensor]
    """Name -> tensor on the host; no two ranks have the same name."""
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


class SavedTensors:
    """The tensors that the snapshots of all ranks wrote into a folder; each is read when it is indexed."""

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

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the saved tensors have a model's names and shapes.

        Args:
            shapes: name -> shape of the model's tensors.
        Raises:
            ConfigError: a tensor is missing, has another shape, or is not the model's.
        """
        saved = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}
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
