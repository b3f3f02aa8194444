"""Measure the way of a new user: seconds from `git clone` to the first step, with own data and reward functions.

python profiling/first_step.py --model models/smollm2            with the caches of pip and uv as they are
python profiling/first_step.py --model models/smollm2 --cold     with empty caches: all packages are downloaded

The data is a Parquet file in verl's columns, the reward function has TRL's signature, and wandb records offline.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import yaml
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[1]
NUM_ROWS = 64
REWARDS = '''"""Reward functions in TRL's signature."""


def has_the_sum(completions, answer, **columns):
    """Return 1 for each completion that has the right sum as one of its words."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(gold in text.split()) for text, gold in zip(texts, answer)]


def is_short(completions, **columns):
    """Return 1 for each completion of at most 40 characters."""
    return [float(len(completion[0]["content"]) <= 40) for completion in completions]
'''


def write_files(folder: Path, model: Path) -> Path:
    """Write what the user has: data, rewards and settings; return the file of the settings."""
    rows = [
        {
            "data_source": "my/sums",
            "prompt": [{"role": "user", "content": f"What is {i} + {i % 7}? Answer with the number."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + i % 7)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(NUM_ROWS)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "my_rewards.py").write_text(REWARDS)
    settings = {
        "models": {"actor": str(model)},
        "prompts": {"path": "train.parquet", "max_prompt_tokens": 128},
        "rollout": {"rollout_batch_size": 4, "group_size": 4, "max_response_tokens": 16},
        "reward": {"functions": ["my_rewards.py:has_the_sum", "my_rewards.py:is_short"], "weights": [1.0, 0.1]},
        "advantage": {"estimator": "grpo"},
        "update": {"mini_batch_size": 16},
        "run": {"name": "first", "num_steps": 2, "eval_every_steps": 0, "trackers": ["wandb"]},
    }
    path = folder / "my.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def first_step(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Run the command to its end, print its output, and return the time at which it reported its first step.

    Raises:
        SystemExit: it failed, or reported no step.
    """
    found = None
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    for line in process.stdout or ():
        print(line, end="", flush=True)
        if found is None and line.startswith("step 1/"):
            found = time.monotonic()
    if process.wait() or found is None:
        sys.exit(f"error: the run ended with code {process.returncode}")
    return found


def main() -> None:
    """Clone, install, train two steps, and print the seconds of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model with a chat template")
    parser.add_argument("--cold", action="store_true", help="empty caches of pip and uv")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hybrid_rl_first_") as name:
        clone, mine = Path(name) / "hybrid_rl", Path(name) / "mine"
        mine.mkdir()
        environment = {**os.environ, "WANDB_MODE": "offline"}
        if arguments.cold:
            environment |= {"UV_CACHE_DIR": f"{name}/uv", "PIP_CACHE_DIR": f"{name}/pip"}
        times = [time.monotonic()]
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        times.append(time.monotonic())
        subprocess.run(["make", "install"], cwd=clone, env=environment, check=True)
        times.append(time.monotonic())
        config = write_files(mine, arguments.model.resolve())
        run = [str(clone / ".venv" / "bin" / "hybrid-rl"), "run", "--config", config.name]
        times.append(first_step(run, mine, environment))
        if not list(mine.glob("**/*.wandb")):
            sys.exit("error: wandb recorded nothing")
    parts = {
        part: later - earlier
        for part, earlier, later in zip(("clone", "install", "start and first step"), times, times[1:], strict=False)
    }
    print("\n".join(f"{part}: {seconds:.0f} s" for part, seconds in parts.items()))
    print(f"from git clone to the first step: {times[-1] - times[0]:.0f} s")


if __name__ == "__main__":
    main()
