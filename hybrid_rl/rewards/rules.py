"""Rule functions that score responses. Worker processes import this module, so it imports no torch.

A function raises if the prompt cannot be scored (no answer, an answer that is not a number) instead of returning 0. Of
several right answers, a response must give one.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hybrid_rl.config import ConfigError

if TYPE_CHECKING:
    from hybrid_rl.batch import Prompt

Scorer = Callable[["Prompt", str], float]
"""(prompt, response text) -> score. In a worker process the prompt is a plain object with the fields of Prompt."""

# Digits may be grouped by commas; a minus directly after a word or digit is a dash or a subtraction, not a sign.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(rf"(?<![\w.])-?(?:{_DIGITS}/0*[1-9][0-9]*|{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"(?:(?!\\[\])])[^\s$])+")  # what a box without braces holds: up to white space or the end of maths
_ANSWER_TAGS = re.compile("<answer>(.*?)</answer>", re.DOTALL)
# Python refuses to convert 4300 digits or more; such a response is wrong, not an error.
_MAX_NUMBER_CHARACTERS = 1000
# math-verify parses twice and compares once. Their sum stays below the default time limit of a response, so that an
# expression that takes too long is wrong, not a failure.
_MATH_TIMEOUT_S = 2

TAG_NAMES = ("think_start", "think_end", "answer_start", "answer_end")
"""Tags of a response format, in the order in which they must occur."""
DEFAULT_TAGS: dict[str, dict[str, Any]] = {
    name: {"text": text, "num_occur": 1}
    for name, text in zip(TAG_NAMES, ("<think>", "</think>", "<answer>", "</answer>"), strict=True)
}


def exact_match(prompt: "Prompt", response: str) -> float:
    """Return 1 if the response after the prefill equals the answer, without leading and trailing white space."""
    return float(_written(prompt, response).strip() in [answer.strip() for answer in _answers(prompt)])


def last_number(prompt: "Prompt", response: str) -> float:
    """Return 1 if the last number of the response equals the answer as a number: 1,000 = 1000.0 and 1/2 = 0.5.

    The answer is a number, optionally with a currency or per cent sign, or the text after `####` as in GSM8K.
    """
    return _ends_in(response, _gold_numbers(prompt))


def gsm8k(prompt: "Prompt", response: str) -> float:
    """Return 1 if the response's result equals the number after `####` in the answer, compared as in `last_number`.

    The result is the last number inside the last <answer>...</answer>, else inside the last \\boxed{...}, else of the
    whole text. Tags or a box without a number are wrong: the text around them is not searched. ColossalChat gives 1 for
    the format and 10 for format and result; `functions: [think_format, gsm8k]` with `weights: [1, 9]` does the same,
    except that a right result in a wrong format gives 9 instead of 0.
    """
    gold = _gold_numbers(prompt)
    tagged, box = _ANSWER_TAGS.findall(response), _last_box(response)
    return _ends_in(tagged[-1] if tagged else response if box is None else box, gold)


def math(prompt: "Prompt", response: str) -> float:
    """Return 1 if math-verify finds the response's last \\boxed{...}, else its last expression, equal to the answer.

    The answer is LaTeX or plain text, with or without $ or \\boxed; of a GSM8K answer, the text after `####` is used. A
    word is parsed as a product of letters, and only inside a box. A comparison that takes more than 2 s counts as
    unequal.
    """
    import math_verify

    gold = [expression for answer in _answers(prompt) for expression in _gold_expressions(answer)]
    box = _last_box(response)
    found = _parse_math(response if box is None else box, is_boxed=box is not None)
    return float(math_verify.verify(gold, found, timeout_seconds=_MATH_TIMEOUT_S))


def think_format(prompt: "Prompt", response: str) -> float:
    """Return 1 if the response is a think block followed by an answer block, with nothing else but white space.

    Every tag occurs once, <think></think><answer></answer>. The `response_format_tags` of a conversation template name
    other tags and how often the model writes them, once or never; those in the prompt's prefill come on top.
    """
    own = prompt.metadata.get("response_format_tags")
    text, pattern = response.strip(), ""
    for name, between in zip(TAG_NAMES, (".*", r"\s*", ".*", ""), strict=True):
        tag = (own or DEFAULT_TAGS)[name]
        count = tag["num_occur"] + (prompt.prefill.count(tag["text"]) if own else 0)
        if text.count(tag["text"]) != count:
            return 0.0
        pattern += rf"(?:{re.escape(tag['text'])}\s*){{{count}}}" + between
    return float(re.fullmatch(pattern, text, re.DOTALL) is not None)


def reasoning_gym(prompt: "Prompt", response: str) -> float:
    """Return the score, in [0, 1], of the prompt's reasoning_gym task for the response.

    The task scores the text in the last <answer>...</answer>, or the whole response if it has none.
    """
    gym = import_reasoning_gym()
    entry = prompt.metadata.get("entry")
    if entry is None:
        raise ValueError("the prompt is not from a reasoning_gym task: it has no metadata 'entry'")
    answer = gym.utils.extract_answer(response)
    score = gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return score(answer=_written(prompt, response).strip() if answer is None else answer, entry=entry)


def import_reasoning_gym() -> ModuleType:
    """Return the reasoning_gym package, which is imported only when it is needed.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        import reasoning_gym.factory
        import reasoning_gym.utils
    except ImportError as error:
        raise ConfigError(f"reasoning_gym cannot be imported ({error}): pip install reasoning-gym") from error
    return reasoning_gym


def prepare_math() -> None:
    """Import math-verify, and check that it reads LaTeX: without its parser it finds no expression in any text.

    Raises:
        ConfigError: the package is not installed, or cannot read LaTeX.
    """
    remedy = "pip install math-verify[antlr4_13_2]"
    try:
        expressions = _parse_math(r"\frac{1}{2}", is_boxed=True)
    except ImportError as error:
        raise ConfigError(f"math_verify cannot be imported ({error}): {remedy}") from error
    if not expressions:
        raise ConfigError(f"math_verify finds no expression in \\frac{{1}}{{2}}, as without a parser: {remedy}")


PREPARATIONS: dict[str, Callable[[], object]] = {"reasoning_gym": import_reasoning_gym, "math": prepare_math}
"""Function -> what a worker process calls before the first response, to import the function's library and check it."""

FUNCTIONS: dict[str, Scorer] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "gsm8k": gsm8k,
    "math": math,
    "think_format": think_format,
    "reasoning_gym": reasoning_gym,
}


def _written(prompt: "Prompt", response: str) -> str:
    """Return the response without what the chat template wrote in the model's name."""
    return response.removeprefix(prompt.prefill)


def _answers(prompt: "Prompt") -> list[str]:
    """Return the right answers, of which a response must give one."""
    if prompt.answer is None:
        raise ValueError("the prompt has no answer: set prompts.answer_column")
    return prompt.answer if isinstance(prompt.answer, list) else [prompt.answer]


def _gold_numbers(prompt: "Prompt") -> list[str]:
    return [_gold_number(answer) for answer in _answers(prompt)]


def _gold_number(answer: str) -> str:
    gold = _NUMBER.fullmatch(answer.rpartition("####")[2].strip().strip("$%"))
    if gold is None or len(gold[0]) > _MAX_NUMBER_CHARACTERS:
        raise ValueError(f"the answer {answer[:80]!r} is not a number")
    return gold[0]


def _gold_expressions(answer: str) -> list[Any]:
    text = answer.rpartition("####")[2].strip()
    box = _last_box(text)
    gold = _parse_math(text.strip("$") if box is None else box, is_boxed=True)
    if not gold:
        raise ValueError(f"the answer {text[:80]!r} is not a mathematical expression")
    return gold


def _ends_in(text: str, golds: list[str]) -> float:
    """Return 1 if the last number of a text equals one of `golds`."""
    numbers = _NUMBER.findall(text.replace("\u2212", "-"))
    return float(bool(numbers) and _value(numbers[-1]) in [_value(gold) for gold in golds])


def _last_box(text: str) -> str | None:
    """Return the content of the last \\boxed or \\fbox of a text; None if there is none or it is not closed.

    White space may stand before the braces, and \\boxed5 needs none; escaped braces do not count.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 0
    if text[start : start + 1] != "{":
        bare = _BARE.match(text, start)
        return bare[0].rstrip(".,;:!") if bare else None
    for mark in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return text[start + 1 : mark.start()]
    return None


def _parse_math(text: str, *, is_boxed: bool) -> list[Any]:
    """Return the expressions of a text as math-verify parses them; empty if there is none."""
    import math_verify

    return math_verify.parse(f"\\boxed{{{text}}}" if is_boxed else text, parsing_timeout=_MATH_TIMEOUT_S)


def _value(number: str) -> Fraction | None:
    return Fraction(number.replace(",", "")) if len(number) <= _MAX_NUMBER_CHARACTERS else None
