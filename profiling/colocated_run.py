"""Runs launch/colocated.py for the benchmarks of whole runs, and reads the files of a run."""

import argparse
import contextlib
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PHASES = ("sync", "rollout", "score", "update_critic", "update_actor")
TAIL_CHARACTERS = 3000


class RunFailedError(RuntimeError):
    """A run failed; the message has the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Interval in which a phase was open, in microseconds of the timeline."""

    phase: str
    step: int
    start: float
    end: float

    def holds(self, event: Mapping[str, Any]) -> bool:
        """Return whether an event begins in the interval."""
        return self.start <= event["ts"] <= self.end


@dataclass(frozen=True)
class RunResult:
    """The files of a run; the timeline is of rank 0."""

    folder: Path

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """The metrics of each step."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def _environment(self) -> dict[str, Any]:
        return json.loads((self.folder / "environment.json").read_text())

    @property
    def device(self) -> str:
        """The card's name, or the processor's."""
        return self._environment["device"]

    @property
    def environment(self) -> str:
        """Card and versions, as the first line of a CSV file."""
        return environment_line(self._environment)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Spans and counters in the order of time."""
        events = json.loads((self.folder / "timeline.json").read_text())["traceEvents"]
        return sorted((event for event in events if event["ph"] in "XC"), key=lambda event: event["ts"])

    def spans(self, name: str, step: int) -> list[dict[str, Any]]:
        """Return the spans of a name in a step."""
        return [e for e in self.events if e["ph"] == "X" and e["name"] == name and e["args"]["step"] == step]

    def windows(self, step: int) -> list[Window]:
        """Return when the phases of a step were open."""
        return [
            Window(phase=phase, step=step, start=e["ts"], end=e["ts"] + e["dur"])
            for phase in PHASES
            for e in self.spans(phase, step)
        ]

    def counters(self, name: str, window: Window) -> list[dict[str, float]]:
        """Return the values of a counter inside a window."""
        return [e["args"] for e in self.events if e["ph"] == "C" and e["name"] == name and window.holds(e)]

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the responses of a step in the order of their prompts."""
        path = self.folder / "rollouts" / f"step_{step:06d}.jsonl"
        return sorted(map(json.loads, path.read_text().splitlines()), key=lambda r: (r["prompt_id"], r["response"]))


def median(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the median of a metric, 0 where a step has none."""
    return statistics.median(row.get(name, 0.0) for row in rows)


def run_colocated(
    settings: Mapping[str, Any], folder: Path, *, num_ranks: int, more: Sequence[str] = (), timeout_s: float
) -> RunResult:
    """Run the command with some settings, on the first GPUs of this node or with that many ranks on a CPU.

    Args:
        folder: folder of the run; the settings and the output are written next to it.
        more: further arguments of the command.
    Raises:
        RunFailedError: it ended with an error, or took longer than timeout_s.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    run = {**settings["run"], "name": folder.name, "dir": str(folder.parent)}
    path, log = folder.with_suffix(".yaml"), folder.with_suffix(".log")
    path.write_text(yaml.safe_dump({**settings, "run": run}, sort_keys=False))
    command = [sys.executable, str(ROOT / "launch/colocated.py"), "--config", str(path)]
    environment = dict(os.environ)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(num_ranks)]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[:num_ranks])
    # Who ends this process ends the run too.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--num_processes", str(num_ranks), *more],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RunFailedError(f"no end after {timeout_s:.0f} s\n{log.read_text()[-TAIL_CHARACTERS:]}") from None
        finally:
            _end(process)
            signal.signal(signal.SIGTERM, before)
    if code:
        raise RunFailedError(f"{' '.join(command)} ended with code {code}\n{log.read_text()[-TAIL_CHARACTERS:]}")
    return RunResult(folder)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own: the run and its engines
    process.wait()


def make_model(shape: str, folder: Path, *, prompt_tokens: int, has_reward: bool = False) -> dict[str, str]:
    """Return the paths of a random model of a shape; another process writes it, so that the GPU stays empty."""
    where = folder / f"random_{shape}"
    command = [sys.executable, str(HERE / "random_model.py"), str(where), "--shape", shape]
    command += ["--prompt-tokens", str(prompt_tokens)] + ["--reward-model"] * has_reward
    start = time.monotonic()
    subprocess.run(command, check=True)
    print(f"model in {where}: {time.monotonic() - start:.0f} s", flush=True)
    paths = {"actor": str(where / "policy"), "prompts": str(where / f"prompts_{prompt_tokens}.jsonl")}
    return paths | ({"reward": str(where / "reward")} if has_reward else {})


def base_settings(arguments: argparse.Namespace, paths: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that all benchmark runs have in common."""
    return {
        "run": {"num_steps": arguments.steps, "eval_every_steps": 0, "resume": "never"},
        "models": {"actor": paths["actor"], "gradient_checkpointing": arguments.gradient_checkpointing},
        "prompts": {"path": paths["prompts"], "answer_column": None, "max_prompt_tokens": arguments.prompt_tokens},
        "rollout": {
            "rollout_batch_size": arguments.responses // arguments.group_size,
            "group_size": arguments.group_size,
            "max_response_tokens": arguments.response_tokens,
            "kv_cache_memory_bytes": None,
            "enforce_eager": arguments.enforce_eager,
            "max_num_seqs": arguments.responses,
        },
        "reward": {"functions": [f"{HERE / 'even_words.py'}:even_words"]},
        "update": {
            "mini_batch_size": max(1, arguments.responses // 4),
            "micro_batch_tokens": arguments.micro_batch_tokens,
            "zero_stage": arguments.zero_stage,
        },
        "memory": {"swap": arguments.swap},
        "sync": {"mode": arguments.sync},
        "checkpoint": {"every_steps": 0, "export": False},
    }


def add_arguments(parser: argparse.ArgumentParser, *, responses: int, prompt_tokens: int, response_tokens: int) -> None:
    """Add the options of all benchmark runs; options that argparse does not know go to colocated.py unchanged."""
    parser.add_argument("--shape", default="1.5b", help="of random weights, see random_model.py")
    parser.add_argument("--model", help="folder of a real model instead; its prompts file is --prompts")
    parser.add_argument("--prompts", help="with --model: a JSONL file with a column `prompt`")
    parser.add_argument("--responses", type=int, default=responses, help="per step, all GPUs")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=prompt_tokens)
    parser.add_argument("--response-tokens", type=int, default=response_tokens)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--zero-stage", type=int, default=2, choices=[0, 1, 2, 3])
    parser.add_argument("--sync", default="auto", choices=["auto", "alias", "copy"])
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs: the engine starts 30 s sooner")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--timeout", type=float, default=540.0, help="seconds for one run")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench", help="folder of models and runs")
    parser.add_argument("--out", type=Path, default=HERE / "results")


def find_model(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *, has_reward: bool) -> dict[str, str]:
    """Return the paths of the model that the arguments name; a random model is written if it is missing."""
    if arguments.responses % arguments.group_size:
        parser.error(f"--responses {arguments.responses}: must be a multiple of --group-size {arguments.group_size}")
    if not arguments.model:
        tokens = arguments.prompt_tokens
        return make_model(arguments.shape, arguments.work, prompt_tokens=tokens, has_reward=has_reward)
    if not arguments.prompts:
        parser.error("--model: needs --prompts, a JSONL file with a column `prompt`")
    return {"actor": arguments.model, "prompts": arguments.prompts}


def environment_line(environment: Mapping[str, Any], *facts: str) -> str:
    """Return the first line of a CSV file: card, versions, and further conditions of the measurement."""
    return "# " + ", ".join([*(f"{name} {value}" for name, value in environment.items()), *facts])


def write_csv(path: Path, environment: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of the same columns below a line that names card, versions and command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(f"{environment}, command: {' '.join(sys.argv)}\n")
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of rows with the same columns."""
    lines = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
