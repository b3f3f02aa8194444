"""Signatures of reward functions, recognised by the names of the parameters, and the arguments of each.

Worker processes import this module, so it imports no torch.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_rl.config import ConfigError, check
from hybrid_rl.rewards.returned import Extras


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A response as a function gets it."""

    prompt: Any
    """Plain object with the fields of Prompt."""
    response: str
    """Text of the response, which begins with the prompt's prefill."""
    response_ids: Sequence[int] = ()
    """Sampled tokens."""

    @property
    def prompt_text(self) -> str:
        """Text of the prompt without the prefill."""
        return self.prompt.text.removesuffix(self.prompt.prefill)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one call of a function is about."""

    samples: Sequence[Sample]
    answer_column: str | None = None
    """Column of the rows that became the answer of the prompt."""
    extras: list[Extras] = field(default_factory=list)
    """For each sample the values that the function logs while it runs, as TRL's functions can."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A signature that reward functions have."""

    title: str
    """What messages and the log call it."""
    arguments: Callable[[Call], Mapping[str, Any]]
    """Returns the arguments of a call by name."""
    marks: frozenset[str] = frozenset()
    """Parameters of which a function with this signature has at least one, and no other function has any."""
    positional: tuple[str, ...] = ()
    """Names of the arguments that are given by position."""
    named: frozenset[str] = frozenset()
    """Names of the arguments that are given by name, where the function takes them."""
    is_batched: bool = False
    """Whether a call is about several responses; otherwise about one."""
    is_listed: bool = False
    """Whether arguments and scores are lists, also in a call about one response."""
    takes_columns: bool = False
    """Whether columns of the data are arguments."""
    may_abstain: bool = False
    """Whether None says that the function does not apply to a response."""
    score_keys: tuple[str, ...] = ("score", "reward", "rewards")
    """Keys of a returned dictionary under which the first one found holds the score."""


@dataclass(frozen=True, kw_only=True)
class LoadedFunction:
    """What a pool knows of a function that its processes have loaded."""

    title: str
    """Title of its form."""
    runs_together: bool
    """Whether it gets several responses at once."""
    columns: tuple[str, ...] = ()
    """Columns of the data without which it cannot be called."""


def _own(call: Call) -> Mapping[str, Any]:
    (sample,) = call.samples
    return {"prompt": sample.prompt, "response": sample.response, "response_ids": list(sample.response_ids)}


def _own_batch(call: Call) -> Mapping[str, Any]:
    return {
        "prompts": [sample.prompt for sample in call.samples],
        "responses": [sample.response for sample in call.samples],
        "response_ids": [list(sample.response_ids) for sample in call.samples],
    }


def _openrlhf(call: Call) -> Mapping[str, Any]:
    return {
        "queries": [sample.prompt_text + sample.response for sample in call.samples],
        "prompts": [sample.prompt_text for sample in call.samples],
        "labels": ["" if sample.prompt.answer is None else sample.prompt.answer for sample in call.samples],
    }


def _trl(call: Call) -> Mapping[str, Any]:
    def log_extra(column: str, values: Sequence[Any]) -> None:
        for found, value in zip(call.extras, values, strict=True):
            found[column] = value

    def log_metric(name: str, value: Any) -> None:
        for found in call.extras:
            found[name] = value

    prompts, completions = [], []
    for sample in call.samples:
        messages = sample.prompt.messages
        prompts.append(sample.prompt_text if messages is None else messages)
        turn = [{"role": "assistant", "content": sample.response}]
        completions.append(sample.response if messages is None else turn)
    return _columns(call) | {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [list(sample.response_ids) for sample in call.samples],
        "log_extra": log_extra,
        "log_metric": log_metric,
    }


def _columns(call: Call) -> dict[str, list[Any]]:
    """Return column -> its values, one per response; None where a row lacks the column."""
    rows = []
    for sample in call.samples:
        answer = {} if sample.prompt.answer is None else {"answer": sample.prompt.answer}
        if answer and call.answer_column:
            answer[call.answer_column] = sample.prompt.answer
        rows.append(answer | sample.prompt.metadata)
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _verl(call: Call) -> Mapping[str, Any]:
    (sample,) = call.samples
    return {
        "data_source": sample.prompt.metadata.get("data_source"),
        "solution_str": sample.response,
        "ground_truth": _ground_truth(sample),
        "extra_info": sample.prompt.metadata.get("extra_info") or {},
    }


def _verl_batch(call: Call) -> Mapping[str, Any]:
    single = [_verl(Call(samples=[sample])) for sample in call.samples]
    plurals = {"data_source": "data_sources", "solution_str": "solution_strs", "ground_truth": "ground_truths"}
    plurals["extra_info"] = "extra_infos"
    return {plural: [arguments[name] for arguments in single] for name, plural in plurals.items()}


def _ground_truth(sample: Sample) -> Any:
    """Return the answer in the type that verl's data have, which is a text in most."""
    reward_model = sample.prompt.metadata.get("reward_model")
    found = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    return sample.prompt.answer if found is None else found


OWN = Form(
    title="f(prompt, response)",
    arguments=_own,
    positional=("prompt", "response"),
    named=frozenset({"response_ids"}),
)
OWN_BATCH = Form(
    title="f(prompts, responses)",
    arguments=_own_batch,
    marks=frozenset({"responses"}),
    positional=("prompts", "responses"),
    named=frozenset({"response_ids"}),
    is_batched=True,
    is_listed=True,
)
OPENRLHF = Form(
    title="OpenRLHF's reward_func(queries, prompts, labels)",
    arguments=_openrlhf,
    marks=frozenset({"queries"}),
    positional=("queries", "prompts", "labels"),
    is_listed=True,
    score_keys=("rewards",),
)
TRL = Form(
    title="TRL's f(prompts, completions, **columns)",
    arguments=_trl,
    marks=frozenset({"completions", "completion_ids"}),
    named=frozenset({"prompts", "completions", "completion_ids", "log_extra", "log_metric"}),
    is_batched=True,
    is_listed=True,
    takes_columns=True,
    may_abstain=True,
)
VERL = Form(
    title="verl's compute_score(data_source, solution_str, ground_truth, extra_info)",
    arguments=_verl,
    marks=frozenset({"solution_str"}),
    named=frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
    score_keys=("score",),
)
VERL_BATCH = Form(
    title="verl's compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
    arguments=_verl_batch,
    marks=frozenset({"solution_strs"}),
    named=frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos"}),
    is_batched=True,
    is_listed=True,
    score_keys=("score",),
)
FORMS = (OWN, OWN_BATCH, OPENRLHF, TRL, VERL, VERL_BATCH)
"""Every signature that is recognised."""
_NOT_GIVEN = ("trainer_state", "environments", "environment")
"""Arguments of TRL's functions that a scorer process does not have."""
_FOREIGN = frozenset({"prompts", "labels"}) | VERL.named | VERL_BATCH.named
"""Parameters that no function f(prompt, response) has, whatever it calls its own two."""


def recognise(scorer: Any, name: str) -> Form:
    """Return the form of the signature of an object that is called, `FORMS`.

    Raises:
        ConfigError: the object is a class or a generator, or its signature is none of the forms or more than one.
    """
    check(
        not inspect.isclass(scorer),
        f"{name} is a class; give a function, or an object with a method __call__(self, prompt, response)",
    )
    called = called_by(scorer)
    check(
        not (inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)),
        f"{name} is a generator, as it contains yield; return the score",
    )
    try:
        signature = inspect.signature(scorer)
    except (TypeError, ValueError):  # a function in C without a signature
        return OWN
    parameters = signature.parameters.values()
    named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    found = [form for form in FORMS if form.marks & named]
    form = found[0] if found else OWN
    if len(found) > 1 or not _can_be_called(signature, named, form):
        raise ConfigError(
            f"its signature is {name}{signature}, which is {'several' if len(found) > 1 else 'none'} of: "
            f"{', '.join(form.title for form in FORMS)}"
        )
    missing = [p.name for p in parameters if p.name in _NOT_GIVEN and p.default is p.empty]
    check(
        form is not TRL or not missing,
        f"its signature is {name}{signature}, but {' and '.join(missing)} cannot be given: a score depends on "
        "the prompt and the response alone; give the parameter a default",
    )
    return form


def called_by(scorer: Any) -> Any:
    """Return the function that runs when an object is called."""
    return scorer if inspect.isroutine(scorer) or isinstance(scorer, functools.partial) else scorer.__call__


def is_async(scorer: Any) -> bool:
    """Return whether a call of an object must be awaited."""
    return inspect.iscoroutinefunction(called_by(scorer))


def arguments_for(scorer: Any, form: Form, call: Call) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call by position and by name.

    Raises:
        ValueError: a parameter of the function is no column of the data.
    """
    given = dict(form.arguments(call))
    by_position = [given.pop(name) for name in form.positional]
    try:
        parameters = list(inspect.signature(scorer).parameters.values())
    except (TypeError, ValueError):
        return by_position, {}
    missing = [name for name in required_columns(scorer, form) if name not in given]
    if missing:
        columns = ", ".join(name for name in given if name not in form.named) or "none"
        raise ValueError(f"its parameter {missing[0]!r} is no column of the data, whose columns are: {columns}")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    return by_position, {name: value for name, value in given.items() if takes_all or name in names}


def required_columns(scorer: Any, form: Form) -> list[str]:
    """Return the columns of the data without which a function cannot be called."""
    if not form.takes_columns:
        return []
    parameters = inspect.signature(scorer).parameters.values()
    return [p.name for p in parameters if _is_required(p) and p.name not in form.named]


def _is_required(parameter: inspect.Parameter) -> bool:
    """Return whether a call must give a parameter by name."""
    is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return is_named and parameter.default is parameter.empty


def _can_be_called(signature: inspect.Signature, named: set[str], form: Form) -> bool:
    """Return whether a function takes the arguments of a form.

    Args:
        named: names of its parameters, except those that take any number of arguments.
    """
    parameters = list(signature.parameters.values())
    kinds = {p.kind for p in parameters}
    if form is OWN and (named & _FOREIGN or (not named and inspect.Parameter.VAR_KEYWORD in kinds)):
        return False
    if form is OWN_BATCH and named & set(OWN.positional):
        return False
    if not form.positional:
        is_hidden = inspect.Parameter.POSITIONAL_ONLY in kinds
        return not is_hidden and (form.takes_columns or {p.name for p in parameters if _is_required(p)} <= form.named)
    needs = {name: None for name in form.named if name in named and name not in form.positional}
    try:
        bound = list(signature.bind(*form.positional, **needs).arguments)
    except TypeError:
        return False
    places = zip(bound, form.positional, strict=False)
    return all(found == wanted or found not in form.positional for found, wanted in places)
