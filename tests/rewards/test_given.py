"""Functions that a program gives as objects: their way into scorer processes, and what is refused."""

import threading

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.rewards import ScorerPool
from hybrid_rl.rewards.given import GIVEN, giving
from hybrid_rl.rewards.loading import reward_file_hashes
from tests.conftest import make_rollout


def score(functions):
    """Return name -> score of a response by functions that are given as objects."""
    with (
        giving({"reward_functions": functions}) as names,
        ScorerPool(names["reward_functions"], timeout_s=60, num_workers=1, on_error="raise") as pool,
    ):
        return {
            name: scores[0] for name, scores in pool.score([make_rollout(text="7", answer="7")]).per_function.items()
        }


def test_functions_closures_and_lambdas_score_in_another_process():
    bonus = 0.5

    def closure(completions, answer, **kwargs):
        return [bonus + (text == gold) for text, gold in zip(completions, answer, strict=True)]

    async def judge(prompt, response):
        return bonus

    def process(prompt, response):
        return threading.main_thread().ident is not None and __name__ != "__main__"

    found = score([closure, judge, lambda prompt, response: 2, process])
    assert found == {"given:closure": 1.5, "given:judge": 0.5, "given:<lambda>": 2, "given:process": 1}
    assert not GIVEN


def test_what_a_function_changes_stays_in_its_process():
    seen = []

    def counts(prompt, response):
        seen.append(response)
        return len(seen)

    assert score([counts]) == {"given:counts": 1} and seen == []


def test_a_function_that_holds_what_no_other_process_can_have_is_refused():
    lock = threading.Lock()

    def locked(prompt, response):
        with lock:
            return 1

    with pytest.raises(ConfigError, match=r"reward_functions: locked cannot be sent to a worker process \(.*lock"):
        score([locked])


def test_every_function_that_cannot_be_used_is_reported():
    def f(prompt, response):
        return 1

    with pytest.raises(ConfigError) as caught:
        score([f, f, 3])
    assert str(caught.value).splitlines() == [
        "reward_functions: 3 is not a function or class; a reward model belongs into models.reward",
        "reward_functions: two are called f; give each a __name__ of its own",
    ]
    with pytest.raises(ConfigError, match=r"'given:<lambda>': its signature is <lambda>\(a, b, c\), which is none of"):
        score([lambda a, b, c: 1])


def test_a_name_of_another_program_is_explained():
    with pytest.raises(
        ConfigError, match=r"'given:f' is a function or class that hybrid_rl\.train was given: start the run with th"
    ):
        ScorerPool(["given:f"], timeout_s=60, num_workers=1, on_error="raise")


def test_a_changed_function_has_another_hash():
    def make(text):
        scope = {}
        exec(f"def f(prompt, response): return {text}", scope)
        return scope["f"]

    hashes = []
    for text in ("1", "1", "2"):
        with giving({"reward_functions": [make(text)]}) as names:
            hashes.append(reward_file_hashes(names["reward_functions"])["given:f"])
    assert hashes[0] == hashes[1] != hashes[2]
