"""How a run continues: from which checkpoint, with what log of the steps after it, and what writes the next one."""

import hashlib
import shutil
from pathlib import Path

from hybrid_rl.checkpoints import saver as checkpoint
from hybrid_rl.checkpoints.phase_log import PhaseLog
from hybrid_rl.config import Config, as_dict, check
from hybrid_rl.distributed import World


def find_checkpoint(config: Config) -> Path | None:
    """Return the checkpoint to continue from, as `run.resume` says.

    Raises:
        ConfigError: run.resume is must and there is none.
    """
    folder = None if config.run.resume == "never" else checkpoint.latest(config.run_dir)
    check(folder is not None or config.run.resume != "must", f"run.resume = must: {config.run_dir} has no checkpoint")
    return folder


def make_saver(config: Config, world: World, num_bytes: int) -> checkpoint.Saver:
    """Return what writes checkpoints; a disk without room for one is refused now and not after hours."""
    saver = checkpoint.Saver(config.run_dir, keep_last=config.checkpoint.keep_last, world=world)
    if config.checkpoint.every_steps:
        saver.check_space(num_bytes // world.size)
    return saver


def open_phase_log(config: Config, world: World, steps_done: int) -> PhaseLog | None:
    """Return the log of the steps that no checkpoint holds; without one, what an older run logged goes."""
    folder = config.run_dir / "phase_log"
    if config.checkpoint.phase_log:
        settings = as_dict(config) | {"checkpoint": None, "num_ranks": world.size}
        settings["run"] |= {"name": None, "dir": None, "resume": None}
        if config.run.resume == "never" and world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        key = hashlib.sha256(repr(settings).encode()).hexdigest()
        return PhaseLog(folder, key=key, first_step=steps_done + 1, world=world)
    if world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    return None
