"""Run many steps with everything on, and measure whether memory, descriptors, threads and processes stay flat.

python profiling/soak.py                             200 steps on a CPU, 100 on a GPU; ends with code 1 if one grows
python profiling/soak.py --steps 40 --name short     a shorter one, for a first look

The run has vLLM, four models, a reward file, an HTTP service, evaluations, checkpoints, the phase log and Prometheus.
After each step every process of the run is measured; soak_checks.py says what counts as flat.
"""

import argparse
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from colocated_run import HERE, RunResult, add_arguments, base_settings, make_model, run_colocated, write_csv
from soak_checks import findings

MIB = 1 << 20
SYNC_OF_STEP = re.compile(r" step (\d+): sync$", re.M)
Row = dict[str, Any]
"""A row of the CSV: one process after one step, or the whole run, whose process is `all` and whose pid is 0."""


def soak_settings(arguments: argparse.Namespace, paths: dict[str, str], url: str, port: int) -> dict[str, Any]:
    """Return the settings of a run with everything on.

    Args:
        arguments: of this program.
        paths: of actor, reward and prompts.
        url: of the reward service.
        port: for Prometheus.
    """
    settings = base_settings(arguments, paths)
    settings["run"] |= {"eval_every_steps": 10, "eval_function": "exact_match", "prometheus_port": port}
    settings["run"] |= {"keep_rollouts": 5}
    settings["models"] |= {"reward": paths["reward"]}
    settings["prompts"] |= {"answer_column": "answer", "eval_path": paths["prompts"], "max_eval_samples": 8}
    if not torch.cuda.is_available():
        settings["rollout"] |= {"kv_cache_memory_bytes": 64 << 20}
    settings["reward"] |= {"remote_urls": [url], "num_workers": 1}
    settings["advantage"] = {"kl_coef": 0.05}
    settings["checkpoint"] = {"every_steps": 10, "phase_log": True, "export": True}
    return settings


def add_answers(prompts: Path) -> Path:
    """Return a copy of a file of prompts whose rows have an answer, for evaluations."""
    path = prompts.with_stem(f"{prompts.stem}_answers")
    lines = prompts.read_text().splitlines()
    path.write_text("".join(f'{line[:-1]}, "answer": "a"}}\n' for line in lines))
    return path


@contextmanager
def reward_service() -> Iterator[str]:
    """Run soak_service.py in a process, and yield its URL."""
    port = free_port()
    service = subprocess.Popen([sys.executable, str(HERE / "soak_service.py"), str(port)])
    try:
        yield f"http://127.0.0.1:{port}/rewards"
    finally:
        service.kill()
        service.wait()


def free_port() -> int:
    """Return a port of loopback that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def role_of(process: psutil.Process) -> str:
    """Return what a process of a run does."""
    name, command = process.name(), " ".join(process.cmdline())
    if name.startswith("VLLM"):
        return "engine"
    for part, role in {"colocated.py": "trainer", "rewards.worker": "scorer", "resource_tracker": "tracker"}.items():
        if part in command:
            return role
    return name


def measure(process: psutil.Process, step: int) -> Row | None:
    """Return the row of a process; None if it has ended."""
    with suppress(psutil.Error):
        memory = process.memory_info()
        return {
            "step": step,
            "process": role_of(process),
            "pid": process.pid,
            "rss_mib": round(memory.rss / MIB, 2),
            "shared_mib": round(memory.shared / MIB, 2),
            "processes": 1,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
        }
    return None


def measure_all(step: int, before_mib: float) -> list[Row]:
    """Return a row for every process below this one, and one of the whole run.

    Args:
        step: that has ended.
        before_mib: what /dev/shm and the GPUs held before the run. The whole run's shared_mib is what they hold more.
    """
    below = psutil.Process().children(recursive=True)
    rows = [row for process in below if (row := measure(process, step))]
    names = ("rss_mib", "processes", "descriptors", "threads")
    total = {name: round(sum(row[name] for row in rows), 2) for name in names}
    shared = round(shared_mib() - before_mib, 2)
    return [*rows, {**rows[0], "process": "all", "pid": 0, "shared_mib": shared, **total}]


def shared_mib() -> float:
    """Return what /dev/shm and the memory of all visible GPUs hold."""
    disk = os.statvfs("/dev/shm")
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    for index in range(torch.cuda.device_count()):
        import pynvml

        pynvml.nvmlInit()
        used += pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used
    return used / MIB


class Sampler:
    """Measures the run after each step, in a thread, for as long as the program runs."""

    def __init__(self, log: Path) -> None:
        """Start; `log` is the log of the run, which may not exist yet."""
        self.rows: list[Row] = []
        self._log = log
        self._before_mib = shared_mib()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        last = 0
        while True:
            time.sleep(0.05)
            if not self._log.exists():
                continue
            begun = SYNC_OF_STEP.findall(self._log.read_text())
            step = int(begun[-1]) - 1 if begun else 0
            if step > last:
                last = step
                self.rows += measure_all(step, self._before_mib)


def main() -> None:
    """Run, write the CSV, print what grows, and exit with code 1 if something does."""
    is_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, responses=8, prompt_tokens=8, response_tokens=8)
    parser.add_argument("--steps", type=int, default=100 if is_gpu else 200)
    parser.add_argument("--name", default=f"operation_soak_{'gpu' if is_gpu else 'cpu'}", help="of run and CSV file")
    parser.add_argument("--swap", default="auto", choices=["auto", "vmm", "deepspeed", "off"])
    parser.set_defaults(shape="0.5b" if is_gpu else "tiny", timeout=3600.0, group_size=4)
    arguments, more = parser.parse_known_args()
    paths = make_model(arguments.shape, arguments.work, prompt_tokens=arguments.prompt_tokens, has_reward=True)
    paths["prompts"] = str(add_answers(Path(paths["prompts"])))
    folder = arguments.work / arguments.name
    shutil.rmtree(folder, ignore_errors=True)  # with the log of an earlier run
    sampler = Sampler(folder / "log.txt")
    with reward_service() as url:
        settings = soak_settings(arguments, paths, url, free_port())
        try:
            run_colocated(settings, folder, num_ranks=1, more=more, timeout_s=arguments.timeout)
        finally:
            if sampler.rows:
                write_csv(arguments.out / f"{arguments.name}.csv", RunResult(folder).environment, sampler.rows)
    found = list(findings(sampler.rows))
    print(*found or ["memory, descriptors, threads and processes are flat"], sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
