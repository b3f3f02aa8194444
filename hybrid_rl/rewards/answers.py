"""What the answers of reward services mean: scores, an error, or another attempt."""

import email.utils
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybrid_rl.config import ConfigError, check
from hybrid_rl.rewards.http_request import MAX_ANSWER_BYTES, Answer
from hybrid_rl.rewards.returned import FILTER_KEY, LOGS_KEY, Returned, extra_value, split_batch

if TYPE_CHECKING:
    from hybrid_rl.batch import Rollout

MAX_RETRY_AFTER_S = 300.0
"""Upper bound of the pause that a service asks for with the header Retry-After."""
TEMPORARY_STATUSES = (408, 425, 429)
"""Statuses 4xx after which the same request may succeed: timeout, too early, too many requests."""


def check_is_temporary(answer: Answer, part: Sequence["Rollout"], url: str) -> None:
    """Check that the request may succeed when it is sent again.

    Raises:
        ConfigError: the service redirects or refuses it.
    """
    status, target = answer.status, answer.hide(answer.headers.get("Location", "nowhere"))
    check(
        not 300 <= status < 400,
        f"reward.remote_urls: {url} redirects to {target} (status {status}): give the URL that answers, because "
        "redirects are not followed",
    )
    check(
        status >= 500 or status in TEMPORARY_STATUSES,
        f"reward.remote_urls: {url} refuses a request for {len(part)} responses, first {name_of(part[0])}, with status "
        f"{status}: {first_line(answer)}",
    )


def first_line(answer: Answer) -> str:
    """Return the first line of an answer's body, quoted and shortened."""
    lines = answer.text.strip().splitlines()
    return repr(lines[0][:200]) if lines else "an empty body"


def retry_after_s(answer: Answer) -> float:
    """Return how long a service asks to wait, from 0 to MAX_RETRY_AFTER_S; 0 if it does not ask."""
    value = answer.headers.get("Retry-After", "")
    try:
        if value.isdigit():
            pause_s = float(value)
        else:
            pause_s = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(pause_s, 0.0), MAX_RETRY_AFTER_S)


def read_scores(answer: Answer, part: Sequence["Rollout"], url: str) -> list[Returned]:
    """Return the scores in a service's answer to a request for `part`.

    Raises:
        ConfigError: the answer is not one finite number per response; names service, status and sample.
    """
    where = f"reward.remote_urls: {url}: status {answer.status}, first sample {name_of(part[0])}"
    check(not answer.is_cut, f"{where}: the answer has more than {MAX_ANSWER_BYTES} bytes: {first_line(answer)}")
    try:
        content = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: the answer is not JSON: {first_line(answer)}") from error
    content = content if isinstance(content, dict) else {"": content}
    scores = content.get(FILTER_KEY)
    rewards = content.get("rewards", scores)
    if not isinstance(rewards, list):
        shown = _shown(content.get("", content), answer)
        raise ConfigError(f"{where}: the answer has no list under 'rewards' or 'scores': {shown}")
    check(len(rewards) == len(part), f"{where}: {len(rewards)} rewards for {len(part)} responses")
    _check_numbers(rewards, "reward", answer, part, url)
    filtered: Sequence[Any] = [None] * len(part)
    if isinstance(scores, list) and scores is not rewards:
        check(len(scores) == len(part), f"{where}: {len(scores)} scores for {len(part)} responses")
        _check_numbers(scores, "score", answer, part, url)
        filtered = scores
    logs = content.get(LOGS_KEY)
    extras = split_batch(logs if isinstance(logs, dict) else {}, len(part))
    return [
        Returned(
            score=float(reward),
            filter_score=None if score is None else float(score),
            extras={name: extra_value(answer.hide(v) if isinstance(v, str) else v) for name, v in extra.items()},
        )
        for reward, score, extra in zip(rewards, filtered, extras, strict=True)
    ]


def _check_numbers(values: Sequence[Any], what: str, answer: Answer, part: Sequence["Rollout"], url: str) -> None:
    for value, rollout in zip(values, part, strict=True):
        shown = "" if _is_finite_number(value) else _shown(value, answer)
        check(
            not shown,
            f"reward.remote_urls: {url}: the {what} of {name_of(rollout)} is {shown}: must be a finite number",
        )


def _is_finite_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def name_of(rollout: "Rollout") -> str:
    """Return what a message calls a response."""
    return f"prompt_id {rollout.prompt.prompt_id}, sequence_id {rollout.sequence_id}"


def _shown(value: object, answer: Answer) -> str:
    text = answer.hide(repr(value))
    return text if len(text) <= 200 else f"{text[:200]}..."
