"""What a person sees while a run goes on: one live line in a terminal, one line per step elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import rich.progress
from rich import box
from rich.console import Console
from rich.table import Table

# Name of the metric, label, format. What a step lacks, as accuracy between evaluations, stays as it was.
_SHOWN = (
    ("reward", "reward", ".3f"),
    ("kl", "KL", ".4f"),
    ("accuracy", "accuracy", ".1%"),
    ("tokens_per_s", "tokens/s", ",.0f"),
)


class Progress:
    """Live display of a run, a context manager; `Console(quiet=True)` silences it on the other ranks."""

    def __init__(self, num_steps: int, first_step: int = 1, console: Console | None = None) -> None:
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
        """Show what runs now; a terminal only."""
        self._bar.update(self._task, phase=phase)

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that a step is done, with those of its metrics that a person watches."""
        self._shown.update({label: format(metrics[name], form) for name, label, form in _SHOWN if name in metrics})
        values = "  ".join(f"{label} {value}" for label, value in self._shown.items())
        elapsed = time.monotonic() - self._start
        left = elapsed / (step - self._first_step + 1) * (self._num_steps - step)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, values=values, left=f"{_clock(left)} left")
        else:
            text = f"step {step}/{self._num_steps}  {values}  {_clock(elapsed)} elapsed  {_clock(left)} left"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def summary(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Print two evaluations side by side, a row per metric that both have."""
        table = Table("metric", box=box.SIMPLE)
        for title in ("before", "after", "change"):
            table.add_column(title, justify="right")
        for name in (name for name in before if name in after):
            change = after[name] - before[name]
            table.add_row(
                name, _number(before[name]), _number(after[name]), f"{'+' if change >= 0 else ''}{_number(change)}"
            )
        self._console.print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
