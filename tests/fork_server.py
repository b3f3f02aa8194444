"""Servers that fork themselves for each program they are asked for, so that the imports are paid once; see programs.py.

The arguments are pairs of file descriptors, one pair per server, of requests and answers. A server first answers with
its process id. Each request is a line of JSON with `arguments` (the first is the program's file), `environment`,
`folder` and `output`; when the program has ended, the server answers with its exit code and its seconds of CPU time.
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
"""Modules that the programs find imported."""


def become(arguments: list[str], environment: dict[str, str], folder: str, output: str) -> None:
    """Run a program in this process, which ends as a process started for it would, exit handlers included."""
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def serve(requests: int, answers: int) -> None:
    """Answer requests until there are no more."""
    with open(requests) as lines, open(answers, "w", buffering=1) as told:
        print(os.getpid(), file=told)
        for line in lines:
            pid = os.fork()
            if pid == 0:
                lines.close()
                told.close()
                return become(**json.loads(line))
            _, status, used = os.wait4(pid, 0)
            print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime]), file=told)


def main() -> None:
    """Fork a server for each pair of descriptors, and wait until all have ended."""
    gc.freeze()  # DeepSpeed collects garbage often; the programs need not look for it among the imports
    atexit.register(gc.unfreeze)  # otherwise C++ libraries warn at exit about objects that were never freed
    descriptors = [int(argument) for argument in sys.argv[1:]]
    for pair in zip(descriptors[::2], descriptors[1::2], strict=True):
        if os.fork() == 0:
            for descriptor in {*descriptors} - {*pair}:
                os.close(descriptor)
            return serve(*pair)
    for descriptor in descriptors:
        os.close(descriptor)
    for _ in descriptors[::2]:
        os.wait()


if __name__ == "__main__":
    main()
