"""What a reward function returned, as scores. Worker processes import this module, so it imports no torch."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

Extras = dict[str, Any]
"""Name -> value of what a function logs besides its score."""

TOKEN_KEY, STEP_KEY = "token_rewards", "step_rewards"
FILTER_KEY, LOGS_KEY = "scores", "extra_logs"
"""Keys of OpenRLHF's dictionaries: the scores for dynamic filtering, and a dictionary of further values."""
MAX_TEXT = 500
"""Characters that are kept of a text among the extra values."""


@dataclass(frozen=True, kw_only=True)
class Returned:
    """What a function gives a response."""

    score: float | None
    """Sum of all that it pays; None if the function does not apply to the response."""
    token_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Position in the sampled tokens, and reward, of what is paid before the end of the response."""
    step_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Number of characters up to the end of a step, and reward, of what is paid at the step's last token."""
    filter_score: float | None = None
    """Score for dynamic filtering; None takes the score."""
    extras: dict[str, float | str] = field(default_factory=dict)
    """Name -> further value, which is logged."""


def pack(returned: Returned) -> float | dict[str, Any]:
    """Return what a function gave a response as a JSON value, from which `unpack` makes an equal object."""
    content = {name: value for name, value in vars(returned).items() if name == "score" or value not in (None, [], {})}
    return returned.score if len(content) == 1 and returned.score is not None else content


def unpack(message: object) -> Returned:
    """Return what `pack` packed.

    Raises:
        ValueError: the message is something else.
    """
    content = message if isinstance(message, dict) else {"score": message}
    try:
        found = Returned(**content)
        pairs = [
            [(int(place), float(reward)) for place, reward in part]
            for part in (found.token_rewards, found.step_rewards)
        ]
        extras = {str(name): value for name, value in found.extras.items() if isinstance(value, float | str)}
        filter_score = None if found.filter_score is None else float(found.filter_score)
        score = None if found.score is None else float(found.score)
        numbers_found = [score or 0.0, filter_score or 0.0, *(reward for part in pairs for _, reward in part)]
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError("no result") from error
    if isinstance(message, str) or not all(map(math.isfinite, numbers_found)):
        raise ValueError("no result")
    return Returned(
        score=score, token_rewards=pairs[0], step_rewards=pairs[1], filter_score=filter_score, extras=extras
    )


def score_of(value: object) -> float:
    """Return what a reward function returned as a finite float64.

    A number is a bool (True is 1), int, float, Fraction or Decimal, or an array or tensor of NumPy or torch with one
    real element. An int beyond 2**53, a Fraction and a Decimal are rounded to float64.

    Raises:
        ValueError: the value is not a number, or not finite as float64; None, text and lists are no numbers.
    """
    try:
        number = value.item() if hasattr(value, "item") else value
    except Exception as error:  # an array with several elements, for example
        raise ValueError(f"returned {_shown(value)}, not a number") from error
    if not isinstance(number, numbers.Real | Decimal):
        raise ValueError(f"returned {_shown(value)}, not a number")
    try:
        score = float(number)
    except (OverflowError, ValueError):  # an integer above 1.8e308, or a signalling NaN of Decimal
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"returned {_shown(value)}, which is not finite as float64")
    return score


def read_response(
    value: object, *, num_tokens: int, num_characters: int, score_keys: Sequence[str], may_abstain: bool
) -> Returned:
    """Return what a function returned for one response.

    It is a number; a list, or an array or tensor of one dimension, with one reward per sampled token; or a dictionary
    with the score, `token_rewards` (one per sampled token), `step_rewards` (pairs of the number of characters up to the
    end of a step, and its reward), and further values.

    Args:
        num_tokens, num_characters: of the response.
        score_keys: keys of a dictionary under which the first one found holds the score.
        may_abstain: whether None says that the function does not apply.
    Raises:
        ValueError: it is none of them, a number is not finite, or there are more or fewer rewards than tokens.
    """
    if isinstance(value, Mapping):
        return _read_dictionary(value, num_tokens, num_characters, score_keys, may_abstain)
    if value is None and may_abstain:
        return Returned(score=None)
    if _is_list(value) and not _is_one_number(value):
        paid = _read_tokens(value, num_tokens)
        return Returned(score=math.fsum(reward for _, reward in paid), token_rewards=paid)
    return Returned(score=score_of(value))


def split_batch(value: object, num_responses: int) -> list[Any]:
    """Return what a function returned for several responses, one entry for each.

    It is a list, array or tensor with one entry per response, or a dictionary of such lists, whose other values hold
    for every response.

    Raises:
        ValueError: it is neither, or has more or fewer entries than responses.
    """
    if not isinstance(value, Mapping):
        return _entries(value, num_responses)
    columns: dict[Any, list[Any]] = {}
    for key, content in value.items():
        if isinstance(content, Mapping):
            columns[key] = split_batch(content, num_responses)
        elif _is_list(content) and len(content) == num_responses:
            columns[key] = list(content)
        else:
            columns[key] = [content] * num_responses
    return [{key: column[row] for key, column in columns.items()} for row in range(num_responses)]


def _entries(value: object, num_responses: int) -> list[Any]:
    if _is_list(value) and len(value) == num_responses:  # type: ignore[arg-type]
        return list(value)  # type: ignore[call-overload]
    if num_responses == 1 and not _is_list(value) and value is not None:
        return [value]
    found = f"{len(value)} values" if _is_list(value) else _shown(value)  # type: ignore[arg-type]
    raise ValueError(f"returned {found} for {num_responses} responses: return a list with one entry for each")


def _read_dictionary(
    value: Mapping[Any, Any], num_tokens: int, num_characters: int, score_keys: Sequence[str], may_abstain: bool
) -> Returned:
    rest = dict(value)
    key = next((key for key in score_keys if key in rest), None)
    given = rest.pop(key, None)
    paid = _read_tokens(rest.pop(TOKEN_KEY, None), num_tokens)
    steps = _read_steps(rest.pop(STEP_KEY, ()), num_characters)
    is_paid = TOKEN_KEY in value or STEP_KEY in value
    if key is None and not is_paid:
        raise ValueError(f"returned a dictionary without {' or '.join(map(repr, score_keys))}: {_shown(value)}")
    if given is None and key is not None and may_abstain and not is_paid:
        score = None
    else:
        final = 0.0 if key is None else score_of(given)
        score = math.fsum([final, *(reward for _, reward in [*paid, *steps])])
    filter_score = None
    if "rewards" in score_keys and FILTER_KEY in rest:
        filter_score = rest.pop(FILTER_KEY)
        filter_score = None if filter_score is None else score_of(filter_score)
    logs = rest.pop(LOGS_KEY, None) or {}
    extras = {**rest, **(logs if isinstance(logs, Mapping) else {LOGS_KEY: logs})}
    return Returned(
        score=score,
        token_rewards=paid,
        step_rewards=steps,
        filter_score=filter_score,
        extras={str(name): extra_value(found) for name, found in extras.items()},
    )


def _read_tokens(value: Any, num_tokens: int) -> list[tuple[int, float]]:
    """Return position and reward of each token whose reward is not 0."""
    if value is None:
        return []
    if not _is_list(value) or len(value) != num_tokens:
        found = f"{len(value)} rewards" if _is_list(value) else _shown(value)
        raise ValueError(f"returned {found} for a response of {num_tokens} tokens: return one reward per token")
    rewards = [score_of(reward) for reward in value]
    return [(position, reward) for position, reward in enumerate(rewards) if reward]


def _read_steps(value: Any, num_characters: int) -> list[tuple[int, float]]:
    """Return end and reward of each step."""
    found = []
    for step in value:
        if not _is_list(step) or len(step) != 2:
            raise ValueError(f"returned the step {_shown(step)}, not a pair of its end and its reward")
        end = score_of(step[0])
        if end != int(end) or not 0 < end <= num_characters:
            raise ValueError(f"returned a step that ends after {end:g} characters, of {num_characters} in the response")
        found.append((int(end), score_of(step[1])))
    return found


def extra_value(value: Any) -> float | str:
    """Return a further value as a finite number, or as text, which is shortened."""
    try:
        return score_of(value)
    except ValueError:
        text = value if isinstance(value, str) else _shown(value, MAX_TEXT)
        return text[:MAX_TEXT]


def _is_list(value: object) -> bool:
    """Return whether a value is a list, a tuple, or an array or tensor with at least one dimension."""
    if isinstance(value, list | tuple):
        return True
    return bool(getattr(value, "ndim", 0)) and hasattr(value, "__len__") and hasattr(value, "tolist")


def _is_one_number(value: Any) -> bool:
    """Return whether a value is an array or tensor with one element, of any number of dimensions."""
    return hasattr(value, "item") and not hasattr(value, "append") and math.prod(value.shape) == 1


def _shown(value: object, limit: int = 80) -> str:
    """Return the type of a value and, shortened, the value itself."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of more than 4300 digits, or a repr of the user's own
        return f"a value of type {type(value).__name__}"
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return text if value is None else f"{type(value).__name__} {text}"
