"""Tests of Triton kernels run in Triton's interpreter, which a process chooses once: each file in one of its own.

To run a single one of their tests: TRITON_INTERPRET=1 python -m pytest tests/kernels/test_gae.py -k name
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

INTERPRETED = {"test_logprobs.py", "test_token_loss.py", "test_gae.py"}


class InterpretedFile(pytest.File):
    """A file whose tests are one test here."""

    def collect(self) -> Iterator[pytest.Item]:
        yield InterpretedTests.from_parent(self, name="in_the_interpreter")


class InterpretedTests(pytest.Item):
    """Runs all tests of a file in the interpreter; the first to run starts all of them, side by side."""

    process: subprocess.Popen | None = None

    def start(self) -> None:
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # The fixtures of tests/conftest.py, which take seconds to import, are not theirs.
        options = ["-q", "-p", "no:cacheprovider", "--confcutdir", str(self.path.parent)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, str(self.path)],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=self.config.rootpath,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def runtest(self) -> None:
        for item in self.session.items:
            if isinstance(item, InterpretedTests) and not item.process:
                item.start()
        assert self.process
        if self.process.wait():
            self.output.seek(0)
            pytest.fail(self.output.read(), pytrace=False)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if module_path.name in INTERPRETED and os.environ.get("TRITON_INTERPRET") != "1":
        return InterpretedFile.from_parent(parent, path=module_path)
    return None
