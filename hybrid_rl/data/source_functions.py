"""The choice of rule functions by the data set that a row comes from: what `by_source` in `reward.functions` means."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_rl.batch import Prompt
from hybrid_rl.config import BY_SOURCE, ConfigError, Findings, check
from hybrid_rl.data.formats import SOURCE
from hybrid_rl.data.prompts import PromptSet

KNOWN: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "math": "math",
    "lighteval/math": "math",
    "digitallearninggmbh/math-lighteval": "math",
    "huggingfaceh4/math-500": "math",
    "math_dapo": "math",
    "math_dapo_reasoning": "math",
    "aime": "math",
    "aime24": "math",
    "aime25": "math",
    "aime2024": "math",
    "aime2025": "math",
    "numina_aops_forum": "math",
    "numina_synthetic_math": "math",
    "numina_amc_aime": "math",
    "numina_synthetic_amc": "math",
    "numina_cn_k12": "math",
    "numina_olympiads": "math",
}
"""Name of a data set in verl's and Open Instruct's rows, in lower case -> the rule function of its answers."""


@dataclass(frozen=True, kw_only=True)
class FunctionChoice:
    """The rule functions of a scorer pool, and which of them score a prompt."""

    names: list[str]
    weights: list[float] | None
    """Factor of each function; None is 1 for each."""
    everywhere: frozenset[str]
    """Functions that score every prompt."""
    of_source: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a data set -> the functions that score its prompts besides."""

    def applies(self, prompt: Prompt) -> Collection[str]:
        """Return the names of the functions that score a prompt."""
        return self.everywhere.union(self.of_source.get(str(prompt.metadata.get(SOURCE)), ()))


def choose_functions(
    names: Sequence[str],
    weights: Sequence[float] | None,
    by_source: Mapping[str, Any],
    sets: Iterable[PromptSet],
    *,
    setting: str,
    is_judge: bool = False,
) -> FunctionChoice:
    """Return the rule functions of a scorer pool, with those of the data sets in use in place of `by_source`.

    Args:
        names, weights: reward.functions and reward.weights; the functions of a data set have the weight of `by_source`.
        by_source: reward.by_source; what it does not name may be in KNOWN.
        sets: the prompts that are scored.
        setting: setting that holds the names, for messages.
        is_judge: whether the first function of a data set alone scores it, as in an evaluation.
    Raises:
        ConfigError: a row names no data set, or one without a function; or a function scores a row twice.
    """
    given = None if weights is None else list(weights)
    if BY_SOURCE not in names:
        return FunctionChoice(names=list(names), weights=given, everywhere=frozenset(names))
    of_source = _functions_of_sources(by_source, sets, setting=setting, is_judge=is_judge)
    chosen = list(dict.fromkeys(name for functions in of_source.values() for name in functions))
    twice = next((name for name in chosen if name in names), None)
    check(
        twice is None,
        f"{setting}: '{twice}' scores every row, and {BY_SOURCE} chooses it once more: remove it, or choose another "
        "one in reward.by_source",
    )
    place = list(names).index(BY_SOURCE)
    expanded = [*names[:place], *chosen, *names[place + 1 :]]
    if given is not None and len(given) == len(names):
        given[place : place + 1] = [given[place]] * len(chosen)
    everywhere = frozenset(name for name in names if name != BY_SOURCE)
    return FunctionChoice(names=expanded, weights=given, everywhere=everywhere, of_source=of_source)


def _functions_of_sources(
    by_source: Mapping[str, Any], sets: Iterable[PromptSet], *, setting: str, is_judge: bool
) -> dict[str, tuple[str, ...]]:
    """Return name of a data set in use -> its functions; see choose_functions."""
    known = {**KNOWN, **{name.casefold(): value for name, value in by_source.items()}}
    found: dict[str, tuple[str, ...]] = {}
    findings = Findings()
    for each in sets:
        for source, prompt in _first_of_sources(each).items():
            functions = findings.run(lambda: _functions_of(source, prompt, known, each, setting))  # noqa: B023
            found[str(source)] = tuple((functions or [])[: 1 if is_judge else None])
    findings.raise_any()
    return found


def _first_of_sources(each: PromptSet) -> dict[object, Prompt]:
    """Return name of a data set -> the first prompt that comes from it; the name is None where a row has none."""
    first: dict[object, Prompt] = {}
    for prompt in each.prompts:
        first.setdefault(prompt.metadata.get(SOURCE), prompt)
    return first


def _functions_of(source: object, prompt: Prompt, known: Mapping[str, Any], each: PromptSet, setting: str) -> list[str]:
    where = f"{each.source}: row {prompt.prompt_id}"
    if source is None:
        raise ConfigError(
            f"{where}: has no column {SOURCE} with the name of its data set, by which {setting} = {BY_SOURCE} chooses "
            "the rule function: name the function instead, or give the data set a data_source"
        )
    functions = known.get(str(source).casefold())
    if functions is None:
        raise ConfigError(
            f"{where}: no rule function is known for its {SOURCE} '{source}' ({setting} = {BY_SOURCE}): add it to "
            f"reward.by_source, such as {{{source}: math}}"
        )
    return _as_list(functions)


def _as_list(functions: Any) -> list[str]:
    return functions if isinstance(functions, list) else [functions]
