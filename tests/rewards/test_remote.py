"""Remote scores, requested from real HTTP servers in this process."""

import contextlib
import email.utils
import gzip
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from hybrid_rl.config import ConfigError, RewardConfig
from hybrid_rl.errors import RewardLostError
from hybrid_rl.rewards import RemoteScorer, ScorerPool
from hybrid_rl.rewards.answers import retry_after_s
from hybrid_rl.rewards.http_request import MAX_ANSWER_BYTES, Answer
from hybrid_rl.rewards.scoring import RewardSources, score_responses
from tests.conftest import make_rollout
from tests.programs import PATHS


class Service:
    """A server whose answer to each request is `reply(body)`: a status, a text and, optionally, headers."""

    def __init__(self, reply):
        self.bodies, self.headers, self.others = [], [], []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.bodies.append(body)
                service.headers.append(dict(self.headers))
                status, text, *headers = reply(body)
                try:
                    self.send_response(status)
                    for name, value in headers[0].items() if headers else ():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(text.encode("latin-1"))
                except BrokenPipeError:
                    pass  # the client has timed out

            def do_GET(self):
                service.others.append("GET")
                self.send_error(405)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve():
    """Return a function that starts a service, which ends with the test."""
    services = []

    def start(reply):
        services.append(Service(reply))
        return services[-1]

    yield start
    for service in services:
        service.close()


def lengths(body, key="rewards"):
    return 200, json.dumps({key: [len(text) for text in body["responses"]]})


def make_rollouts(texts):
    """Return a response with each text; prompt 1 has no answer, the others have their number."""
    return [
        make_rollout(
            prompt_id=n,
            sequence_id=10 + n,
            text=text,
            prompt_text=f"{n}+0=",
            answer=None if n == 1 else str(n),
        )
        for n, text in enumerate(texts)
    ]


ROLLOUTS = make_rollouts(["a", "bb", "ccc", "dddd", "eeeee"])


def make_scorer(urls, **settings):
    return RemoteScorer(urls, **{"timeout_s": 60, "retries": 0, "stall_timeout_s": 120, "pause_s": 0.01, **settings})


def score(urls, rollouts=ROLLOUTS, **settings):
    return [found.score for found in make_scorer(urls, **settings).score(rollouts)]


@pytest.mark.parametrize("key", ["rewards", "scores"])
def test_scores_keep_the_order_and_requests_hold_prompts_responses_and_answers(serve, key):
    service = serve(lambda body: lengths(body, key))
    assert score([service.url]) == [1, 2, 3, 4, 5]
    assert service.bodies == [
        {
            "query": ["0+0=a", "1+0=bb", "2+0=ccc", "3+0=dddd", "4+0=eeeee"],
            "prompts": ["0+0=", "1+0=", "2+0=", "3+0=", "4+0="],
            "responses": ["a", "bb", "ccc", "dddd", "eeeee"],
            "labels": ["0", None, "2", "3", "4"],
        }
    ]
    assert score([service.url], []) == [] and len(service.bodies) == 1


def test_a_prefill_belongs_to_the_response_and_not_to_the_prompt(serve):
    service = serve(lengths)
    rollout = make_rollout(prompt_text="2+2=<think>", prefill="<think>", text="<think>4</think>4")
    assert score([service.url], [rollout]) == [17]
    (body,) = service.bodies
    assert (body["prompts"], body["responses"]) == (["2+2="], ["<think>4</think>4"])
    assert body["query"] == [p + r for p, r in zip(body["prompts"], body["responses"], strict=True)]


def test_a_batch_is_spread_over_the_services_at_the_same_time(serve):
    meeting = threading.Barrier(2, timeout=60)  # each answers only when both have a request

    def reply(body):
        meeting.wait()
        return lengths(body)

    first, second = serve(reply), serve(reply)
    assert score([first.url, second.url]) == [1, 2, 3, 4, 5]
    assert [body["responses"] for body in first.bodies] == [["a", "bb", "ccc"]]
    assert [body["responses"] for body in second.bodies] == [["dddd", "eeeee"]]


def test_more_services_than_responses(serve):
    services = [serve(lengths) for _ in range(3)]
    assert score([service.url for service in services], ROLLOUTS[:2]) == [1, 2]
    assert [len(service.bodies) for service in services] == [1, 1, 0]


def test_a_request_to_a_service_that_is_down_goes_to_the_next_one(serve):
    service, held = serve(lengths), socket.socket()
    held.bind(("127.0.0.1", 0))  # bound, so that no other process listens on this port
    down = f"http://127.0.0.1:{held.getsockname()[1]}/get_reward"
    for urls in ([down, service.url], [service.url, down]):
        assert score(urls, retries=1) == [1, 2, 3, 4, 5]
    with pytest.raises(RewardLostError) as caught:
        score([down, service.url], retries=0)
    message = str(caught.value)
    assert "no remote reward for 3 responses, first prompt_id 0, sequence_id 10, in 0 s" in message
    assert f"{down}: ClientConnectorError" in message
    held.close()


def test_retries_follow_after_pauses_that_double(serve):
    times = []

    def reply(body):
        times.append(time.monotonic())
        return lengths(body) if len(times) == 4 else (503, "busy")

    scorer = make_scorer([serve(reply).url], retries=3, pause_s=0.1)
    assert [found.score for found in scorer.score(ROLLOUTS)] == [1, 2, 3, 4, 5]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(pause >= at_least for pause, at_least in zip(pauses, (0.1, 0.2, 0.4), strict=True))


def test_a_failed_request_names_service_status_and_sample(serve):
    service = serve(lambda _: (500, "no GPU"))
    with pytest.raises(RewardLostError) as caught:
        score([service.url], ROLLOUTS[3:], retries=2)
    assert str(caught.value).count(f"{service.url}: status 500: 'no GPU'") == 3 == len(service.bodies)
    assert "first prompt_id 3, sequence_id 13, in 0 s: " in str(caught.value)


def test_a_silent_service_times_out_and_the_next_one_answers(serve):
    over = threading.Event()

    def silent(body):
        over.wait(60)
        return lengths(body)

    slow, service = serve(silent), serve(lengths)
    start = time.monotonic()
    assert score([slow.url, service.url], ROLLOUTS[:1], timeout_s=1, retries=1) == [1]
    with pytest.raises(RewardLostError, match=r"no whole answer within reward\.remote_timeout_s = 1 s"):
        score([slow.url], timeout_s=1)
    assert time.monotonic() - start < 50
    over.set()


def test_scores_beside_rewards_are_for_the_filter_and_extra_logs_are_kept(serve):
    def reply(body):
        logs = {"length": [len(text) for text in body["responses"]], "judge": "a"}
        return 200, json.dumps({"rewards": [3] * 5, "scores": [0, 1, 0, 1, 0.5], "extra_logs": logs})

    found = make_scorer([serve(reply).url]).score(ROLLOUTS)
    assert [one.score for one in found] == [3] * 5 and [one.filter_score for one in found] == [0, 1, 0, 1, 0.5]
    assert [one.extras for one in found] == [{"length": n, "judge": "a"} for n in range(1, 6)]


@pytest.mark.parametrize(
    "text, message",
    [
        (
            '{"rewards": [1, 2, 3, 4]}',
            "status 200, first sample prompt_id 0, sequence_id 10: 4 rewards for 5 responses",
        ),
        ('{"rewards": [1, 2, NaN, 4, 5]}', "the reward of prompt_id 2, sequence_id 12 is nan: must be a finite number"),
        ('{"rewards": [1, 2, 3, 4, Infinity]}', "prompt_id 4, sequence_id 14 is inf"),
        ('{"rewards": [1, null, 3, 4, 5]}', "prompt_id 1, sequence_id 11 is None"),
        ('{"rewards": [1, 2, 3, true, 5]}', "prompt_id 3, sequence_id 13 is True"),
        ('{"rewards": ["1", 2, 3, 4, 5]}', "prompt_id 0, sequence_id 10 is '1'"),
        ('{"rewards": 1}', "no list under 'rewards' or 'scores'"),
        ('{"reward": [1, 2, 3, 4, 5]}', "no list under 'rewards' or 'scores'"),
        ("[1, 2, 3, 4, 5]", "no list under 'rewards' or 'scores'"),
        ("fine", "the answer is not JSON: 'fine'"),
        ("<html>\nError", "the answer is not JSON: '<html>'"),
        ("", "the answer is not JSON: an empty body"),
        ("[" * 100_000, "the answer is not JSON: '[[["),
        ("{}", "no list under 'rewards' or 'scores': {}"),
        ('{"rewards": null, "scores": [1, 2, 3, 4, 5]}', "no list under 'rewards' or 'scores'"),
        ('{"rewards": []}', "0 rewards for 5 responses"),
        ('{"rewards": [1, 2, 3, 4, 5], "scores": [1]}', "1 scores for 5 responses"),
        (
            '{"rewards": [1, 2, 3, 4, 5], "scores": [1, 2, 3, 4, "5"]}',
            "the score of prompt_id 4, sequence_id 14 is '5'",
        ),
        ('{"rewards": [1, 2, 3, 4, 5, 6]}', "6 rewards for 5 responses"),
        ('{"rewards": [[1], [2], [3], [4], [5]]}', "prompt_id 0, sequence_id 10 is [1]: must be a finite number"),
        ('{"rewards": [1, 2, {"score": 3}, 4, 5]}', "prompt_id 2, sequence_id 12 is {'score': 3}"),
        ('{"rewards": [1, 2, 3, -1e999, 5]}', "prompt_id 3, sequence_id 13 is -inf"),
        (f'{{"rewards": [1, 1{"0" * 400}, 3, 4, 5]}}', "prompt_id 1, sequence_id 11 is 1000"),
    ],
)
def test_a_malformed_answer_is_an_error_without_a_retry(serve, text, message):
    service = serve(lambda _: (200, text))
    with pytest.raises(ConfigError) as caught:
        score([service.url], retries=3)
    assert message in str(caught.value) and str(caught.value).startswith(f"reward.remote_urls: {service.url}")
    assert len(service.bodies) == 1 and "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 422, 451])
def test_a_request_that_a_service_refuses_is_not_sent_again(serve, status):
    refusing, other = serve(lambda _: (status, "labels must be text\nmore\n")), serve(lengths)
    with pytest.raises(ConfigError) as caught:
        score([refusing.url, other.url], ROLLOUTS[:1], retries=3)
    assert str(caught.value) == (
        f"reward.remote_urls: {refusing.url} refuses a request for 1 responses, first prompt_id 0, sequence_id 10, "
        f"with status {status}: 'labels must be text'"
    )
    assert (len(refusing.bodies), len(other.bodies)) == (1, 0)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503])
def test_a_request_that_may_succeed_later_is_sent_again(serve, status):
    answers = iter([(status, "later")])
    service = serve(lambda body: next(answers, None) or lengths(body))
    assert score([service.url], retries=1) == [1, 2, 3, 4, 5] and len(service.bodies) == 2


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_with_its_target(serve, status):
    target = serve(lengths)
    service = serve(lambda _: (status, "", {"Location": target.url}))
    with pytest.raises(ConfigError) as caught:
        score([service.url], retries=3)
    assert f"{service.url} redirects to {target.url} (status {status}): give the URL that answers" in str(caught.value)
    assert (len(service.bodies), target.bodies, target.others) == (1, [], [])


def http_date(seconds_ahead):
    return email.utils.formatdate(time.time() + seconds_ahead, usegmt=True)


def test_a_service_is_not_called_again_before_it_asks_for(serve, monkeypatch):
    """Only this service waits: the next one is called after the ordinary pause."""
    times = []

    def busy(body):
        times.append(time.monotonic())
        return lengths(body) if len(times) > 1 else (429, "", {"Retry-After": "1"})

    first, second = serve(busy), serve(lambda _: (503, "down"))
    assert score([first.url, second.url], ROLLOUTS[:1], retries=2) == [1]
    assert times[1] - times[0] >= 1 and len(second.bodies) == 1


@pytest.mark.parametrize(
    "header, low, high",
    [
        ({}, 0, 0),
        ({"Retry-After": "7"}, 7, 7),
        ({"Retry-After": "86400"}, 300, 300),
        ({"Retry-After": "-5"}, 0, 0),
        ({"Retry-After": "soon"}, 0, 0),
        ({"Retry-After": 200}, 100, 201),
        ({"Retry-After": -200}, 0, 0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header, low, high):
    headers = {k: http_date(v) if isinstance(v, int) else v for k, v in header.items()}
    answer = Answer(status=503, headers=headers, body=b"", is_cut=False, hide=str)
    assert low <= retry_after_s(answer) <= high


def test_answers_belong_to_their_responses_when_a_part_moves_to_another_service(serve):
    """The first service fails once, so that both parts are answered by the second, the first part later."""
    first, second = serve(lambda _: (500, "down")), serve(lengths)
    rollouts = make_rollouts(["x" * (n % 4) for n in range(7)])
    assert score([first.url, second.url], rollouts, retries=1) == [0, 1, 2, 3, 0, 1, 2]
    assert sorted(len(body["responses"]) for body in second.bodies) == [3, 4]


@pytest.mark.parametrize(
    "urls, settings, message",
    [
        ([], {}, "remote_urls is empty"),
        (["localhost:80"], {}, "remote_urls: 'localhost:80' must start with http:// or https://"),
        (["ftp://h/x"], {}, "'ftp://h/x' must start with http:// or https://"),
        ([""], {}, "'' must start with http:// or https://"),
        (["http://"], {}, "'http://' names no host"),
        (["http:///get_reward"], {}, "'http:///get_reward' names no host"),
        (["http://:80/x"], {}, "'http://:80/x' names no host"),
        (["http://h:99999/x"], {}, "'http://h:99999/x' is no URL: Port out of range"),
        (["http://h:x/"], {}, "'http://h:x/' is no URL: Port could not be cast"),
        (["http://[::1/x"], {}, "is no URL: Invalid IPv6 URL"),
        (["http://h/a b"], {}, "'http://h/a b' contains white space"),
        (["http://ok/", "ftp://a", "ftp://b"], {}, "'ftp://a' must .*\n.*'ftp://b' must"),
        (["http://h"], {"timeout_s": 0}, "remote_timeout_s = 0"),
        (["http://h"], {"retries": -1}, "remote_retries = -1"),
    ],
)
def test_settings_are_checked(urls, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_scorer(urls, **settings)


@pytest.mark.parametrize("url", ["http://me:secret@h/x", "https://secret@h", "//me:secret@h/"])
def test_a_password_in_a_url_is_refused_and_not_shown(url):
    with pytest.raises(
        ConfigError, match=r"the URL of host h holds a user name or password.*~/\.netrc, .*reward\.remote_headers"
    ) as caught:
        make_scorer([url])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://h", "HTTPS://h.example:443/a/b?c=d", "http://[::1]:80/x", "http://10.0.0.1/"])
def test_urls_of_services_are_accepted(url):
    make_scorer([url])


class RawService:
    """A server that sends, after a request of any kind, the parts that `parts()` yields."""

    def __init__(self, parts):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/get_reward"
        self.num_sent = 0
        threading.Thread(target=self._serve, args=(parts,), daemon=True).start()

    def _serve(self, parts):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection, parts), daemon=True).start()

    def _answer(self, connection, parts):
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            for part in parts():
                connection.sendall(part)
                self.num_sent += len(part)

    def close(self):
        self._listener.close()


def drip(first, then=b"1"):
    """Return a function that yields a first part, and a byte every 0.1 s."""

    def parts():
        yield first
        for _ in range(600):
            time.sleep(0.1)
            yield then

    return parts


HEAD = b"HTTP/1.1 200 OK\r\n"
DRIPS = {
    "the status": drip(b"HTTP/1.1 200 ", b"O"),
    "a header": drip(HEAD + b"X-Long: "),
    "a body without a length": drip(HEAD + b"\r\n{"),
    "a body with a length": drip(HEAD + b"Content-Length: 999\r\n\r\n{"),
    "the length of a chunk": drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
}
"""What a service sends byte by byte."""


@pytest.mark.parametrize("name", DRIPS)
def test_an_answer_that_drips_ends_with_the_time_limit_of_the_request(name):
    with contextlib.closing(RawService(DRIPS[name])) as service:
        start = time.monotonic()
        with pytest.raises(RewardLostError, match=r"no whole answer within reward\.remote_timeout_s = 1 s"):
            score([service.url], timeout_s=1)
        assert time.monotonic() - start < 10


def test_all_attempts_together_have_a_time_limit():
    with contextlib.closing(RawService(drip(HEAD))) as service:
        start = time.monotonic()
        with pytest.raises(RewardLostError) as caught:
            score([service.url], timeout_s=1, retries=1000, stall_timeout_s=2.5)
        assert time.monotonic() - start < 12
    assert "no whole answer within run.stall_timeout_s = 2.5 s" in str(caught.value)
    assert 1 <= str(caught.value).count("reward.remote_timeout_s = 1 s") <= 2


def test_a_service_that_asks_for_a_longer_pause_than_the_limit_is_lost(serve):
    service = serve(lambda _: (503, "", {"Retry-After": "100"}))
    with pytest.raises(RewardLostError, match=r"the next attempt would be later than run\.stall_timeout_s"):
        score([service.url], retries=3, stall_timeout_s=20)
    assert len(service.bodies) == 1


@pytest.mark.parametrize("head", [b"", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 3221225472\r\n"])
def test_an_answer_of_three_gigabytes_is_not_read(head):
    block = b"7" * (1 << 20)

    def parts():
        yield HEAD + head + b"\r\n"
        for _ in range(3 << 10):
            yield b"100000\r\n%s\r\n" % block if b"chunked" in head else block

    before, peak = psutil.Process().memory_info().rss, []
    with contextlib.closing(RawService(parts)) as service:
        with pytest.raises(ConfigError, match=f"the answer has more than {MAX_ANSWER_BYTES} bytes: '777"):
            score([service.url], retries=3)
        peak.append(psutil.Process().memory_info().rss)
        assert service.num_sent < 4 * MAX_ANSWER_BYTES and peak[0] - before < 8 * MAX_ANSWER_BYTES


def test_a_compressed_answer_is_not_unpacked(serve):
    service = serve(lambda _: (200, gzip.compress(b"7" * 10**7, 9).decode("latin-1"), {"Content-Encoding": "gzip"}))
    with pytest.raises(ConfigError, match="the answer is not JSON"):
        score([service.url])
    assert service.headers[0]["Accept-Encoding"] == "identity"


def test_a_wait_for_a_service_can_be_interrupted(tmp_path):
    """SIGINT ends the wait at once, though the service may take a minute."""
    with contextlib.closing(RawService(drip(HEAD))) as service:
        program = (
            "from types import SimpleNamespace\nfrom hybrid_rl.rewards import RemoteScorer\n"
            f"scorer = RemoteScorer(['{service.url}'], timeout_s=60, retries=3, stall_timeout_s=120)\n"
            "prompt = SimpleNamespace(prompt_id=0, answer='', text_without_prefill='')\n"
            "print('sends', flush=True)\n"
            "scorer.score([SimpleNamespace(prompt=prompt, sequence_id=0, text='', full_text='')])\n"
        )
        done = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **PATHS},
        )
        assert done.stdout.readline() == "sends\n"
        while not service.num_sent:
            time.sleep(0.01)
        done.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, errors = done.communicate(timeout=60)
    assert time.monotonic() - start < 15 and errors.strip().endswith("KeyboardInterrupt")


# Headers with secrets


def test_headers_are_read_from_the_environment(serve, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "s3cr3t")
    monkeypatch.setenv("TEAM", "rl")
    service = serve(lengths)
    headers = {"Authorization": "Bearer $REWARD_TOKEN", "X-Team": "${TEAM}/$$"}
    assert score([service.url], headers=headers) == [1, 2, 3, 4, 5]
    assert (service.headers[0]["Authorization"], service.headers[0]["X-Team"]) == ("Bearer s3cr3t", "rl/$")
    assert service.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    "status, text",
    [(401, "bad token {}"), (500, "{}"), (200, "{}"), (200, '{{"rewards": "{}"}}'), (302, ""), (200, "x" * 195 + "{}")],
)
def test_a_secret_that_a_service_repeats_is_not_shown(serve, monkeypatch, caplog, status, text):
    monkeypatch.setenv("REWARD_TOKEN", "s3cr3t-of-many-letters")
    secret = "s3cr3t-of-many-letters"
    service = serve(lambda _: (status, text.format(secret), {"Location": f"http://h/{secret}"}))
    with pytest.raises((ConfigError, RewardLostError)) as caught:
        score([service.url], headers={"Authorization": "Bearer $REWARD_TOKEN"})
    assert "s3cr3t" not in str(caught.value) and "s3cr3t" not in caplog.text and "***" in str(caught.value)


@pytest.mark.parametrize(
    "headers, message",
    [
        ({"Authorization": "Bearer s3cr3t"}, "the value of Authorization must name an environment variable"),
        ({"Authorization": "s3cr3t $"}, "the value of Authorization must name an environment variable"),
        ({"Authorization": 7}, "the value of Authorization must name an environment variable"),
        ({"Authorization": "$ABSENT"}, "Authorization needs the environment variable ABSENT, which is not set"),
        ({"Authorization": "$TWO_LINES"}, "the environment variable TWO_LINES holds a line end"),
        ({"a b": "$GOOD"}, "'a b' cannot be the name of a header"),
        ({"A": "$ABSENT", "B": "$GONE"}, "A needs .* ABSENT.*\n.*B needs .* GONE"),
    ],
)
def test_headers_are_checked_without_showing_a_value(monkeypatch, headers, message):
    monkeypatch.setenv("TWO_LINES", "s3cr3t\r\nX: s3cr3t")
    monkeypatch.setenv("GOOD", "s3cr3t")
    with pytest.raises(ConfigError, match=message) as caught:
        make_scorer(["http://h"], headers=headers)
    assert "s3cr3t" not in str(caught.value)


def test_a_remote_score_is_added_with_its_weight_to_the_functions(serve):
    service = serve(lengths)
    rollouts = make_rollouts(["a", "bbb"])
    remote = make_scorer([service.url])
    with ScorerPool(["exact_match"], [4.0], timeout_s=60, on_error="zero", num_workers=1) as functions:
        sources = RewardSources(functions=functions, remote=remote)
        found = score_responses(rollouts, sources, RewardConfig(functions=["exact_match"], remote_weight=0.5))
    assert found.parts["remote"].tolist() == [1, 3]
    assert found.scores.tolist() == [0.5, 1.5]  # neither text is its prompt's answer
    # Prompt 1 has no answer to compare with, which is a failure and stays one in any part of the result.
    assert found.sums["reward/num_failed"] == (found.select([0]) + found.select([1])).sums["reward/num_failed"] == 1
