"""Triton reads once per process whether it interprets kernels: each file with such tests runs in a process of its own.

To run a single test of them: TRITON_INTERPRET=1 python -m pytest tests/kernels/test_gae.py -k name
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The process of a file does not load tests/conftest.py, which sets the same profile.
settings.register_profile("any_load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_load")

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default of Triton 3.9, which warns if it is unset

INTERPRETED = {"test_logprobs.py", "test_token_loss.py", "test_gae.py"}


class InterpretedFile(pytest.File):
    """A file whose tests are two tests here: the fast ones, and the slow ones."""

    def collect(self) -> Iterator[pytest.Item]:
        yield InterpretedTests.from_parent(self, name="in_the_interpreter", chosen="not slow")
        slow = InterpretedTests.from_parent(self, name="slow_in_the_interpreter", chosen="slow")
        slow.add_marker(pytest.mark.slow)
        yield slow


class InterpretedTests(pytest.Item):
    """Runs the tests of a file that a mark expression chooses in the interpreter."""

    def __init__(self, *, chosen: str, **named: Any) -> None:
        super().__init__(**named)
        self.chosen = chosen

    def runtest(self) -> None:
        # The process starts without tests/conftest.py, whose fixtures take seconds to import.
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--confcutdir", str(self.path.parent)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "-m", self.chosen, str(self.path)],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=self.config.rootpath,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            pytest.fail(done.stdout + done.stderr, pytrace=False)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if module_path.name in INTERPRETED and os.environ.get("TRITON_INTERPRET") != "1":
        return InterpretedFile.from_parent(parent, path=module_path)
    return None
