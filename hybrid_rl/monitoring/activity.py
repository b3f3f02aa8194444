"""What a run does at the moment: its step, its phase, and how long they take."""

import time

WHOLE_STEP = ("score", "update_critic", "update_actor")
"""Phases in or after which a step is finished before the run can end with a checkpoint."""


class Activity:
    """Step and phase of a run on this rank; other threads read it."""

    def __init__(self) -> None:
        """Start before the first phase."""
        self.step = 0
        self.phase = "start"
        self.started_at = time.time()
        """Time at which the phase began, in seconds of the Unix epoch."""
        self.engine_restarts = 0
        """How often this process has started the rollout engine again."""
        self._phase_start = self._step_start = time.monotonic()
        self._phase_seconds: dict[str, float] = {}
        self._step_seconds = 0.0

    def enter(self, phase: str, step: int) -> None:
        """Begin a phase."""
        now = time.monotonic()
        self._phase_seconds[self.phase] = now - self._phase_start
        if step != self.step:
            self._step_seconds = now - self._step_start if self.step else 0.0
            self._step_start = now
        self.phase, self.step, self.started_at, self._phase_start = phase, step, time.time(), now

    def seconds_left(self) -> float:
        """Return how long it takes until a checkpoint can be written, if all takes as long as the last time; or 0."""
        if self.phase in WHOLE_STEP:
            return max(0.0, self._step_seconds - (time.monotonic() - self._step_start))
        return max(0.0, self._phase_seconds.get(self.phase, 0.0) - (time.monotonic() - self._phase_start))
