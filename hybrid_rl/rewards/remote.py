"""Scores from HTTP services that implement the protocol of OpenRLHF's remote reward models.

A request is a POST of `{"query": [prompt + response], "prompts": [...], "responses": [...], "labels": [answer, null]}`.
Text that the chat template writes in the model's name, such as `<think>`, begins the response and does not end the
prompt. Its answer is `{"rewards": [number per response]}`, or `{"scores": [number per response]}`.
"""

import email.utils
import logging
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import requests

from hybrid_rl.config import ConfigError, Findings, check

if TYPE_CHECKING:
    from hybrid_rl.batch import Rollout

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 30.0
"""Upper bound of the pause between two attempts, which doubles with each attempt."""
MAX_RETRY_AFTER_S = 300.0
"""Upper bound of the pause that a service asks for with the header Retry-After."""
TEMPORARY_STATUSES = (408, 425, 429)
"""Statuses 4xx after which the same request may succeed: timeout, too early, too many requests."""


class RemoteScorer:
    """Scores responses with equivalent HTTP services, over which each batch is divided."""

    def __init__(self, urls: Sequence[str], *, timeout_s: float, retries: int, pause_s: float = 0.5) -> None:
        """Check the settings; no request is sent yet.

        Args:
            urls: of the services.
            timeout_s: time limit of a request to connect, and between two parts of its answer.
            retries: further attempts for a failed request, each at the next service.
            pause_s: pause before the first retry, which doubles with each retry.
        Raises:
            ConfigError: there are no URLs, one cannot be used, or a setting is out of range.
        """
        check(bool(urls), "reward.remote_urls is empty: list at least one URL")
        findings = Findings()
        for url in urls:
            findings.run(lambda url=url: check_url(url))  # type: ignore[misc]
        findings.raise_any()
        check(timeout_s > 0, f"reward.remote_timeout_s = {timeout_s}: must be greater than 0")
        check(retries >= 0, f"reward.remote_retries = {retries}: must be at least 0")
        self._urls, self._timeout_s, self._retries, self._pause_s = list(urls), timeout_s, retries, pause_s
        self._not_before: dict[str, float] = {}  # URL -> time (time.monotonic) until which it asked not to be called

    def score(self, rollouts: Sequence["Rollout"]) -> list[float]:
        """Return the scores of B responses, [B].

        Raises:
            ConfigError: all attempts of a request failed, a service refused it, or an answer is not one finite number
                per response; the message names service, status and sample.
        """
        size = max(1, math.ceil(len(rollouts) / len(self._urls)))
        parts = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        with ThreadPoolExecutor(max_workers=len(self._urls)) as threads:
            scored = list(threads.map(self._score_part, parts, range(len(parts))))
        return [score for scores in scored for score in scores]

    def _score_part(self, part: Sequence["Rollout"], first_url: int) -> list[float]:
        """Return the scores of one request, which is sent to one service after the other until one answers."""
        body = {
            "query": [r.full_text for r in part],
            "prompts": [r.prompt.text_without_prefill for r in part],
            "responses": [r.text for r in part],
            "labels": [r.prompt.answer for r in part],
        }
        failures = []
        for attempt in range(self._retries + 1):
            url = self._urls[(first_url + attempt) % len(self._urls)]
            self._wait(url, attempt)
            try:
                # A redirected POST would become a GET without a body.
                response = requests.post(url, json=body, timeout=self._timeout_s, allow_redirects=False)
            except requests.RequestException as error:
                failures.append(f"{url}: {type(error).__name__}: {' '.join(str(error).split())}")
            else:
                if 200 <= response.status_code < 300:
                    return _read_scores(response, part, url)
                _check_is_temporary(response, part, url)
                failures.append(f"{url}: status {response.status_code}: {_first_line(response)}")
                self._not_before[url] = time.monotonic() + _retry_after_s(response)
            logger.warning("attempt %d of %d for a remote reward: %s", attempt + 1, self._retries + 1, failures[-1])
        raise ConfigError(
            f"reward.remote_urls: no remote reward for {len(part)} responses, first {_name(part[0])}, "
            f"after {len(failures)} attempts: {'; '.join(failures)}"
        )

    def _wait(self, url: str, attempt: int) -> None:
        """Wait before an attempt (0 is the first), also as long as the service has asked for."""
        pause_s = min(self._pause_s * 2 ** min(attempt - 1, 30), MAX_PAUSE_S) if attempt else 0.0
        time.sleep(max(pause_s, self._not_before.get(url, 0.0) - time.monotonic()))


def check_url(url: str) -> None:
    """Check the URL of a service, without a request.

    Raises:
        ConfigError: it is no URL of http or https with a host, or holds a user name or password.
    """
    field = "reward.remote_urls"
    try:
        parts = urlsplit(url)
        has_host, has_user, _ = bool(parts.hostname), "@" in parts.netloc, parts.port
    except ValueError as error:
        raise ConfigError(f"{field}: {url!r} is no URL: {error}") from error
    check(
        not has_user,
        f"{field}: the URL of host {parts.hostname} holds a user name or password, which config.yaml and messages "
        "would show: leave it out, and put it into ~/.netrc, from which it is read",
    )
    check(parts.scheme in ("http", "https"), f"{field}: {url!r} must start with http:// or https://")
    check(has_host, f"{field}: {url!r} names no host")
    check(not any(c.isspace() for c in url), f"{field}: {url!r} contains white space")
    try:
        requests.Request("POST", url).prepare()
    except requests.RequestException as error:
        raise ConfigError(f"{field}: {url!r} is no URL: {error}") from error


def _check_is_temporary(response: requests.Response, part: Sequence["Rollout"], url: str) -> None:
    """Check that the request may succeed when it is sent again."""
    status = response.status_code
    check(
        not 300 <= status < 400,
        f"reward.remote_urls: {url} redirects to {response.headers.get('Location', 'nowhere')} (status {status}): give "
        "the URL that answers, because redirects are not followed",
    )
    check(
        status >= 500 or status in TEMPORARY_STATUSES,
        f"reward.remote_urls: {url} refuses a request for {len(part)} responses, first {_name(part[0])}, with status "
        f"{status}: {_first_line(response)}",
    )


def _first_line(response: requests.Response) -> str:
    """Return the first line of a response's body, quoted and shortened."""
    lines = response.text.strip().splitlines()
    return repr(lines[0][:200]) if lines else "an empty body"


def _retry_after_s(response: requests.Response) -> float:
    """Return how long a service asks to wait, from 0 to MAX_RETRY_AFTER_S; 0 if it does not ask."""
    value = response.headers.get("Retry-After", "")
    try:
        if value.isdigit():
            pause_s = float(value)
        else:
            pause_s = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(pause_s, 0.0), MAX_RETRY_AFTER_S)


def _read_scores(response: requests.Response, part: Sequence["Rollout"], url: str) -> list[float]:
    """Return the scores in a service's answer to a request for `part`."""
    where = f"reward.remote_urls: {url}: status {response.status_code}, first sample {_name(part[0])}"
    try:
        answer = response.json()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: the answer is not JSON: {_first_line(response)}") from error
    rewards = answer.get("rewards", answer.get("scores")) if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise ConfigError(f"{where}: the answer has no list under 'rewards' or 'scores': {_shown(answer)}")
    check(len(rewards) == len(part), f"{where}: {len(rewards)} rewards for {len(part)} responses")
    for reward, rollout in zip(rewards, part, strict=True):
        check(
            _is_finite_number(reward),
            f"reward.remote_urls: {url}: the reward of {_name(rollout)} is {_shown(reward)}: must be a finite number",
        )
    return [float(reward) for reward in rewards]


def _is_finite_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _name(rollout: "Rollout") -> str:
    return f"prompt_id {rollout.prompt.prompt_id}, sequence_id {rollout.sequence_id}"
