"""A pool of worker processes for rule functions, so that a function that hangs, exits or crashes cannot end the run.

The user's code runs in the workers alone: this process neither imports a reward file nor runs what a worker sends.
"""

import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from hybrid_rl.config import ConfigError, Findings, check
from hybrid_rl.errors import RewardLostError
from hybrid_rl.rewards.environment import check_variables
from hybrid_rl.rewards.loading import split_name
from hybrid_rl.rewards.process import END_TIMEOUT_S, Result, Task, WorkerProcess, WorkerSettings
from hybrid_rl.rewards.returned import Returned

if TYPE_CHECKING:
    from hybrid_rl.batch import Prompt, Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """Scores of B responses."""

    scores: list[float]
    """[B] weighted sums over the functions; one that failed or does not apply adds 0, the others their scores."""
    per_function: dict[str, list[float]]
    """Function -> its [B] unweighted scores; 0 where it failed, NaN where it does not apply."""
    returned: dict[str, list[Returned]]
    """Function -> all that it has returned for each response."""
    failures: dict[int, str]
    """Row of a response for which a function failed or exceeded the time limit -> message."""

    @property
    def num_failed(self) -> int:
        """Number of responses for which a function failed or exceeded the time limit."""
        return len(self.failures)


class ScorerPool:
    """Scores responses with rule functions in worker processes, which run until `close`."""

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] | None = None,
        *,
        timeout_s: float,
        num_workers: int,
        on_error: Literal["raise", "zero"],
        memory_limit_bytes: int | None = None,
        environment_variables: Sequence[str] = (),
        prompts_per_call: int = 1,
        answer_column: str | None = None,
        applies: Callable[["Prompt"], Collection[str]] | None = None,
        field: str = "reward.functions",
    ) -> None:
        """Check the settings, and start the first process, which loads and checks the functions; `score` starts others.

        Args:
            names: names in `rules.FUNCTIONS` or `path.py:function`.
            weights: reward.weights, one per function; None weights each with 1.
            timeout_s: time limit of all functions together for one response; a call about several has so long for each.
            num_workers: largest number of processes.
            on_error: "raise" ends the run when a function fails, "zero" counts its score as 0.
            memory_limit_bytes: largest resident memory of a process and those that it started; None sets no limit.
            environment_variables: variables of this process that the processes get besides the allowed ones.
            prompts_per_call: prompts whose responses a batched or asynchronous function gets at once.
            answer_column: column of the rows that became the answer of the prompt, for functions that take columns.
            applies: returns the names of the functions that score the responses to a prompt; None is all.
            field: setting that holds the names, for messages.
        Raises:
            ConfigError: there are no functions, one is listed twice or cannot be loaded or called, the weights do not
                match, or a variable is not set.
        """
        _check_names(names, field)
        weights = [1.0] * len(names) if weights is None else list(weights)
        check(
            len(weights) == len(names),
            f"reward.weights has {len(weights)} values for {len(names)} {field}: give one weight per function",
        )
        check_variables(environment_variables, os.environ)
        self._names, self._weights, self._num_workers, self._on_error = list(names), weights, num_workers, on_error
        self._prompts_per_call, self._applies = prompts_per_call, applies
        self._settings = WorkerSettings(
            names=self._names,
            answer_column=answer_column,
            field=field,
            timeout_s=timeout_s,
            memory_limit_bytes=memory_limit_bytes,
            environment_variables=environment_variables,
        )
        self._workers = [WorkerProcess(self._settings)]
        # A run that fails before or without `close` ends the processes, too.
        weakref.finalize(self, _end, self._workers, os.getpid())
        try:
            self._workers[0].wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._functions = self._workers[0].functions

    @property
    def weights(self) -> dict[str, float]:
        """Function -> the factor of its score."""
        return dict(zip(self._names, self._weights, strict=True))

    @property
    def signatures(self) -> dict[str, str]:
        """Function -> the title of its signature."""
        return {name: found.title for name, found in zip(self._names, self._functions, strict=True)}

    def check_columns(self, prompts: Sequence["Prompt"]) -> None:
        """Check that the rows of the prompts have all columns that the functions ask for.

        Raises:
            ConfigError: a row lacks a column; one sentence for each function and column.
        """
        findings = Findings()
        for name, function in zip(self._names, self._functions, strict=True):
            applied = [p for p in prompts if self._applies is None or name in self._applies(p)]
            for column in function.columns:
                is_answer = column in ("answer", self._settings.answer_column)
                row = next((p for p in applied if column not in p.metadata and not (is_answer and p.answer)), None)
                if row is not None:
                    findings.messages.append(
                        f"{self._settings.field}: '{name}' has the parameter {column}, which is no column of row "
                        f"{row.prompt_id}; its columns: {', '.join(row.metadata) or 'none'}"
                    )
        findings.raise_any()

    def score(self, rollouts: Sequence["Rollout"]) -> ScoreResult:
        """Return the scores of B responses.

        A function fails if it raises, exits, does not return a finite number, or exceeds the time limit of the
        response. With on_error "zero" it then scores 0, as do the functions that come after it if its process ended.

        Raises:
            ConfigError: on_error is "raise" and a function failed; or a further process cannot load the functions.
            RewardLostError: on_error is "raise" and a process ended, or was killed at a limit, while it scored a
                response; or a further process ended while it loaded the functions.
        """
        try:
            results = self._run(rollouts)
        except BaseException:
            self.close()  # else the next call would receive results of this one
            raise
        failures = {i: self._describe(rollouts[i], result) for i, result in enumerate(results) if _failed(result)}
        if failures:
            first = next(iter(failures.values()))
            logger.warning("%d of %d responses have a failed score: %s", len(failures), len(rollouts), first)

        columns = zip(*results, strict=True) if results else [()] * len(self._names)
        returned = {name: list(map(_returned, column)) for name, column in zip(self._names, columns, strict=True)}
        per_function = {name: [_number(found.score) for found in column] for name, column in returned.items()}
        per_response = zip(*per_function.values(), strict=True)
        return ScoreResult(
            scores=[self._weighted_sum(values) for values in per_response],
            per_function=per_function,
            returned=returned,
            failures=failures,
        )

    def _weighted_sum(self, values: Sequence[float]) -> float:
        return sum(w * value for w, value in zip(self._weights, values, strict=True) if not math.isnan(value))

    @property
    def process_ids(self) -> list[int]:
        """Ids of the worker processes."""
        return [worker.process_id for worker in self._workers]

    def close(self) -> None:
        """End all worker processes; a later `score` starts new ones."""
        _end(self._workers, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, rollouts: Sequence["Rollout"]) -> list[list[Result]]:
        """Return for every response the results of all functions."""
        abstains = Returned(score=None)  # of a function that does not apply, and of each until its result is known
        results: list[list[Result]] = [[abstains] * len(self._names) for _ in rollouts]
        pending = deque(self._tasks(rollouts))
        while pending or any(worker.task is not None for worker in self._workers):
            self._submit(pending, rollouts)
            waiting = [worker for worker in self._workers if not worker.is_idle]
            WorkerProcess.wait(waiting)
            for worker in waiting:
                task = worker.task
                worker.receive()
                if task is None or worker.task is not None:
                    continue
                places = ((row, number) for number in task.functions for row in task.rows)
                for (row, number), result in zip(places, worker.results, strict=True):
                    results[row][number] = result
                if self._on_error == "raise" and _failed(worker.results):
                    failed = next(row for row in task.rows if _failed(results[row]))
                    reason = self._describe(rollouts[failed], results[failed])
                    error = RewardLostError if worker.is_lost else ConfigError
                    remedy = "correct it, or count its score as 0 with reward.on_error = zero"
                    raise error(f"{self._settings.field}: {reason}; {remedy}")
        return results

    def _tasks(self, rollouts: Sequence["Rollout"]) -> Iterator[Task]:
        """Yield what the workers do, by what the functions take: one response, or all responses to some prompts."""
        together: dict[tuple[int, ...], dict[int, list[int]]] = {}  # functions -> prompt -> its responses
        for row, rollout in enumerate(rollouts):
            names = self._names if self._applies is None else self._applies(rollout.prompt)
            applied = [number for number, name in enumerate(self._names) if name in names]
            alone = [number for number in applied if not self._functions[number].runs_together]
            if alone:
                yield Task(rows=[row], functions=alone)
            batched = tuple(number for number in applied if self._functions[number].runs_together)
            if batched:
                together.setdefault(batched, {}).setdefault(rollout.prompt.prompt_id, []).append(row)
        for functions, groups in together.items():
            rows = list(groups.values())
            for first in range(0, len(rows), self._prompts_per_call):
                taken = rows[first : first + self._prompts_per_call]
                yield Task(rows=[row for group in taken for row in group], functions=functions)

    def _submit(self, pending: deque[Task], rollouts: Sequence["Rollout"]) -> None:
        """Start as many workers as there are tasks for, and submit a pending task to each idle one."""
        for worker in [worker for worker in self._workers if worker.is_idle and not worker.is_alive]:
            worker.kill()
            self._workers.remove(worker)
        num_busy = sum(worker.task is not None for worker in self._workers)
        while len(self._workers) < min(self._num_workers, num_busy + len(pending)):
            self._workers.append(WorkerProcess(self._settings))
        for worker in self._workers:
            if pending and worker.is_idle:
                worker.submit(pending.popleft(), rollouts)

    def _describe(self, rollout: "Rollout", results: Sequence[Result]) -> str:
        reasons = [f"{name}: {r}" for name, r in zip(self._names, results, strict=True) if isinstance(r, str)]
        return f"prompt_id {rollout.prompt.prompt_id}, sequence_id {rollout.sequence_id}: {'; '.join(reasons)}"


def _check_names(names: Sequence[str], field: str) -> None:
    """Check that there are functions, each of which exists and is listed once."""
    check(bool(names), f"{field} is empty: list at least one function")
    findings = Findings()
    places = [findings.run(lambda name=name: split_name(name, field=field) or name) for name in names]  # type: ignore[misc]
    findings.raise_any()
    check(len(set(places)) == len(names), f"{field} = {list(names)}: one is listed twice; list each once")


def _failed(results: Sequence[Result]) -> bool:
    return any(isinstance(result, str) for result in results)


def _returned(result: Result) -> Returned:
    return Returned(score=0.0) if isinstance(result, str) else result


def _number(score: float | None) -> float:
    return math.nan if score is None else score


def _end(workers: list[WorkerProcess], owner_id: int) -> None:
    """End worker processes and empty the list; a process that was forked from their owner does nothing."""
    if os.getpid() != owner_id:
        return
    for worker in workers:
        worker.ask_to_end()
    deadline = time.monotonic() + END_TIMEOUT_S
    for worker in workers:
        worker.kill(grace_s=max(0.0, deadline - time.monotonic()))
    workers.clear()
