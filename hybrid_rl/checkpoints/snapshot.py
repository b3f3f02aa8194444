"""Host copies of the state that a checkpoint holds. Each rank writes one file; any number of ranks can read them."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


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

    def write(self, folder: Path, rank: int) -> None:
        """Write this rank's file and flush it to the disk."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"part_{rank:05d}.safetensors"
        save_file(self.tensors, path, metadata=self.notes)
        with path.open("rb") as file:
            os.fsync(file.fileno())


class SavedTensors:
    """The tensors that the snapshots of all ranks wrote into a folder; each is read when it is indexed."""

    def __init__(self, folder: Path) -> None:
        """Open the files of all ranks.

        Raises:
            FileNotFoundError: the folder has none.
        """
        paths = sorted(folder.glob("part_*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"no part of a checkpoint in {folder}")
        self._files = [safe_open(path, framework="pt") for path in paths]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self.notes: dict[str, str] = self._files[0].metadata() or {}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)
