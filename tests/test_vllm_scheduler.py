"""What reaches the trainer of an engine's steps; the equality with vLLM's own sending is in test_engines.py."""

from types import SimpleNamespace as Fake

import numpy as np
import pytest

from hybrid_rl.engines.vllm_scheduler import LOGPROBS, _Whole


class Steps:
    """In place of vLLM's scheduler: gives the outputs of the next step as they were written down."""

    def __init__(self, steps):
        self.requests = {}
        self.steps = iter(steps)

    def add_request(self, request):
        self.requests[request.request_id] = request

    def update_from_output(self, scheduler_output, model_runner_output):
        self.seen = model_runner_output.logprobs
        found = {}
        for name, tokens, reason in next(self.steps):
            output = Fake(request_id=name, new_token_ids=list(tokens), finish_reason=reason, kv_transfer_params=None)
            found.setdefault(0, Fake(outputs=[])).outputs.append(output)
            if reason:
                del self.requests[name]
        return found


class Scheduler(_Whole, Steps):
    pass


@pytest.fixture
def make():
    """Return a scheduler with the requests a and b, which give what is written for each step."""

    def scheduler(steps, stop=()):
        made = Scheduler(steps=steps)
        for name in ("a", "b"):
            made.add_request(Fake(request_id=name, sampling_params=Fake(stop=list(stop))))
        return made

    return scheduler


def step(scheduler, values):
    """Take a step in which the model gave `b` and `a` these log-probs; return what would be sent."""
    rows = None if values is None else Fake(logprobs=np.array([[v, -9.0] for v in values], np.float32))
    found = scheduler.update_from_output(None, Fake(logprobs=rows, req_id_to_index={"b": 0, "a": 1}))
    return {
        group: [(o.request_id, o.new_token_ids, o.kv_transfer_params) for o in outputs.outputs]
        for group, outputs in found.items()
    }


def test_a_response_is_sent_once_with_all_its_tokens_and_their_logprobs(make):
    scheduler = make([[("a", [7], None)], [("a", [8], None), ("b", [3], "stop")], [("a", [9], "length")]])
    assert step(scheduler, [-1.0, -2.0]) == {}  # b is still in its prompt
    assert step(scheduler, [-0.5, -3.0]) == {0: [("b", [3], {LOGPROBS: [-0.5]})]}
    assert step(scheduler, [-4.0, -0.25]) == {0: [("a", [7, 8, 9], {LOGPROBS: [-2.0, -3.0, -0.25]})]}
    assert scheduler.seen is None  # vLLM cuts no arrays


def test_greedy_responses_have_no_logprobs(make):
    scheduler = make([[("a", [7], None)], [("a", [], "length")]])
    assert step(scheduler, None) == {}
    assert step(scheduler, None) == {0: [("a", [7], {LOGPROBS: []})]}


def test_with_stop_strings_every_token_is_sent_at_once(make):
    scheduler = make([[("a", [7], None)]], stop=["."])
    assert step(scheduler, [-1.0, -2.0]) == {0: [("a", [7], None)]}
    assert scheduler.seen.logprobs.shape == (2, 2)


def test_nothing_is_kept_of_requests_that_were_aborted(make):
    scheduler = make([[("a", [7], None)], []])
    assert step(scheduler, [-1.0, -2.0]) == {}
    scheduler.requests.clear()
    assert step(scheduler, None) == {}
    assert not scheduler._held
