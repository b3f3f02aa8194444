"""Scores from HTTP services that implement the protocol of OpenRLHF's remote reward models.

A request is a POST of `{"query": [prompt + response], "prompts": [...], "responses": [...], "labels": [answer, null]}`.
Its answer is `{"rewards": [number per response]}`, or `{"scores": [number per response]}`.
"""

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import requests

from hybrid_rl.config import check

if TYPE_CHECKING:
    from hybrid_rl.batch import Rollout

MAX_PAUSE_S = 30.0
"""Upper bound of the pause between two attempts, which doubles with each attempt."""


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
            ConfigError: there are no URLs, or a setting is out of range.
        """
        check(bool(urls), "reward.remote_urls is empty: list at least one URL")
        for url in urls:
            check(url.startswith(("http://", "https://")), f"reward.remote_urls: '{url}' must start with http(s)://")
        check(timeout_s > 0, f"reward.remote_timeout_s = {timeout_s}: must be greater than 0")
        check(retries >= 0, f"reward.remote_retries = {retries}: must be at least 0")
        self._urls, self._timeout_s, self._retries, self._pause_s = list(urls), timeout_s, retries, pause_s

    def score(self, rollouts: Sequence["Rollout"]) -> list[float]:
        """Return the scores of B responses, [B].

        Raises:
            RuntimeError: all attempts of a request failed, or an answer is not one finite number per response; the
                message names service, status and sample.
        """
        size = max(1, math.ceil(len(rollouts) / len(self._urls)))
        parts = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        with ThreadPoolExecutor(max_workers=len(self._urls)) as threads:
            scored = list(threads.map(self._score_part, parts, range(len(parts))))
        return [score for scores in scored for score in scores]

    def _score_part(self, part: Sequence["Rollout"], first_url: int) -> list[float]:
        """Return the scores of one request, which is sent to one service after the other until one answers."""
        body = {
            "query": [r.prompt.text + r.text for r in part],
            "prompts": [r.prompt.text for r in part],
            "responses": [r.text for r in part],
            "labels": [r.prompt.answer for r in part],
        }
        failures = []
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(min(self._pause_s * 2 ** (attempt - 1), MAX_PAUSE_S))
            url = self._urls[(first_url + attempt) % len(self._urls)]
            try:
                response = requests.post(url, json=body, timeout=self._timeout_s)
            except requests.RequestException as error:
                failures.append(f"{url}: {type(error).__name__}: {error}")
                continue
            if response.ok:
                return _read_scores(response, part, url)
            failures.append(f"{url}: status {response.status_code}: {response.text[:200]!r}")
        raise RuntimeError(
            f"no remote reward for {len(part)} responses, first {_name(part[0])}, "
            f"after {len(failures)} attempts: {'; '.join(failures)}"
        )


def _read_scores(response: Any, part: Sequence["Rollout"], url: str) -> list[float]:
    """Return the scores in a service's answer to a request for `part`."""
    where = f"{url}: status {response.status_code}, first sample {_name(part[0])}"
    try:
        answer = response.json()
    except requests.JSONDecodeError as error:
        raise RuntimeError(f"{where}: the answer is not JSON: {response.text[:200]!r}") from error
    rewards = answer.get("rewards", answer.get("scores")) if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise RuntimeError(f"{where}: the answer has no list under 'rewards' or 'scores': {str(answer)[:200]!r}")
    if len(rewards) != len(part):
        raise RuntimeError(f"{where}: {len(rewards)} rewards for {len(part)} responses")
    for reward, rollout in zip(rewards, part, strict=True):
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RuntimeError(f"{url}: the reward of {_name(rollout)} is {reward!r}: must be a finite number")
    return [float(reward) for reward in rewards]


def _name(rollout: "Rollout") -> str:
    return f"prompt_id {rollout.prompt.prompt_id}, sequence_id {rollout.sequence_id}"
