"""A pool of worker processes for rule functions, so that a function that hangs, exits or crashes cannot end the run.

Each worker is a new interpreter, not a fork: it holds neither torch nor the GPU, and does not import the main program.
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
"""Time limit for a worker to import its functions; the time limit of a response starts afterwards."""

Results = list[float | str]
"""One entry per function, in order, for one response: its score, or the reason for its failure."""


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """Scores of B responses."""

    scores: list[float]
    """[B] weighted sums over the functions."""
    per_function: dict[str, list[float]]
    """Function -> its [B] unweighted scores; 0 where it failed."""
    num_failed: int
    """Number of responses for which a function failed or exceeded the time limit."""
    failures: list[str]
    """One message per failed response."""


class ScorerPool:
    """Scores responses with rule functions in worker processes, which start at the first call and run until `close`."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] | None = None,
        *,
        timeout_s: float,
        num_workers: int,
        on_error: Literal["raise", "zero"],
    ) -> None:
        """Check the settings and that every function can be loaded; no process starts yet.

        Args:
            names: reward.functions, names in `rules.FUNCTIONS` or `path.py:function`.
            weights: reward.weights, one per function; None weights each with 1.
            timeout_s: time limit of all functions together for one response.
            num_workers: largest number of processes.
            on_error: "raise" ends the run when a function fails, "zero" counts its score as 0.
        Raises:
            ConfigError: there are no functions, one is listed twice or cannot be loaded, or the weights do not match.
        """
        check(bool(names), "reward.functions is empty: list at least one function")
        check(len(set(names)) == len(names), f"reward.functions = {list(names)}: one is listed twice; list each once")
        weights = [1.0] * len(names) if weights is None else list(weights)
        check(
            len(weights) == len(names),
            f"reward.weights has {len(weights)} values for {len(names)} reward.functions: give one weight per function",
        )
        for name in names:
            load_scorer(name)
        self._names, self._weights = list(names), weights
        self._timeout_s, self._num_workers, self._on_error = timeout_s, num_workers, on_error
        self._workers: list[_Worker] = []

    def score(self, rollouts: Sequence["Rollout"]) -> ScoreResult:
        """Return the scores of B responses.

        A function fails if it raises, exits, does not return a finite number, or exceeds the time limit of the
        response. With on_error "zero" it then scores 0, as do the functions that come after it if its process ended.

        Raises:
            RuntimeError: on_error is "raise" and a function failed; or a worker process cannot start.
        """
        try:
            results = self._run(rollouts)
        except BaseException:
            self.close()  # else the next call would receive results of this one
            raise
        failures = [self._describe(rollouts[i], result) for i, result in enumerate(results) if _failed(result)]
        if failures:
            logger.warning("%d of %d responses have a failed score: %s", len(failures), len(rollouts), failures[0])

        per_function = {
            name: [0.0 if isinstance(result[i], str) else float(result[i]) for result in results]
            for i, name in enumerate(self._names)
        }
        per_response = zip(*per_function.values(), strict=True)
        return ScoreResult(
            scores=[sum(w * value for w, value in zip(self._weights, values, strict=True)) for values in per_response],
            per_function=per_function,
            num_failed=len(failures),
            failures=failures,
        )

    @property
    def process_ids(self) -> list[int]:
        """Ids of the worker processes."""
        return [worker.process_id for worker in self._workers]

    def close(self) -> None:
        """End all worker processes; a later `score` starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, rollouts: Sequence["Rollout"]) -> list[Results]:
        """Return the results of every response."""
        results: list[Results] = [[] for _ in rollouts]
        pending = deque(range(len(rollouts)))
        while pending or any(worker.task is not None for worker in self._workers):
            self._submit(pending, rollouts)
            waiting = [worker for worker in self._workers if not worker.is_idle]
            wait_s = max(0.0, min(worker.deadline for worker in waiting) - time.monotonic())
            multiprocessing.connection.wait([worker.connection for worker in waiting], timeout=wait_s)
            for worker in waiting:
                task = worker.task
                worker.receive()
                if task is None or worker.task is not None:
                    continue
                results[task] = worker.results
                if _failed(worker.results) and self._on_error == "raise":
                    reason = self._describe(rollouts[task], worker.results)
                    raise RuntimeError(f"{reason} (reward.on_error = zero would count it as 0 and continue)")
        return results

    def _submit(self, pending: deque[int], rollouts: Sequence["Rollout"]) -> None:
        """Start as many workers as there are responses for, and submit a pending response to each idle one."""
        self._workers = [worker for worker in self._workers if not worker.is_idle or worker.is_alive]
        num_busy = sum(worker.task is not None for worker in self._workers)
        while len(self._workers) < min(self._num_workers, num_busy + len(pending)):
            self._workers.append(_Worker(self._names, self._timeout_s))
        for worker in self._workers:
            if pending and worker.is_idle:
                task = pending.popleft()
                worker.submit(task, rollouts[task])

    def _describe(self, rollout: "Rollout", results: Results) -> str:
        reasons = [f"{name}: {r}" for name, r in zip(self._names, results, strict=True) if isinstance(r, str)]
        return f"prompt_id {rollout.prompt.prompt_id}, sequence_id {rollout.sequence_id}: {'; '.join(reasons)}"


class _Worker:
    """One worker process and the response that it is scoring."""

    def __init__(self, names: list[str], timeout_s: float) -> None:
        self.connection, worker_end = multiprocessing.Pipe()
        with worker_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hybrid_rl.rewards.worker", str(worker_end.fileno())],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                # killpg then also ends processes that a function started, and Ctrl-C does not reach the worker.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self.connection.send((names, timeout_s))
        self._num_functions, self._timeout_s = len(names), timeout_s
        self._is_ready = False
        self.task: int | None = None
        """Index of the response that is being scored; None while there is none."""
        self.results: Results = []
        """Results of the last response that was submitted, as far as they have arrived."""
        self.deadline = time.monotonic() + START_TIMEOUT_S
        """Time (time.monotonic) at which the start of the process or the response counts as failed."""

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        return self._is_ready and self.task is None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def submit(self, task: int, rollout: "Rollout") -> None:
        self.task, self.results = task, []
        self.deadline = time.monotonic() + self._timeout_s
        with contextlib.suppress(ConnectionError):  # the process has just died, which `receive` notices
            self.connection.send((vars(rollout.prompt), rollout.text))

    def receive(self) -> None:
        """Read the results that have arrived, and kill the process if its deadline has passed.

        `task` becomes None when the response has all its results, also if the process ended.
        """
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
            self.task = None

    def _end(self, reason: str) -> None:
        if not self._is_ready:
            raise RuntimeError(f"a scorer process did not start within {START_TIMEOUT_S} s or died: {reason}")
        num_missing = self._num_functions - len(self.results)
        self.results += [reason] + ["not run"] * (num_missing - 1)
        self.task = None


def _failed(results: Results) -> bool:
    return any(isinstance(result, str) for result in results)
