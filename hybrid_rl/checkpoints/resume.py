"""What a run needs to continue: the checkpoint, the phase log of the steps after it, and the saver of the next one."""

import hashlib
import shutil
from pathlib import Path

from hybrid_rl.checkpoints import saver as checkpoint
from hybrid_rl.checkpoints.phase_log import PhaseLog
from hybrid_rl.config import Config, as_dict, check
from hybrid_rl.distributed import World


def find_checkpoint(config: Config) -> Path | None:
    """Return the checkpoint that `run.resume` selects, None to start at step 1.

    Raises:
        ConfigError: run.resume is must and the run has no checkpoint.
    """
    folder = None if config.run.resume == "never" else checkpoint.latest(config.run_dir)
    check(
        folder is not None or config.run.resume != "must",
        f"run.resume = must: {config.run_dir} has no checkpoint; use auto",
    )
    return folder


def make_saver(config: Config, world: World, num_bytes: int) -> checkpoint.Saver:
    """Return the saver of a run, whose first checkpoint is known to fit on the disk.

    Args:
        num_bytes: size of a checkpoint over all ranks.
    Raises:
        ConfigError: the disk has no room for a checkpoint.
    """
    saver = checkpoint.Saver(config.run_dir, keep_last=config.checkpoint.keep_last, world=world)
    if config.checkpoint.every_steps:
        saver.check_space(num_bytes // world.size)
    return saver


def open_phase_log(config: Config, world: World, steps_done: int) -> PhaseLog | None:
    """Return the phase log of a run; without `checkpoint.phase_log`, delete an older log and return None."""
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
