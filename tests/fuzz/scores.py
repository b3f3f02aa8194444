"""Fuzz subjects: scores of all sources and the rewards that follow from them, added up in plain Python."""

import functools
import json
import math
import random
import statistics
import threading
from collections.abc import Sequence
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from hybrid_rl.batch import Rollout
from hybrid_rl.config import ConfigError, RewardConfig
from hybrid_rl.distributed import World
from hybrid_rl.rewards import RemoteScorer, RunningNormalizer, ScorerPool
from hybrid_rl.rewards.filtering import informative_rows
from hybrid_rl.rewards.scoring import RewardSources, Scored, add_rewards, score_responses
from hybrid_rl.steps.judging import evaluation_sums
from tests.conftest import make_rollout
from tests.fuzz.cases import check_close, check_sentence
from tests.fuzz.tokenizers import random_text

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def random_scored(rng: random.Random) -> tuple[Scored, list[float]]:
    """Return groups of responses of random lengths with scores that float32 holds exactly, and these scores."""
    rollouts, scores = [], []
    for group in range(rng.randint(1, 4)):
        for _ in range(rng.randint(2, 4)):
            length = rng.randint(0, 10)
            rollouts.append(
                make_rollout(
                    [1], [4] * length, prompt_id=group, sequence_id=len(rollouts), is_truncated=rng.random() < 0.3
                )
            )
            scores.append(rng.choice([0.0, 1.0, rng.randint(-40, 40) / 8]))
    return Scored(rollouts=rollouts, scores=torch.tensor(scores), parts={}), scores


def check_rewards(rng: random.Random, folder: Path) -> None:
    """A reward is the score less the penalties, standardised by all rewards of the run, and clipped."""
    config = RewardConfig(
        truncation_penalty=rng.choice([0.0, 0.5, 2.0]),
        overlong_buffer=rng.choice([0, 4, 10]),
        overlong_penalty=rng.choice([1.0, 0.5]),
        clip=rng.choice([None, 0.5, 3.0]),
        normalize=rng.random() < 0.5,
    )
    normalizer = RunningNormalizer() if config.normalize else None
    seen: list[float] = []
    for _ in range(rng.randint(1, 3)):
        scored, scores = random_scored(rng)
        penalized = []
        for rollout, score in zip(scored.rollouts, scores, strict=True):
            over = len(rollout.response_ids) - (10 - config.overlong_buffer)
            share = max(0, over) / config.overlong_buffer if config.overlong_buffer else 0.0
            penalized.append(score - config.truncation_penalty * rollout.is_truncated - share * config.overlong_penalty)
        seen += penalized
        mean, std = (statistics.fmean(seen), statistics.pstdev(seen)) if normalizer else (0.0, 1.0)
        bound = math.inf if config.clip is None else config.clip
        expected = [min(bound, max(-bound, (r - mean) / (std or 1.0))) for r in penalized]
        batch = add_rewards(scored, config, max_response_tokens=10, world=WORLD, normalizer=normalizer)
        check_close(batch.rewards.tolist(), expected, "rewards", tolerance=1e-4)
        if normalizer and rng.random() < 0.5:  # as at a resume
            state = json.loads(json.dumps(normalizer.state_dict()))
            normalizer = RunningNormalizer()
            normalizer.load_state_dict(state)


def check_groups(rng: random.Random, folder: Path) -> None:
    """Filtered groups are those whose mean lies strictly between the bounds; evaluation counts correct responses."""
    scored, scores = random_scored(rng)
    bounds = rng.choice([(0.0, 1.0), (-1.0, 0.5), (0.25, 0.75)])
    groups: dict[int, list[int]] = {}
    for row, rollout in enumerate(scored.rollouts):
        groups.setdefault(rollout.prompt.prompt_id, []).append(row)
    expected = []
    for rows in groups.values():
        mean = sum(Fraction(scores[row]) for row in rows) / len(rows)
        expected += rows if bounds[0] < mean < bounds[1] else []
    assert informative_rows(scored, bounds) == sorted(expected), f"{scores} within {bounds}"
    size = rng.randint(1, 3)
    rollouts = scored.rollouts[: len(scored.rollouts) // size * size]
    values = scores[: len(rollouts)]
    failed = [rng.random() < 0.1 for _ in rollouts]
    sums = evaluation_sums(rollouts, values, failed, num_samples=size)
    parts = [values[first : first + size] for first in range(0, len(values), size)]
    wanted = {
        "accuracy": sum(Fraction(sum(v >= 1 for v in part), size) for part in parts),
        "score": sum(sum(part) / size for part in parts),
        "response_length": sum(len(r.response_ids) for r in rollouts) / size,
        "truncated": sum(r.is_truncated for r in rollouts) / size,
        "num_failed": sum(failed) / size,
    }
    if size > 1:
        wanted[f"mean@{size}"] = wanted["accuracy"]
        wanted[f"pass@{size}"] = sum(any(v >= 1 for v in part) for part in parts)
    assert sums.keys() == wanted.keys()
    for name, value in wanted.items():
        check_close(sums[name], float(value), name)


REWARD_FILE = """
def length(prompt, response):
    return len(response)


def as_answer(prompt, response):
    return 2 if response == prompt.answer else -1
"""


@functools.cache
def _pool_file() -> Path:
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="fuzz-rewards-")) / "rewards_of_fuzz.py"
    path.write_text(REWARD_FILE)
    return path


def text_rollouts(rng: random.Random) -> list[Rollout]:
    """Return responses with texts, some of which are their prompt's answer."""
    rollouts = []
    for number in range(rng.randint(1, 5)):
        answer = random_text(rng, is_empty_fine=False)
        text = answer if rng.random() < 0.4 else random_text(rng) + "?"
        prompt_text = random_text(rng)
        rollouts.append(
            make_rollout(
                [1], [4], prompt_id=number, sequence_id=number, text=text, prompt_text=prompt_text, answer=answer
            )
        )
    return rollouts


def check_sources(rng: random.Random, folder: Path) -> None:
    """The score is the weighted sum of model, services and functions, which run in worker processes."""
    rollouts = text_rollouts(rng)
    file = _pool_file()
    weights = [rng.choice([1.0, 0.5, -2.0]) for _ in range(3)]
    config = RewardConfig(model_weight=rng.choice([1.0, 0.25]))
    model = [rng.randint(-8, 8) / 4 for _ in rollouts]
    names = ["exact_match", f"{file}:length", f"{file}:as_answer"]
    with ScorerPool(names, weights, timeout_s=60, num_workers=1, on_error="raise") as pool:
        sources = RewardSources(functions=pool, model=lambda _: torch.tensor(model))
        scored = score_responses(rollouts, sources, config)
    columns = [
        [float(r.text.strip() == r.prompt.answer.strip()) for r in rollouts],
        [float(len(r.text)) for r in rollouts],
        [2.0 if r.text == r.prompt.answer else -1.0 for r in rollouts],
    ]
    expected = [
        config.model_weight * model[i] + sum(w * column[i] for w, column in zip(weights, columns, strict=True))
        for i in range(len(rollouts))
    ]
    check_close(scored.scores.tolist(), expected, "scores")
    for name, column in zip(names, columns, strict=True):
        check_close(scored.parts[name].tolist(), column, name)


class _Service(BaseHTTPRequestHandler):
    """Answers with what the case asks for, and keeps the last request."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        status, content = self.server.answer(body)  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@functools.cache
def _service() -> Any:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def check_service(rng: random.Random, folder: Path) -> None:
    """A service gets prompts, responses and answers as they are; a wrong answer of it is an error that names it."""
    rollouts, service = text_rollouts(rng), _service()
    values = [rng.choice([0, 1, -2.5, 1e6]) for _ in rollouts]
    wrong = rng.choice([None, None, "number", "nan", "text", "bool", "no json", "no list", "status"])
    answers: dict[str | None, Any] = {
        None: {rng.choice(["rewards", "scores"]): values},
        "number": {"rewards": [*values, 1]},
        "nan": {"rewards": [math.nan] * len(values)},
        "text": {"rewards": ["1"] * len(values)},
        "bool": {"rewards": [True] * len(values)},
        "no list": rng.choice([[], 5, None, {"rewards": 5}, {"rewards": {}}, {"reward": values}]),
    }
    content = b"<html>" if wrong == "no json" else json.dumps(answers.get(wrong)).encode()
    service.bodies, service.answer = [], lambda _: (rng.choice([400, 404, 422]) if wrong == "status" else 200, content)
    url = f"http://127.0.0.1:{service.server_port}/score"
    scorer = RemoteScorer([url], timeout_s=20, retries=0, stall_timeout_s=60)
    try:
        found: Sequence[float | None] | None = [returned.score for returned in scorer.score(rollouts)]
    except (RuntimeError, ConfigError) as error:
        found = None
        check_sentence(str(error), url)
    assert (found is None) == (wrong is not None), f"an answer that is {wrong or 'right'} gives {found}"
    assert found is None or list(found) == values
    assert service.bodies[0] == {
        "query": [r.full_text for r in rollouts],
        "prompts": [r.full_text[: len(r.full_text) - len(r.text)] for r in rollouts],
        "responses": [r.text for r in rollouts],
        "labels": [r.prompt.answer for r in rollouts],
    }, f"the service got {service.bodies[0]}"
