"""Forks itself for each program that it is told of, so that the imports are paid once; see ForkServer in conftest.py.

Each line of the input is JSON with `arguments` (the first is the program's file), `environment`, `folder` and `output`;
when the program has ended, a line with its exit code and its seconds of CPU time is written.
"""

import atexit
import gc
import json
import os
import runpy
import sys

import datasets

import hybrid_rl.demo
import hybrid_rl.engines.deepspeed.engine
import hybrid_rl.engines.huggingface
import hybrid_rl.trainer
import launch.colocated

IMPORTED = (
    *(datasets, hybrid_rl.demo, hybrid_rl.engines.deepspeed.engine, hybrid_rl.engines.huggingface, hybrid_rl.trainer),
    launch.colocated,
)
"""What the programs need, for them to find."""


def become(arguments: list[str], environment: dict[str, str], folder: str, output: str) -> None:
    """Run a program in this process, which ends as one of its own does, with what it leaves at exit."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the requests are not for it
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = arguments
    atexit.register(gc.unfreeze)  # else C++ libraries tell at exit of what was never freed
    runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    """Serve until the input ends."""
    gc.freeze()  # DeepSpeed collects garbage often; the programs need not look for it among the imports
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become(**json.loads(line))
            return
        _, status, used = os.wait4(pid, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), flush=True)


if __name__ == "__main__":
    main()
