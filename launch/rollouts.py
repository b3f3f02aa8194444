"""Prints responses of a run from its files of rollouts, conversations as turns."""

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from hybrid_rl.config import check
from hybrid_rl.monitoring.transcript import transcript

from .commands import description

ORDERS = ("file", "lowest", "highest")
"""Orders of the responses: as in the file, or by reward from the lowest or the highest."""


def rollouts(arguments: list[str], program: str) -> bool:
    """Print responses of a step.

    Returns:
        True.

    Raises:
        ConfigError: the folder has no rollouts, or none of the step or prompt.
    """
    parser = ArgumentParser(
        prog=program,
        usage=f"{program} RUN_DIR [--OPTION VALUE ...]",
        description=description("rollouts", program),
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of the run, such as runs/my-run")
    parser.add_argument("--step", type=int, help="step of the responses; the last one without this option")
    parser.add_argument("--number", type=int, default=3, help="largest number of responses, by default 3")
    parser.add_argument("--order", choices=ORDERS, default="file", help="first responses: of the file, or by reward")
    parser.add_argument("--prompt", type=int, help="prompt_id of the responses; all prompts without this option")
    options = parser.parse_args(arguments)
    check(options.number > 0, f"--number = {options.number}: must be greater than 0")
    step, rows = read_step(options.run_dir, options.step)
    if options.prompt is not None:
        rows = [row for row in rows if row["prompt_id"] == options.prompt]
        check(bool(rows), f"--prompt = {options.prompt}: step {step} has no response to this prompt")
    if options.order != "file":
        rows = sorted(rows, key=lambda row: row["reward"], reverse=options.order == "highest")
    shown = rows[: options.number]
    print(f"step {step}: {len(shown)} of {len(rows)} responses")
    print("".join(f"\n{transcript(row)}\n" for row in shown), end="")
    return True


def read_step(run_dir: Path, step: int | None) -> tuple[int, list[dict[str, Any]]]:
    """Return a step and the rows of its file of rollouts.

    Args:
        run_dir: folder of the run.
        step: None takes the last one that has a file.
    Raises:
        ConfigError: there is no such file.
    """
    numbers = {path.stem.removeprefix("step_"): path for path in (run_dir / "rollouts").glob("step_*.jsonl")}
    files = {int(number): path for number, path in numbers.items() if number.isdecimal()}
    check(bool(files), f"{run_dir}: there are no responses in {run_dir / 'rollouts'}; give the folder of a run")
    found = max(files) if step is None else step
    check(found in files, f"--step = {found}: {run_dir} has the responses of steps {min(files)} to {max(files)}")
    return found, [json.loads(line) for line in files[found].read_text(encoding="utf-8").splitlines()]
