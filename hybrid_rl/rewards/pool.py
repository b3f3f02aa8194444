"""Scorers in processes of their own, so that one which hangs, exits or crashes costs a time limit and not the run.

Each process is a fresh interpreter and no fork: it holds neither torch nor the GPU, and never imports the main program.
"""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from hybrid_rl.config import check
from hybrid_rl.rewards.rules import load_scorer

if TYPE_CHECKING:
    from hybrid_rl.batch import Rollout

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""For a process to import its scorers; the time limit of a response starts after it."""

Results = list[float | str]
"""What the functions gave one response, in order: a score, or why there is none."""


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """Scores of B responses."""

    scores: list[float]
    """[B]; weighted sum over the functions."""
    per_function: dict[str, list[float]]
    """[B] for each function, unweighted; 0 where it failed."""
    num_failed: int
    """Responses for which a function failed or ran out of time."""
    failures: list[str]
    """One message for each of them."""


class ScorerPool:
    """Scores responses with rule functions, in processes that start at the first call and live until `close`."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] | None = None,
        *,
        timeout_s: float,
        num_workers: int,
        on_error: Literal["raise", "zero"],
    ) -> None:
        """Check that every function can be loaded; the arguments are the fields of RewardConfig.

        Raises:
            ConfigError: a function cannot be loaded, or names and weights do not fit together.
        """
        check(bool(names), "reward.functions is empty")
        check(len(set(names)) == len(names), f"reward.functions = {list(names)}: one is listed twice")
        weights = [1.0] * len(names) if weights is None else list(weights)
        check(len(weights) == len(names), f"reward.weights has {len(weights)} values for {len(names)} reward.functions")
        for name in names:
            load_scorer(name)
        self._names, self._weights = list(names), weights
        self._timeout_s, self._num_workers, self._on_error = timeout_s, num_workers, on_error
        self._workers: list[_Worker] = []

    def score(self, rollouts: Sequence["Rollout"]) -> ScoreResult:
        """Return the scores of some responses.

        A function fails when it raises, exits, returns no finite number, or makes the response pass its time limit.
        With `on_error` zero it counts 0, as do the functions that were to run after it in a process that ended.

        Raises:
            RuntimeError: `on_error` is raise and a function failed, with the sample named; or a process cannot start.
        """
        try:
            results = self._run(rollouts)
        except BaseException:
            self.close()  # or the next call would receive what is still being scored
            raise
        failures = [self._describe(rollouts[i], result) for i, result in enumerate(results) if _failed(result)]
        if failures:
            logger.warning("%d of %d responses have a failed score: %s", len(failures), len(rollouts), failures[0])

        per_function = {
            name: [0.0 if isinstance(result[place], str) else float(result[place]) for result in results]
            for place, name in enumerate(self._names)
        }
        rows = zip(*per_function.values(), strict=True)
        return ScoreResult(
            scores=[sum(w * value for w, value in zip(self._weights, values, strict=True)) for values in rows],
            per_function=per_function,
            num_failed=len(failures),
            failures=failures,
        )

    def close(self) -> None:
        """End all processes; a later `score` starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, rollouts: Sequence["Rollout"]) -> list[Results]:
        """Return what each function gave each response."""
        results: list[Results] = [[] for _ in rollouts]
        pending = deque(range(len(rollouts)))
        while pending or any(worker.row is not None for worker in self._workers):
            self._hand_out(pending, rollouts)
            waiting = [worker for worker in self._workers if not worker.is_idle]
            patience_s = max(0.0, min(worker.deadline for worker in waiting) - time.monotonic())
            multiprocessing.connection.wait([worker.connection for worker in waiting], timeout=patience_s)
            for worker in waiting:
                row = worker.row
                worker.receive()
                if row is None or worker.row is not None:
                    continue
                results[row] = worker.results
                if _failed(worker.results) and self._on_error == "raise":
                    reason = self._describe(rollouts[row], worker.results)
                    raise RuntimeError(f"{reason} (reward.on_error = zero would count it and go on)")
        return results

    def _hand_out(self, pending: deque[int], rollouts: Sequence["Rollout"]) -> None:
        """Give each idle process a response, after starting as many processes as there is work for."""
        self._workers = [worker for worker in self._workers if not worker.is_idle or worker.is_alive]
        num_busy = sum(worker.row is not None for worker in self._workers)
        while len(self._workers) < min(self._num_workers, num_busy + len(pending)):
            self._workers.append(_Worker(self._names, self._timeout_s))
        for worker in self._workers:
            if pending and worker.is_idle:
                row = pending.popleft()
                worker.submit(row, rollouts[row])

    def _describe(self, rollout: "Rollout", results: Results) -> str:
        reasons = [f"{name}: {r}" for name, r in zip(self._names, results, strict=True) if isinstance(r, str)]
        return f"prompt_id {rollout.prompt.prompt_id}, sequence_id {rollout.sequence_id}: {'; '.join(reasons)}"


class _Worker:
    """One scorer process and the response it has in hand."""

    def __init__(self, names: list[str], timeout_s: float) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hybrid_rl.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # one kill reaches what a scorer started, and Ctrl-C does not reach the scorer
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self.connection.send((names, timeout_s))
        self._num_functions, self._timeout_s = len(names), timeout_s
        self._is_ready = False
        self.row: int | None = None
        self.results: Results = []
        self.deadline = time.monotonic() + START_TIMEOUT_S

    @property
    def is_idle(self) -> bool:
        return self._is_ready and self.row is None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def submit(self, row: int, rollout: "Rollout") -> None:
        self.row, self.results = row, []
        self.deadline = time.monotonic() + self._timeout_s
        with contextlib.suppress(ConnectionError):  # it has just died: receive will see
            self.connection.send((vars(rollout.prompt), rollout.text))

    def receive(self) -> None:
        """Take what has arrived, or kill the process when its time is over; a finished response leaves `row` None."""
        try:
            while not self.is_idle and self.connection.poll():
                self._accept(self.connection.recv())
        except (EOFError, ConnectionError):
            self.kill()
            self._end(f"the process ended with exit code {self._process.returncode}")
        if not self.is_idle and time.monotonic() >= self.deadline:
            self.kill()
            self._end(f"took longer than reward.timeout_s = {self._timeout_s}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def _accept(self, message: float | str | None) -> None:
        if not self._is_ready:
            if message is not None:
                raise RuntimeError(f"a scorer process could not load its functions: {message}")
            self._is_ready = True
            return
        assert message is not None
        self.results.append(message)
        if len(self.results) == self._num_functions:
            self.row = None

    def _end(self, reason: str) -> None:
        if not self._is_ready:
            raise RuntimeError(f"a scorer process did not start within {START_TIMEOUT_S} s or died: {reason}")
        num_left = self._num_functions - len(self.results)
        self.results += [reason] + ["not run"] * (num_left - 1)
        self.row = None


def _failed(results: Results) -> bool:
    return any(isinstance(result, str) for result in results)
