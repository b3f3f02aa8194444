"""Scorers that follow a rule. Scorer processes import this file, so it stays free of torch.

A scorer raises when a prompt cannot be scored (no answer, an answer that is not a number): that is never a 0 or a 1.
"""

import importlib.util
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hybrid_rl.config import ConfigError, check

if TYPE_CHECKING:
    from hybrid_rl.batch import Prompt

Scorer = Callable[["Prompt", str], float]
"""(prompt, response text) -> its score. In a scorer process the prompt is a plain object with the fields of Prompt."""

# Digits may be grouped by commas; a minus right after a word or digit is a dash or a subtraction.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(rf"(?<![\w.])-?(?:{_DIGITS}/0*[1-9][0-9]*|{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)")
# Python refuses to convert 4300 digits; a response that runs away in digits is wrong and no error.
_MAX_NUMBER_CHARACTERS = 1000


def exact_match(prompt: "Prompt", response: str) -> float:
    """Return 1 if the response is the answer, leading and trailing white space aside."""
    return float(response.strip() == _answer(prompt).strip())


def last_number(prompt: "Prompt", response: str) -> float:
    """Return 1 if the last number of the response equals the answer as a number: 1,000 = 1000.0 and 1/2 = 0.5.

    The answer is a number alone, perhaps with a currency or per cent sign, or what follows `####` as in GSM8K.
    """
    answer = _answer(prompt)
    gold = _NUMBER.fullmatch(answer.rpartition("####")[2].strip().strip("$%"))
    if gold is None or len(gold[0]) > _MAX_NUMBER_CHARACTERS:
        raise ValueError(f"the answer {answer[:80]!r} is not a number")
    numbers = _NUMBER.findall(response.replace("\u2212", "-"))
    return float(bool(numbers) and _value(numbers[-1]) == _value(gold[0]))


def reasoning_gym(prompt: "Prompt", response: str) -> float:
    """Return the score, in [0, 1], that the prompt's reasoning_gym task gives.

    Scored is the text in the last <answer>...</answer>, or the whole response when it has none.
    """
    gym = import_reasoning_gym()
    entry = prompt.metadata.get("entry")
    if entry is None:
        raise ValueError("the prompt is not from a reasoning_gym task: it has no metadata 'entry'")
    answer = gym.utils.extract_answer(response)
    score = gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return score(answer=response.strip() if answer is None else answer, entry=entry)


FUNCTIONS: dict[str, Scorer] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "reasoning_gym": reasoning_gym,
}


def load_scorer(name: str) -> Scorer:
    """Return the scorer of a name in `FUNCTIONS`, or the function of `path.py:function`, the path relative to here.

    Raises:
        ConfigError: the name, the file or the function does not exist, or the file cannot be run.
    """
    if name in FUNCTIONS:
        if name == "reasoning_gym":
            import_reasoning_gym()  # takes over a second, which no response's time limit should pay
        return FUNCTIONS[name]

    path, colon, function = name.rpartition(":")
    check(
        bool(colon) and path.endswith(".py"),
        f"reward.functions: '{name}' is unknown; give one of {', '.join(FUNCTIONS)}, or path.py:function",
    )
    check(Path(path).is_file(), f"reward.functions: '{name}': there is no file {Path(path).absolute()}")
    scorer = getattr(_run_file(Path(path), name), function, None)
    if not callable(scorer):
        raise ConfigError(f"reward.functions: '{name}': {path} defines no function '{function}'")
    return scorer


def import_reasoning_gym() -> ModuleType:
    """Return the reasoning_gym package, imported only where it is used.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import reasoning_gym.factory
        import reasoning_gym.utils
    except ModuleNotFoundError as error:
        raise ConfigError(f"reasoning_gym cannot be imported ({error}): pip install reasoning-gym") from error
    return reasoning_gym


def _answer(prompt: "Prompt") -> str:
    if prompt.answer is None:
        raise ValueError("the prompt has no answer: set prompts.answer_column")
    return prompt.answer


def _value(number: str) -> Fraction | None:
    return Fraction(number.replace(",", "")) if len(number) <= _MAX_NUMBER_CHARACTERS else None


def _run_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"hybrid_rl_scorer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"reward.functions: '{name}': {path} fails with {type(error).__name__}: {error}") from error
    return module
