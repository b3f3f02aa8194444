"""Scores from HTTP services that implement the protocol of OpenRLHF's remote reward models.

A request is a POST of `{"query": [prompt + response], "prompts": [...], "responses": [...], "labels": [answer, null]}`.
Text that the chat template writes in the model's name, such as `<think>`, begins the response and does not end the
prompt. Its answer is `{"rewards": [number per response]}`, or `{"scores": [number per response]}`. With both keys, the
scores decide which groups dynamic filtering keeps. `extra_logs`, a dictionary of numbers or lists of them, is logged.
"""

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hybrid_rl.config import ConfigError, Findings, check
from hybrid_rl.errors import RewardLostError
from hybrid_rl.rewards.answers import check_is_temporary, first_line, name_of, read_scores, retry_after_s
from hybrid_rl.rewards.headers import SecretHeaders
from hybrid_rl.rewards.http_request import Answer, NoAnswerError, open_session, post, run_coroutine
from hybrid_rl.rewards.returned import Returned

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from hybrid_rl.batch import Rollout

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 30.0
"""Upper bound of the pause between two attempts, which doubles with each attempt."""


class RemoteScorer:
    """Scores responses with equivalent HTTP services, over which each batch is divided."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float,
        retries: int,
        stall_timeout_s: float,
        headers: Mapping[str, object] | None = None,
        pause_s: float = 0.5,
    ) -> None:
        """Check the settings; no request is sent yet.

        Args:
            urls: of the services.
            timeout_s: time limit of a request, until the last byte of its answer.
            retries: further attempts for a failed request, each at the next service.
            stall_timeout_s: time limit of all attempts of a request together, with the pauses between them.
            headers: reward.remote_headers; name -> text with names of environment variables.
            pause_s: pause before the first retry, which doubles with each retry.
        Raises:
            ConfigError: there are no URLs, one cannot be used, or a setting is out of range.
        """
        check(bool(urls), "reward.remote_urls is empty: list at least one URL")
        findings = Findings()
        for url in urls:
            findings.run(lambda url=url: check_url(url))  # type: ignore[misc]
        found = findings.run(lambda: SecretHeaders(headers or {}, os.environ))
        findings.raise_any()
        assert found is not None
        check(timeout_s > 0, f"reward.remote_timeout_s = {timeout_s}: must be greater than 0")
        check(retries >= 0, f"reward.remote_retries = {retries}: must be at least 0")
        self._urls, self._timeout_s, self._retries, self._pause_s = list(urls), timeout_s, retries, pause_s
        self._stall_timeout_s, self._headers = stall_timeout_s, found
        self._not_before: dict[str, float] = {}  # URL -> time (time.monotonic) until which it asked not to be called

    def score(self, rollouts: Sequence["Rollout"]) -> list[Returned]:
        """Return the scores of B responses, and what the services give besides.

        Raises:
            RewardLostError: all attempts of a request failed, or took longer than stall_timeout_s.
            ConfigError: a service refused a request, or an answer is not one finite number per response; the message
                names service, status and sample.
        """
        size = max(1, math.ceil(len(rollouts) / len(self._urls)))
        parts = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        scored = run_coroutine(self._score_parts(parts)) if parts else []
        return [score for scores in scored for score in scores]

    async def _score_parts(self, parts: Sequence[Sequence["Rollout"]]) -> list[list[Returned]]:
        """Return the scores of all requests, which are sent at the same time; the first error ends the others."""
        async with open_session(self._headers.values) as session:
            tasks = [asyncio.create_task(self._score_part(session, part, n)) for n, part in enumerate(parts)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _score_part(self, session: "ClientSession", part: Sequence["Rollout"], first_url: int) -> list[Returned]:
        """Return the scores of one request, which is sent to one service after the other until one answers."""
        body = _body(part)
        start = time.monotonic()
        deadline = start + self._stall_timeout_s
        failures: list[str] = []
        for attempt in range(self._retries + 1):
            url = self._urls[(first_url + attempt) % len(self._urls)]
            pause_s = self._pause(url, attempt)
            if time.monotonic() + pause_s >= deadline:
                failures.append(f"{url}: the next attempt would be later than run.stall_timeout_s")
                break
            await asyncio.sleep(pause_s)
            answer = await self._try(session, url, body, part, deadline)
            if isinstance(answer, Answer):
                return read_scores(answer, part, url)
            failures.append(answer)
            logger.warning("attempt %d of %d for a remote reward: %s", attempt + 1, self._retries + 1, answer)
        raise RewardLostError(
            f"reward.remote_urls: no remote reward for {len(part)} responses, first {name_of(part[0])}, "
            f"in {time.monotonic() - start:.0f} s: {'; '.join(failures)}"
        )

    async def _try(
        self, session: "ClientSession", url: str, body: bytes, part: Sequence["Rollout"], deadline: float
    ) -> Answer | str:
        """Return the answer of a service, or what was wrong with it if another attempt may succeed."""
        left_s = deadline - time.monotonic()
        try:
            answer = await post(session, url, body, timeout_s=min(self._timeout_s, left_s), hide=self._headers.hide)
        except TimeoutError:
            setting, limit_s = ("reward.remote_timeout_s", self._timeout_s)
            if left_s < limit_s:
                setting, limit_s = ("run.stall_timeout_s", self._stall_timeout_s)
            return f"{url}: no whole answer within {setting} = {limit_s:g} s"
        except NoAnswerError as error:
            return f"{url}: {error}"
        if 200 <= answer.status < 300:
            return answer
        check_is_temporary(answer, part, url)
        self._not_before[url] = time.monotonic() + retry_after_s(answer)
        return f"{url}: status {answer.status}: {first_line(answer)}"

    def _pause(self, url: str, attempt: int) -> float:
        """Return the seconds before an attempt (0 is the first), as long as the service has asked for."""
        pause_s = min(self._pause_s * 2 ** min(attempt - 1, 30), MAX_PAUSE_S) if attempt else 0.0
        return max(pause_s, self._not_before.get(url, 0.0) - time.monotonic())


def _body(part: Sequence["Rollout"]) -> bytes:
    content = {
        "query": [r.full_text for r in part],
        "prompts": [r.prompt.text_without_prefill for r in part],
        "responses": [r.text for r in part],
        "labels": [r.prompt.answer for r in part],
    }
    return json.dumps(content).encode()


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
        if "@" in url:  # the error, too, may quote a part of a password
            raise ConfigError(f"{field}: a URL with a user name or password is no URL: give it without them") from error
        raise ConfigError(f"{field}: {url!r} is no URL: {error}") from error
    check(
        not has_user,
        f"{field}: the URL of host {parts.hostname} holds a user name or password, which config.yaml and messages "
        "would show: put it into ~/.netrc, from which it is read, or name an environment variable in "
        "reward.remote_headers",
    )
    check(parts.scheme in ("http", "https"), f"{field}: {url!r} must start with http:// or https://")
    check(has_host, f"{field}: {url!r} names no host")
    check(not any(c.isspace() for c in url), f"{field}: {url!r} contains white space")
