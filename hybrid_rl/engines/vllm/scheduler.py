"""A vLLM scheduler that does less in Python per token. Runs in vLLM's process.

With a small model and many sequences the host decides how fast an engine decodes, not the GPU.

- In every decode step vLLM sends the trainer a message with an object and three arrays for each sequence, which one
  process encodes and the other decodes. The trainer needs complete responses only, so here a step records two numbers
  per sequence, and each response is sent once.
- In every step vLLM looks for free memory for each sequence, and for blocks that other sequences can use too. Both
  change only with a token that begins a block, which is every 16th.

It starts with the first step of a generation when all of its requests have arrived. Otherwise the time at which each
request arrives would decide which ones are computed together, and with that the last bits of the log-probs.
"""

import time
from typing import Any

import numpy as np

from hybrid_rl.engines.vllm.lifetime import end_with_trainer, ignore_signals_of_others, report_ended_workers
from hybrid_rl.engines.vllm.signals import handle_sigterm_in_thread

LOGPROBS = "hybrid_rl_logprobs"
"""Key of a response's log-probs in `kv_transfer_params`, the one dictionary that vLLM passes on unchanged."""
NUM_REQUESTS = "hybrid_rl_num_requests"
"""Key of `extra_args` in a request's SamplingParams: number of the requests of one call of generate."""
SIGN_INTERVAL_S = 1.0
"""Time between two messages which tell the trainer that the engine makes progress."""


class WholeResponses:
    """Mixin in front of a vLLM scheduler: keeps the tokens and log-probs of a response until its last token.

    With stop strings every token is sent at once, because the trainer's process looks for the strings. All requests
    that are in the engine at a time belong to one call of generate, so either all of them have stop strings or none.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._kept: dict[str, tuple[list[int], list[float], list[Any]]] = {}
        self._has_stop_strings = False
        self._last_sign = time.monotonic()
        self._num_missing = 0  # requests of the current call of generate that have not arrived
        groups = arguments["kv_cache_config"].kv_cache_groups
        if [type(group.kv_cache_spec).__name__ for group in groups] == ["FullAttentionSpec"]:
            skip_begun_blocks(self.kv_cache_manager, groups[0].kv_cache_spec.block_size)  # type: ignore[attr-defined]

    @property
    def num_kept(self) -> int:
        """Number of unfinished responses whose tokens are kept."""
        return len(self._kept)

    def add_request(self, request: Any) -> None:
        """Take a request, and schedule none before all requests of its call of generate are here."""
        from vllm.v1.core.sched.interface import PauseState

        self._has_stop_strings = bool(request.sampling_params.stop)
        super().add_request(request)  # type: ignore[misc]
        num_requests = (request.sampling_params.extra_args or {}).get(NUM_REQUESTS, 1)
        self._num_missing = (self._num_missing or num_requests) - 1
        self.set_pause_state(PauseState.PAUSED_ALL if self._num_missing else PauseState.UNPAUSED)  # type: ignore[attr-defined]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Return, by client, the outputs of the requests that this step finished; see vLLM's Scheduler."""
        if self._has_stop_strings:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc, no-any-return]
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        found = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        rows = model_runner_output.req_id_to_index
        values = [] if logprobs is None else logprobs.logprobs[:, 0].tolist()  # column 0 is the sampled token
        for group in found.values():
            group.outputs = [output for output in group.outputs if self._is_whole(output, rows, values)]
        if not self.requests:  # type: ignore[attr-defined]
            self._kept.clear()  # of requests that were aborted
        return {client: group for client, group in found.items() if group.outputs} or self._sign_of_progress()

    def _sign_of_progress(self) -> dict[int, Any]:
        """Return a message without outputs to the trainer, which would otherwise hear nothing for a long response."""
        from vllm.v1.engine import EngineCoreOutputs

        now = time.monotonic()
        if now - self._last_sign < SIGN_INTERVAL_S:
            return {}
        self._last_sign = now
        return {0: EngineCoreOutputs()}

    def _is_whole(self, output: Any, rows: dict[str, int], values: list[float]) -> bool:
        """Keep what a request got in this step; at its end, replace its output by that of the whole response."""
        tokens, logprobs, experts = self._kept.setdefault(output.request_id, ([], [], []))
        tokens += output.new_token_ids
        if values and output.new_token_ids:
            logprobs.append(values[rows[output.request_id]])
        if getattr(output, "routed_experts", None) is not None:  # of the tokens of this step
            experts.append(output.routed_experts)
        if output.finish_reason is None:
            return False
        del self._kept[output.request_id]
        output.new_token_ids = tokens
        output.kv_transfer_params = {LOGPROBS: logprobs}
        if experts:
            output.routed_experts = np.concatenate(experts)
        return True


def skip_begun_blocks(manager: Any, block_size: int) -> None:
    """Make vLLM's KV cache manager skip each token whose block is allocated already.

    A full block is offered to other sequences when the next block begins, which is a step or two later than in vLLM.

    Args:
        manager: vLLM's KVCacheManager.
        block_size: tokens. Every layer must keep all tokens, unlike layers with a sliding window, which free blocks.
    """
    allocate, offer = manager.allocate_slots, manager.cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, **more: Any) -> Any:
        if num_new_tokens == 1 and request.num_computed_tokens % block_size and not more.get("num_lookahead_tokens"):
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **more)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens % block_size == 0:
            offer(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks


def whole_response_scheduler(**arguments: Any) -> Any:
    """Return the scheduler that vLLM would have made, with WholeResponses in front; see vLLM's Scheduler."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base = AsyncScheduler if arguments["vllm_config"].scheduler_config.async_scheduling else Scheduler
    return type("WholeResponseScheduler", (WholeResponses, base), {})(**arguments)


class EngineScheduler:
    """What vLLM makes its scheduler of, in the main thread of an engine's core process, for `scheduler_cls`.

    vLLM's own start leaves no other hook in this process, which is not a worker where the engine spans several GPUs. As
    a class it is in vLLM's settings, so that the core process imports this file before it waits for the trainer.
    """

    def __new__(cls, **arguments: Any) -> Any:
        """Return the scheduler, after the core process has begun to watch its workers and signals."""
        ignore_signals_of_others()
        handle_sigterm_in_thread()
        report_ended_workers()
        return whole_response_scheduler(**arguments)


end_with_trainer()
