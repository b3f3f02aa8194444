"""Display of a run: a progress bar in a terminal, a line per step in a log, and conversations from time to time."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import rich.progress
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from hybrid_rl.monitoring.transcript import transcript

_SHOWN = (
    ("reward", "reward", ".3f"),
    ("kl", "KL", ".4f"),
    ("accuracy", "accuracy", ".1%"),
    ("tokens_per_s", "tokens/s", ",.0f"),
)
"""Metric, label and format of the values on display; a metric that a step lacks, such as accuracy, keeps its value."""
MAX_TABLE_WIDTH = 1000
MAX_TURN_CHARACTERS = 600
"""Characters that the display shows of the prompt and of each turn of a conversation."""


class Progress:
    """Display of a run on rank 0; a context manager."""

    def __init__(self, num_steps: int, first_step: int = 1, console: Console | None = None) -> None:
        """Prepare the display of the steps first_step to num_steps; None prints to stdout."""
        self._console = console or Console()
        self._num_steps = num_steps
        self._first_step = first_step
        self._shown: dict[str, str] = {}
        self._start = time.monotonic()
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.fields[phase]:<13}"),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[values]}"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(
            "", total=num_steps, completed=first_step - 1, phase="START", values="", left=""
        )

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show_phase(self, phase: str) -> None:
        """Show the current phase; in a terminal only."""
        self._bar.update(self._task, phase=phase)

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that a step is done, with some of its metrics."""
        self._shown.update({label: format(metrics[name], form) for name, label, form in _SHOWN if name in metrics})
        values = "  ".join(f"{label} {value}" for label, value in self._shown.items())
        elapsed = time.monotonic() - self._start
        left = elapsed / (step - self._first_step + 1) * (self._num_steps - step)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, values=values, left=f"{_clock(left)} left")
        else:
            text = f"step {step}/{self._num_steps}  {values}  {_clock(elapsed)} elapsed  {_clock(left)} left"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show_conversation(self, step: int, row: Mapping[str, Any]) -> None:
        """Print a conversation of a step, a row of its file of rollouts, with long texts cut."""
        text = f"\nstep {step}, {transcript(row, max_characters=MAX_TURN_CHARACTERS)}\n"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def summary(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Print a table of two evaluations with a row per metric that both have; nothing if there is none."""
        shared = [name for name in before if name in after]
        if not shared:
            return
        table = Table("metric", box=box.SIMPLE)
        for title in ("before", "after", "change"):
            table.add_column(title, justify="right")
        for name in shared:
            change = after[name] - before[name]
            table.add_row(
                name, _number(before[name]), _number(after[name]), f"{'+' if change >= 0 else ''}{_number(change)}"
            )
        wide = self._console.options.update(width=MAX_TABLE_WIDTH)
        table.width = Measurement.get(self._console, wide, table).maximum  # rows never wrap, however narrow the console
        self._console.print(table, crop=False, soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
