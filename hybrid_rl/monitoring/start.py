"""The stages of a start, from the imports to the first step: shown while they go on, and kept for the timeline."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psutil
import rich.progress
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from hybrid_rl.monitoring.timeline import Timeline

logger = logging.getLogger(__name__)

PHASE = "start"
"""Phase of the spans, and lane of the stages that follow each other."""
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage that has ended; times are of the monotonic clock, in nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    lane: str = PHASE
    """Row of the timeline: stages of one lane follow each other or lie in each other."""
    is_part: bool = False
    """Whether the stage lies in another one, or goes on beside others, so that a sum of all stages leaves it out."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return (self.end_ns - self.start_ns) / 1e9


def process_start_ns() -> int:
    """Return when this process was created, on the monotonic clock in nanoseconds."""
    age_s = time.time() - psutil.Process().create_time()
    return time.monotonic_ns() - round(max(0.0, age_s) * 1e9)


class _Seconds(rich.progress.ProgressColumn):
    """Seconds of a stage that goes on or has ended."""

    max_refresh = None

    def render(self, task: rich.progress.Task) -> Text:
        end = task.fields["end_ns"] or time.monotonic_ns()
        return Text(f"{(end - task.fields['start_ns']) / 1e9:.1f} s")


class Start:
    """The stages of this rank's start; a context manager, at whose end the display ends.

    A terminal shows all stages with their seconds while they go on. Elsewhere each stage is one line when it has ended.
    """

    def __init__(self, console: Console | None = None, *, is_shown: bool | None = None) -> None:
        """Begin without a stage.

        Args:
            console: where stages are shown; None is stdout.
            is_shown: whether they are shown, or only kept; None shows them on rank 0.
        """
        self._console = console or Console()
        self._is_shown = os.environ.get("RANK", "0") == "0" if is_shown is None else is_shown
        self._lock = threading.RLock()
        self._open: list[str] = []
        self._stages: list[Stage] = []
        self._timeline: Timeline | None = None
        self._bar = rich.progress.Progress(
            rich.progress.SpinnerColumn(finished_text=" "),
            rich.progress.TextColumn("start: {task.description}"),
            _Seconds(),
            console=self._console,
        )
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._has_bar = self._is_shown and self._console.is_terminal
        self._has_ended = False
        if self._has_bar:
            self._bar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def stages(self) -> list[Stage]:
        """The stages that have ended, in this order."""
        with self._lock:
            return list(self._stages)

    @contextmanager
    def stage(self, name: str, *, since_ns: int | None = None) -> Iterator[None]:
        """Show the body as a stage; one inside another is named after both.

        Args:
            name: of the stage.
            since_ns: when it began; None is now.
        """
        full_name, start_ns = ": ".join([*self._open, name]), since_ns or time.monotonic_ns()
        self._show(full_name, start_ns, None)
        self._open.append(name)
        try:
            yield
        finally:
            self._open.pop()
            self._keep(Stage(name=full_name, start_ns=start_ns, end_ns=time.monotonic_ns(), is_part=bool(self._open)))

    def report(self, owner: str, name: str, start_ns: int, end_ns: int | None) -> None:
        """Show a stage of another process, which is a part of a stage of this one.

        Args:
            owner: name of the stage of this process.
            name: of its part.
            start_ns, end_ns: when it began and ended on the monotonic clock, which all processes of a node share; None
                for a stage that goes on, and is reported again at its end.
        """
        full_name = f"{owner}: {name}"
        if end_ns is None:
            self._show(full_name, start_ns, None)
        else:
            self._keep(Stage(name=full_name, start_ns=start_ns, end_ns=end_ns, is_part=True))

    def follow(self, name: str, seconds: Callable[[], float]) -> None:
        """Show work of another thread, which goes on beside the stages.

        Args:
            name: of the work, which begins at this moment.
            seconds: returns how long it took; 0 while it goes on.
        """
        start_ns = time.monotonic_ns()
        self._show(name, start_ns, None)

        def wait() -> None:
            while not (duration := seconds()):
                time.sleep(POLL_S)
            self._keep(
                Stage(name=name, start_ns=start_ns, end_ns=start_ns + round(duration * 1e9), lane=name, is_part=True)
            )

        threading.Thread(target=wait, name=f"follow {name}", daemon=True).start()

    def record_in(self, timeline: "Timeline") -> None:
        """Write all stages into a timeline, the ones that have ended at once."""
        with self._lock:
            self._timeline = timeline
            for stage in self._stages:
                _record(stage, timeline)

    def end(self) -> None:
        """End the display; stages that end later are only kept."""
        with self._lock:
            if self._has_bar and not self._has_ended:
                self._bar.stop()
            self._has_ended = True

    def _show(self, name: str, start_ns: int, end_ns: int | None) -> None:
        """Show a stage in a terminal, with the seconds up to now or to its end."""
        with self._lock:
            if not self._has_bar or self._has_ended:
                return
            if name not in self._tasks:
                self._tasks[name] = self._bar.add_task(name, total=1, start_ns=start_ns, end_ns=end_ns)
            self._bar.update(self._tasks[name], completed=end_ns is not None, end_ns=end_ns)

    def _keep(self, stage: Stage) -> None:
        with self._lock:
            self._stages.append(stage)
            if self._timeline:
                _record(stage, self._timeline)
            self._show(stage.name, stage.start_ns, stage.end_ns)
            if self._is_shown and not self._has_bar and not self._has_ended:
                text = f"start: {stage.name} {stage.seconds:.1f} s"
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        logger.info("start: %s: %.1f s", stage.name, stage.seconds)


def _record(stage: Stage, timeline: "Timeline") -> None:
    timeline.add(stage.name, stage.start_ns, stage.end_ns, phase=PHASE, lane=stage.lane)
