"""What the phases of the steps since the last checkpoint gave, on disk: a restart takes it from there."""

import logging
import pickle
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hybrid_rl.atomic import write_atomically
from hybrid_rl.distributed import World

T = TypeVar("T")

logger = logging.getLogger(__name__)


class PhaseLog:
    """A folder per step and in it a file per phase and rank, each whole or absent.

    Updates are not logged: from the same checkpoint and the same rollouts they come out the same.
    """

    def __init__(self, folder: Path, *, key: str, first_step: int, world: World) -> None:
        """Keep what continues from first_step without a gap, and clear away the rest.

        Args:
            key: of all that decides what a phase gives; what was logged under another one is of no use.
        """
        self._folder = folder
        self._world = world
        self._step = first_step
        self._calls = Counter[str]()
        if world.is_main:
            self._keep_what_continues(key, first_step)
        world.barrier()

    def _keep_what_continues(self, key: str, first_step: int) -> None:
        logged, note = _steps(self._folder), self._folder / "key"
        if logged and note.read_text() != key:
            logger.warning("the phase log of steps %s is of other settings or ranks: not used", sorted(logged))
            shutil.rmtree(self._folder)
            logged = {}
        for step, folder in logged.items():
            if not all(s in logged for s in range(first_step, step)) or step < first_step:
                shutil.rmtree(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(note, key)

    def once(self, step: int, name: str, compute: Callable[[], T]) -> T:
        """Return what compute gives, or what it gave in this step before a restart; every rank calls it.

        The n-th call with a name in a step is told from the others. A phase that some rank had not ended is done again
        on all.
        """
        if step != self._step:
            self._step = step
            self._calls.clear()
        path = self._folder / f"step_{step:06d}" / f"rank_{self._world.rank}.{name}_{self._calls[name]}.pickle"
        self._calls[name] += 1
        if all(self._world.all_gather(path.exists())):
            return pickle.loads(path.read_bytes())
        result = compute()
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, pickle.dumps(result))
        return result

    def forget_all(self) -> None:
        """Remove every step when the run is over; every rank calls it, for another may still write its last phase."""
        self._world.barrier()
        self.forget(sys.maxsize)

    def forget(self, step: int) -> None:
        """Remove the steps up to this one: a checkpoint holds them, so that every rank has left them."""
        if self._world.is_main:
            for logged, folder in _steps(self._folder).items():
                if logged <= step:
                    shutil.rmtree(folder)


def _steps(folder: Path) -> dict[int, Path]:
    return {int(path.name.removeprefix("step_")): path for path in folder.glob("step_*")}
