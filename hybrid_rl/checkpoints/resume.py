"""What a run writes for its continuation: the phase log of the steps after a checkpoint, and the next checkpoint."""

import hashlib
import shutil
from pathlib import Path

from hybrid_rl.checkpoints.phase_log import PhaseLog
from hybrid_rl.checkpoints.saver import Saver
from hybrid_rl.checkpoints.start import EXPORTED
from hybrid_rl.config import Config, as_dict
from hybrid_rl.distributed import World
from hybrid_rl.rewards.loading import reward_file_hashes


def make_saver(
    config: Config, world: World, num_bytes: int, *, actor_bytes: int, critic_bytes: int, steps_done: int
) -> Saver:
    """Return the saver of a run, whose checkpoints and exports are known to fit on the disk.

    Args:
        num_bytes: size of a checkpoint over all ranks.
        actor_bytes: size of an exported actor.
        critic_bytes: size of an exported critic.
        steps_done: step of the checkpoint that the run continues from.
    Raises:
        ConfigError: the disk has no room for them.
    """
    num_actors, num_critics = config.num_exports
    wanted = num_actors * actor_bytes + num_critics * critic_bytes
    saver = Saver(
        config.run_dir,
        keep_last=config.checkpoint.keep_last,
        world=world,
        last_step=steps_done,
        export_bytes=max(0, wanted - exported_bytes(config.run_dir)),
    )
    if config.checkpoint.every_steps:
        saver.check_space(num_bytes // world.size)
    return saver


def exported_bytes(run_dir: Path) -> int:
    """Return the size of the weights in the exports of a run's folder."""
    files = [file for name in EXPORTED for file in (run_dir / name).rglob("*.safetensors")]
    return sum(file.stat().st_size for file in files)


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
