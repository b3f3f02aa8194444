"""The scheduler sends each response once; e2e/test_alias.py compares responses with those of vLLM's scheduler."""

from collections import deque
from types import SimpleNamespace as Fake

import numpy as np
import pytest
import torch

from hybrid_rl.engines.vllm import scheduler as scheduler_module
from hybrid_rl.engines.vllm.scheduler import (
    LOGPROBS,
    NUM_REQUESTS,
    SIGN_INTERVAL_S,
    WholeResponses,
    whole_response_scheduler,
)

BLOCK = 16


class Steps:
    """In place of vLLM's scheduler: returns given outputs, step by step."""

    def __init__(self, steps, kv_cache_config):
        self.requests = {}
        self.steps = iter(steps)

    def add_request(self, request):
        self.requests[request.request_id] = request

    def set_pause_state(self, state):
        self.state = state

    def update_from_output(self, scheduler_output, model_runner_output):
        self.seen = model_runner_output.logprobs
        found = {}
        for name, tokens, reason, *experts in next(self.steps):
            output = Fake(
                request_id=name,
                new_token_ids=list(tokens),
                finish_reason=reason,
                kv_transfer_params=None,
                routed_experts=np.array(experts[0]) if experts else None,
            )
            found.setdefault(0, Fake(outputs=[])).outputs.append(output)
            if reason:
                del self.requests[name]
        return found


class Scheduler(WholeResponses, Steps):
    pass


@pytest.fixture
def clock(monkeypatch):
    """The seconds that the scheduler reads, in a list of one."""
    seconds = [0.0]
    monkeypatch.setattr(scheduler_module, "time", Fake(monotonic=lambda: seconds[0]))
    return seconds


@pytest.fixture
def make(clock):
    """Return a function that makes a scheduler with the requests a and b, whose steps return the given outputs."""

    def scheduler(steps, stop=()):
        made = Scheduler(steps=steps, kv_cache_config=Fake(kv_cache_groups=[]))
        for name in ("a", "b"):
            made.add_request(Fake(request_id=name, sampling_params=Fake(stop=list(stop), extra_args=None)))
        return made

    return scheduler


def step(scheduler, values):
    """Take a step in which `b` and `a` get these log-probs; return the outputs that would be sent."""
    rows = None if values is None else Fake(logprobs=np.array([[v, -9.0] for v in values], np.float32))
    found = scheduler.update_from_output(None, Fake(logprobs=rows, req_id_to_index={"b": 0, "a": 1}))
    return {
        group: [(o.request_id, o.new_token_ids, o.kv_transfer_params) for o in outputs.outputs]
        for group, outputs in found.items()
    }


def test_a_response_is_sent_once_with_all_tokens_and_log_probs(make):
    scheduler = make([[("a", [7], None)], [("a", [8], None), ("b", [3], "stop")], [("a", [9], "length")]])
    assert step(scheduler, [-1.0, -2.0]) == {}  # b has no token yet
    assert step(scheduler, [-0.5, -3.0]) == {0: [("b", [3], {LOGPROBS: [-0.5]})]}
    assert step(scheduler, [-4.0, -0.25]) == {0: [("a", [7, 8, 9], {LOGPROBS: [-2.0, -3.0, -0.25]})]}
    assert scheduler.seen is None  # vLLM has no arrays to split by request


def test_the_experts_of_all_steps_are_sent_with_the_response(make):
    scheduler = make([[("a", [5], None, [[[0]], [[1]]])], [("a", [6], "stop", [[[2]]])]])
    scheduler.update_from_output(None, Fake(logprobs=None, req_id_to_index={"b": 0, "a": 1}))
    found = scheduler.update_from_output(None, Fake(logprobs=None, req_id_to_index={"b": 0, "a": 1}))
    assert found[0].outputs[0].routed_experts.tolist() == [[[0]], [[1]], [[2]]]


def test_a_long_response_sends_signs_of_progress(make, clock):
    scheduler = make([[("a", [7], None)]] * 4 + [[("a", [9], "length")]])
    messages = []
    for clock[0] in (0.5, SIGN_INTERVAL_S, 1.5, 2 * SIGN_INTERVAL_S, 2.5):
        messages.append(step(scheduler, [-1.0, -2.0]))
    assert messages[:4] == [{}, {0: []}, {}, {0: []}]
    assert messages[4] == {0: [("a", [7, 7, 7, 7, 9], {LOGPROBS: [-2.0] * 5})]}


def test_greedy_responses_have_no_logprobs(make):
    scheduler = make([[("a", [7], None)], [("a", [], "length")]])
    assert step(scheduler, None) == {}
    assert step(scheduler, None) == {0: [("a", [7], {LOGPROBS: []})]}


def test_with_stop_strings_every_token_is_sent_at_once(make):
    scheduler = make([[("a", [7], None)]], stop=["."])
    assert step(scheduler, [-1.0, -2.0]) == {0: [("a", [7], None)]}
    assert scheduler.seen.logprobs.shape == (2, 2)


def test_tokens_of_aborted_requests_are_dropped(make):
    scheduler = make([[("a", [7], None)], []])
    assert step(scheduler, [-1.0, -2.0]) == {}
    scheduler.requests.clear()
    assert step(scheduler, None) == {}
    assert scheduler.num_kept == 0


def start_scheduler(tiny, monkeypatch, kind, *, num_blocks, prefix_caching):
    """Return vLLM's scheduler or hybrid_rl's, without an engine around it."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=str(tiny / "policy"),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        enable_prefix_caching=prefix_caching,
        enforce_eager=True,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True  # off in vLLM for CPUs
    config.cache_config.num_gpu_blocks = num_blocks
    layers = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["layer"], layers)]
    return {"ours": whole_response_scheduler, "vllm": AsyncScheduler}[kind](
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        include_finished_set=False,
        log_stats=False,
    )


def add_requests(scheduler, prompts, *, first=0, extra_args=None):
    """Add a request for 40 tokens to each prompt, named by numbers from `first` on."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    for number, prompt in enumerate(prompts, first):
        parameters = SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True, detokenize=False, extra_args=extra_args)
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(str(number), prompt, sampling_params=parameters, pooling_params=None, block_hasher=hasher)
        scheduler.add_request(request)


def run(scheduler):
    """Run all requests to their end, scheduling one step ahead of the results like an engine.

    Returns:
        Tokens and new blocks by request for each step, and the tokens of each response.
    """
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    given, waiting, responses = [], deque(), {}
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        if plan.total_num_scheduled_tokens:
            waiting.append(plan)
            old = plan.scheduled_cached_reqs
            blocks = dict(zip(old.req_ids, old.new_block_ids, strict=True))
            blocks |= {new.req_id: new.block_ids for new in plan.scheduled_new_reqs}
            given.append((dict(plan.num_scheduled_tokens), blocks, set(plan.preempted_req_ids or ())))
            if len(waiting) == 1:
                continue
        plan = waiting.popleft()
        names = list(plan.num_scheduled_tokens)
        tokens = [[len(given)] for _ in names]  # every prompt is computed in one step
        shape = (len(names), 1)
        logprobs = LogprobsLists(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(len(names), np.int32))
        rows = {name: row for row, name in enumerate(names)}
        output = ModelRunnerOutput(names, rows, sampled_token_ids=tokens, logprobs=logprobs)
        for group in scheduler.update_from_output(plan, output).values():
            for answer in group.outputs:
                responses.setdefault(answer.request_id, []).extend(answer.new_token_ids)
    return given, responses


@pytest.mark.parametrize("num_blocks, prefix_caching", [(100, True), (100, False), (12, False)], ids=str)
def test_sequences_get_the_same_tokens_and_blocks_in_every_step(tiny, monkeypatch, num_blocks, prefix_caching):
    """Prompts with a common block, and prompts that end inside a block or at its end; 12 blocks are too few for all."""
    shared = list(range(2, 2 + BLOCK))
    prompts = [shared, [*shared, 3], [*shared, 3, 4], [9] * (BLOCK - 1), [7] * 24, [8]]
    found = {}
    for kind in ("vllm", "ours"):
        scheduler = start_scheduler(tiny, monkeypatch, kind, num_blocks=num_blocks, prefix_caching=prefix_caching)
        add_requests(scheduler, prompts)
        found[kind] = run(scheduler)
    given, responses = found["ours"]
    assert given == found["vllm"][0] and responses == found["vllm"][1]
    assert {len(tokens) for tokens in responses.values()} == {40} and len(responses) == len(prompts)
    assert any(preempted for _, _, preempted in given) == (num_blocks == 12)


def test_no_request_is_scheduled_before_all_of_its_generation_have_arrived(tiny, monkeypatch):
    scheduler = start_scheduler(tiny, monkeypatch, "ours", num_blocks=100, prefix_caching=True)
    three = {NUM_REQUESTS: 3}
    for _ in range(2):  # the second generation begins while vLLM still has requests to clean up
        add_requests(scheduler, [[3], [4]], extra_args=three)
        assert not scheduler.has_unfinished_requests()
        assert scheduler.schedule().total_num_scheduled_tokens == 0
        add_requests(scheduler, [[5, 6]], first=2, extra_args=three)
        given, responses = run(scheduler)
        assert given[0][0] == {"0": 1, "1": 1, "2": 2}
        assert {name: len(tokens) for name, tokens in responses.items()} == {"0": 40, "1": 40, "2": 40}
