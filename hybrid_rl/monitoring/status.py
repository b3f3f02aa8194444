"""What operators see of a run while it goes on: a heartbeat, a log file, and metrics for Prometheus."""

import logging
from collections.abc import Mapping
from functools import partial

from hybrid_rl.config import Config
from hybrid_rl.distributed import World
from hybrid_rl.errors import close_each
from hybrid_rl.monitoring.activity import Activity
from hybrid_rl.monitoring.heartbeat import Heartbeat
from hybrid_rl.monitoring.log_file import LogFile
from hybrid_rl.monitoring.prometheus import MetricsServer

logger = logging.getLogger(__name__)


class Status:
    """Shows what this rank does, from its making to `close`."""

    def __init__(self, config: Config, world: World, activity: Activity) -> None:
        """Open the files and the port of the settings.

        Args:
            config: settings of the run, whose folder exists.
            world: all ranks; every rank has its own files, rank 0 has the port.
            activity: what this rank does.
        Raises:
            ConfigError: run.prometheus_port cannot be opened.
        """
        port = config.run.prometheus_port
        self._activity = activity
        self._server = MetricsServer(port) if port is not None and world.is_main else None
        self._log = LogFile(config.run_dir / rank_name("log.txt", world.rank))
        self._heartbeat = Heartbeat(config.run_dir / rank_name("heartbeat.json", world.rank), activity, rank=world.rank)

    def show_phase(self, phase: str, step: int) -> None:
        """Show the phase that begins."""
        self._activity.enter(phase, step)
        logger.info("step %d: %s", step, phase)
        self._heartbeat.beat()
        if self._server:
            self._server.show_phase(phase, step)

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the row of a finished step."""
        shown = [f"{name} {value:.6g}" for name, value in metrics.items() if not name.startswith("time/")]
        logger.info("step %d: %s", step, "  ".join(shown))
        if self._server:
            self._server.show_step(step, metrics)

    def close(self, error: BaseException | None) -> None:
        """Close the files and the port.

        Args:
            error: what ends the run; None for a run that has done its steps.
        """
        servers = [self._server.close] if self._server else []
        close_each(self._heartbeat.close, *servers, partial(self._log.end, error), error=error)


def rank_name(name: str, rank: int) -> str:
    """Return the name for rank 0 and name_rank<N> for other ranks."""
    stem, dot, suffix = name.partition(".")
    return name if rank == 0 else f"{stem}_rank{rank}{dot}{suffix}"
