"""Results of phases on disk, so that a restart does not repeat the steps that follow the last checkpoint."""

import hashlib
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hybrid_rl.atomic import write_atomically
from hybrid_rl.distributed import World
from hybrid_rl.serialization import decode, encode

T = TypeVar("T")

CHECKSUM_BYTES = hashlib.sha256().digest_size
"""Length of the checksum at the start of every file."""

logger = logging.getLogger(__name__)


class PhaseLog:
    """A folder per step that holds a file per phase and rank, each complete or absent, with a checksum.

    Updates are not logged: from the same checkpoint and the same rollouts they give the same weights.
    """

    def __init__(self, folder: Path, *, key: str, first_step: int, world: World) -> None:
        """Keep the logged steps that follow first_step without a gap, and delete the others; a collective.

        Args:
            folder: the log's own folder.
            key: hash of everything that the result of a phase depends on; steps logged under another key are deleted.
            first_step: step that the run does first.
            world: all ranks; every rank has files of its own.
        """
        self._folder = folder
        self._world = world
        self._step = first_step
        self._calls = Counter[str]()
        if world.is_main:
            self._delete_unusable(key, first_step)
        world.barrier()

    def _delete_unusable(self, key: str, first_step: int) -> None:
        logged, note = _steps(self._folder), self._folder / "key"
        if logged and not (note.is_file() and note.read_bytes() == key.encode()):
            logger.warning(
                "the phase log of steps %s has other settings, another run or another number of ranks: it is deleted",
                sorted(logged),
            )
            shutil.rmtree(self._folder)
            logged = {}
        for step, folder in logged.items():
            if not all(s in logged for s in range(first_step, step)) or step < first_step:
                shutil.rmtree(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(note, key)

    def get_or_compute(self, step: int, name: str, compute: Callable[[], T], *classes: type) -> T:
        """Return the logged result of a phase, or compute and log it; a collective.

        A damaged file is as good as none, with a warning.

        Args:
            step: step of the phase.
            name: name of the phase. Calls with one name in a step are numbered, so that each has its own result.
            compute: returns the result, see serialization.encode. It runs on all ranks if any rank has no result.
            classes: dataclasses that may occur in the result, see serialization.decode.
        """
        if step != self._step:
            self._step = step
            self._calls.clear()
        path = self._folder / f"step_{step:06d}" / f"rank_{self._world.rank}.{name}_{self._calls[name]}.msgpack"
        logged = _read(path, classes)
        if all(self._world.all_gather(len(logged) == 1)):
            self._calls[name] += 1
            return logged[0]
        result = compute()
        self._calls[name] += 1  # a call that raises is repeated under its number
        path.parent.mkdir(exist_ok=True)
        content = encode(result)
        write_atomically(path, hashlib.sha256(content).digest() + content)
        return result

    def delete_all(self) -> None:
        """Delete every step once all ranks have written their last phase; a collective."""
        self._world.barrier()
        self.delete_up_to(sys.maxsize)

    def delete_up_to(self, step: int) -> None:
        """Delete the steps up to this one, which every rank has finished because a checkpoint contains it."""
        if self._world.is_main:
            for logged, folder in _steps(self._folder).items():
                if logged <= step:
                    shutil.rmtree(folder)


def _read(path: Path, classes: tuple[type, ...]) -> list[Any]:
    """Return the value in a file, in a list; an empty list if the file is missing or damaged."""
    if not path.exists():
        return []
    content = path.read_bytes()
    checksum, content = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
    reason = "is damaged"
    if hashlib.sha256(content).digest() == checksum:
        try:
            return [decode(content, *classes)]
        except ValueError as error:  # written by another version of the program
            reason = str(error)
    logger.warning("%s %s: this phase is computed again", path, reason)
    return []


def _steps(folder: Path) -> dict[int, Path]:
    """Return step -> folder of every logged step."""
    numbers = {path: path.name.removeprefix("step_") for path in folder.glob("step_*") if path.is_dir()}
    return {int(number): path for path, number in numbers.items() if number.isdecimal()}
