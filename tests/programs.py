"""Programs that tests start in processes of their own: how one ended, and servers that fork them after the imports."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PATHS = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
}
"""Environment in which a program finds the checkout's packages."""


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """How a program ended."""

    code: int
    """The exit code, or minus the number of the signal that killed the program."""
    output: str
    """Text of both streams."""
    cpu_s: float
    """Seconds that the program computed, which do not depend on the load of the machine."""
    survivors: list[str] = field(default_factory=list)
    """Processes that the program started and that outlived it."""

    def error_sentence(self) -> str:
        """Return what the program said, which must be one line with an error."""
        sentences = self.error_sentences()
        assert len(sentences) == 1, self.output
        return sentences[0]

    def error_sentences(self) -> list[str]:
        """Return what the program said besides the stages of its start, which must be lines with errors."""
        assert self.code == 2, self.output
        lines = [line for line in self.output.strip().splitlines() if not line.startswith("start: ")]
        assert lines and all(line.startswith("error: ") for line in lines), self.output
        return [line.removeprefix("error: ") for line in lines]


class ForkServer:
    """Runs one program at a time, each in a process forked from one that has imported the trainer."""

    def __init__(self, folder: Path, requests: int, answers: int) -> None:
        """Wait until the server at the other end of two pipes has imported what programs need.

        Args:
            folder: place for the output of programs, which no other server uses.
            requests: descriptor to write to.
            answers: descriptor to read from.
        """
        self._output = folder / "output.txt"
        self._requests = open(requests, "w", buffering=1)  # noqa: SIM115
        self._answers = open(answers)  # noqa: SIM115
        self._server = psutil.Process(int(self._answers.readline()))

    def start(self, *arguments: str, environment: Mapping[str, str], folder: Path = ROOT) -> None:
        """Start a program, given by its file and its arguments."""
        self._output.unlink(missing_ok=True)
        job = {"arguments": arguments, "environment": dict(environment), "folder": str(folder)}
        print(json.dumps({**job, "output": str(self._output)}), file=self._requests)

    def program(self) -> psutil.Process:
        """Return the process of the program that was started."""
        while not (children := self._server.children()):
            time.sleep(0.001)
        return children[0]

    def wait(self, timeout_s: float = 400.0) -> ProgramResult:
        """Wait for the program that was started; after the timeout it is killed, with all that it started."""
        if not select.select([self._answers], [], [], timeout_s)[0]:
            for process in self._server.children(recursive=True):
                process.kill()
        code, cpu_s = json.loads(self._answers.readline())
        return ProgramResult(code=code, output=self._output.read_text(), cpu_s=cpu_s)

    def close(self) -> None:
        """Let the server end."""
        self._requests.close()
        self._answers.close()


@contextmanager
def running_fork_servers(*folders: Path) -> Iterator[list[ForkServer]]:
    """Start a server per folder, which run programs at the same time."""
    pipes = [(os.pipe(), os.pipe()) for _ in folders]
    theirs = [descriptor for (request, _), (_, answer) in pipes for descriptor in (request, answer)]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "fork_server.py"), *map(str, theirs)],
        stdin=subprocess.DEVNULL,
        pass_fds=theirs,
        env={**os.environ, **PATHS, "OMP_NUM_THREADS": "1"},
    )
    for descriptor in theirs:
        os.close(descriptor)
    servers = [
        ForkServer(folder, request, answer) for folder, ((_, request), (answer, _)) in zip(folders, pipes, strict=True)
    ]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()
        process.wait(timeout=60)
