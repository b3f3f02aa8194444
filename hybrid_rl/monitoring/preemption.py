"""The end of a run with a checkpoint, where one of its ranks gets SIGTERM."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from hybrid_rl.config import CheckpointConfig
from hybrid_rl.distributed import World
from hybrid_rl.errors import PreemptedError
from hybrid_rl.monitoring import signals
from hybrid_rl.monitoring.activity import Activity
from hybrid_rl.monitoring.signals import Deferral


class Preemption:
    """Defers SIGTERM while a run can write a checkpoint; a context manager. Without on_sigterm it does nothing."""

    def __init__(
        self,
        config: CheckpointConfig,
        world: World,
        activity: Activity,
        *,
        save_seconds: Callable[[], float],
    ) -> None:
        """Prepare.

        Args:
            config: `on_sigterm` and `grace_s`.
            world: all ranks.
            activity: what the run does, to estimate how long it takes.
            save_seconds: returns how long the last checkpoint took; 0 before there is one.
        """
        self._is_on = config.on_sigterm
        self._grace_s = config.grace_s
        self._world = world
        self._activity = activity
        self._save_seconds = save_seconds

    def __enter__(self) -> Self:
        if self._is_on:
            signals.defer(Deferral(grace_s=self._grace_s, describe=self._describe))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, PreemptedError):
            signals.allow_close(error.exit_code)
        signals.defer(None)

    def is_asked(self) -> bool:
        """Return whether any rank has received SIGTERM; the same on every rank, and a collective with on_sigterm."""
        if not self._is_on or not self._world.max(int(signals.is_end_requested())):
            return False
        signals.request_end()
        return True

    def _describe(self) -> str:
        """Return what happens until the end, and whether it is expected to take too long."""
        wait, save = self._activity.seconds_left(), self._save_seconds()
        doing = f"the run ends with a checkpoint within checkpoint.grace_s = {self._grace_s:g} s"
        if wait + save <= self._grace_s:
            return doing
        return (
            f"{doing}, which may be too short: about {wait:.0f} s for phase {self._activity.phase} of step "
            f"{self._activity.step} and {save:.0f} s for the checkpoint"
        )
