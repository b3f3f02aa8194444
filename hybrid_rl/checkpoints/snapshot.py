"""Copies on the host of what a checkpoint keeps: each rank writes a file of its share, any number reads all."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's share of one part of a checkpoint; nothing changes it anymore."""

    tensors: dict[str, Tensor]
    """On the host. A name is on one rank only."""
    notes: dict[str, str] = field(default_factory=dict)
    """The same on every rank."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, folder: Path, rank: int) -> None:
        """Write this rank's file; it is on the disk, and not only on its way there, when this returns."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"part_{rank:05d}.safetensors"
        save_file(self.tensors, path, metadata=self.notes)
        with path.open("rb") as file:
            os.fsync(file.fileno())


class Parts:
    """The tensors that all ranks' snapshots wrote into a folder, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Look at the files.

        Raises:
            FileNotFoundError: there are none.
        """
        paths = sorted(folder.glob("part_*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"no part of a checkpoint in {folder}")
        self._files = [safe_open(path, framework="pt") for path in paths]
        self._place = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self.notes: dict[str, str] = self._files[0].metadata() or {}

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._place)

    def __getitem__(self, name: str) -> Tensor:
        return self._place[name].get_tensor(name)
