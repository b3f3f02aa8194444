"""Calls of a reward function about responses: arguments in its own signature, and scores from what it returns."""

import asyncio
import inspect
import signal
from collections.abc import Sequence
from typing import Any

from hybrid_rl.rewards.loading import RuleFunction, describe
from hybrid_rl.rewards.returned import Extras, Returned, extra_value, read_response, split_batch
from hybrid_rl.rewards.signatures import Call, Sample

Result = Returned | str
"""What a function gives a response, or the reason for its failure."""


class Caller:
    """Calls the functions of one process, with one event loop for those that are asynchronous."""

    def __init__(self, *, answer_column: str | None = None) -> None:
        """Prepare.

        Args:
            answer_column: column of the rows that became the answer of the prompt.
        """
        self._answer_column = answer_column
        self._runner = asyncio.Runner()

    def score(self, function: RuleFunction, samples: Sequence[Sample]) -> list[Result]:
        """Return what a function gives each response; calls of an asynchronous function run at the same time."""
        parts = [samples] if function.form.is_batched else [[sample] for sample in samples]
        calls = [
            Call(samples=part, answer_column=self._answer_column, extras=[dict[str, Any]() for _ in part])
            for part in parts
        ]
        try:
            values = self._call_together(function, calls) if function.is_async else self._call_each(function, calls)
        finally:
            # An alarm that this function has set must not fire in the next one.
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return [result for call, value in zip(calls, values, strict=True) for result in _read(function, call, value)]

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()

    def _call_each(self, function: RuleFunction, calls: Sequence[Call]) -> list[object]:
        values: list[object] = []
        for call in calls:
            try:
                value = function(call)
                values.append(self._runner.run(_wait_for(value)) if inspect.isawaitable(value) else value)
            except BaseException as error:  # includes SystemExit
                values.append(_Failure(describe(error, function.path)))
        return values

    def _call_together(self, function: RuleFunction, calls: Sequence[Call]) -> list[object]:
        async def call_all() -> list[object]:
            return await asyncio.gather(*(_wait_for_call(function, call) for call in calls), return_exceptions=True)

        try:
            values = self._runner.run(call_all())
        except BaseException as error:  # such as SystemExit, which ends the loop
            self._runner = asyncio.Runner()
            values = [error] * len(calls)
        return [_Failure(describe(v, function.path)) if isinstance(v, BaseException) else v for v in values]


class _Failure:
    """The reason why a call has no value."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


async def _wait_for(value: Any) -> object:
    return await value


async def _wait_for_call(function: RuleFunction, call: Call) -> object:
    return await function(call)  # type: ignore[misc]


def _read(function: RuleFunction, call: Call, value: object) -> list[Result]:
    """Return what a function gives each response of a call, from what it returned."""
    form, samples = function.form, call.samples
    if isinstance(value, _Failure):
        return [value.reason] * len(samples)
    try:
        values = split_batch(value, len(samples)) if form.is_listed else [value]
    except ValueError as error:
        return [str(error)] * len(samples)
    return [
        _read_one(function, sample, one, extras)
        for sample, one, extras in zip(samples, values, call.extras, strict=True)
    ]


def _read_one(function: RuleFunction, sample: Sample, value: object, logged: Extras) -> Result:
    try:
        found = read_response(
            value,
            num_tokens=len(sample.response_ids),
            num_characters=len(sample.response),
            score_keys=function.form.score_keys,
            may_abstain=function.form.may_abstain,
        )
    except ValueError as error:
        return str(error)
    found.extras.update({str(name): extra_value(extra) for name, extra in logged.items()})
    return found
