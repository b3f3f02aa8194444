"""What a run writes for its continuation: the phase log of the steps after a checkpoint, and the next checkpoint."""

import hashlib
import shutil

from hybrid_rl.checkpoints.phase_log import PhaseLog
from hybrid_rl.checkpoints.saver import Saver
from hybrid_rl.config import Config, as_dict
from hybrid_rl.distributed import World
from hybrid_rl.rewards.loading import reward_file_hashes


def make_saver(config: Config, world: World, num_bytes: int, *, export_bytes: int, steps_done: int) -> Saver:
    """Return the saver of a run, whose checkpoints and exports are known to fit on the disk.

    Args:
        num_bytes: size of a checkpoint over all ranks.
        export_bytes: size of an exported actor.
        steps_done: step of the checkpoint that the run continues from.
    Raises:
        ConfigError: the disk has no room for them.
    """
    folders = [config.run_dir / name for name in exported_names(config)]
    saver = Saver(
        config.run_dir,
        keep_last=config.checkpoint.keep_last,
        world=world,
        last_step=steps_done,
        export_bytes=export_bytes * sum(not folder.exists() for folder in folders),
    )
    if config.checkpoint.every_steps:
        saver.check_space(num_bytes // world.size)
    return saver


def exported_names(config: Config) -> list[str]:
    """Return the names of the folders with all weights of an actor that a run exports."""
    has_average = config.checkpoint.export and config.models.ema_decay is not None
    wanted = {"export": config.checkpoint.export, "export_ema": has_average, "best": config.checkpoint.keep_best}
    return [name for name, is_wanted in wanted.items() if is_wanted]


def open_phase_log(config: Config, world: World, steps_done: int, *, run_id: str) -> PhaseLog | None:
    """Return the phase log of a run; without `checkpoint.phase_log`, delete an older log and return None.

    Args:
        steps_done: step of the checkpoint that the run continues from.
        run_id: see Start.run_id; the log of another run is not read.
    """
    folder = config.run_dir / "phase_log"
    if config.checkpoint.phase_log:
        settings = as_dict(config) | {"checkpoint": None, "num_ranks": world.size, "run_id": run_id}
        settings["run"] |= {"name": None, "dir": None, "resume": None}
        settings["reward_files"] = reward_file_hashes(config.rule_functions)
        key = hashlib.sha256(repr(settings).encode()).hexdigest()
        return PhaseLog(folder, key=key, first_step=steps_done + 1, world=world)
    if world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    return None
