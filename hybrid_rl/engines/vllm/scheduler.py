"""A scheduler inside the engine that does less in Python per token. Runs in vLLM's process.

With a small model and many sequences the host decides how fast an engine decodes, not the GPU.

- vLLM sends the trainer a message per decode step, with an object and three arrays for each sequence, which one process
  encodes and the other decodes. Nobody reads a response before it is whole, so here a step leaves behind two numbers
  per sequence, and a response is sent once.
- In every step vLLM looks for free memory for each sequence, and for blocks that it could share. Both change only with
  a token that begins a block, every 16th.
"""

from typing import Any

LOGPROBS = "hybrid_rl_logprobs"
"""Key of a response's log-probs in `kv_transfer_params`, the one dictionary that vLLM hands through as it is."""


class _Whole:
    """Before a scheduler of vLLM: keeps tokens and log-probs of a response until its last token.

    Stop strings are looked for in the trainer's process, which then needs every token at once. All requests in the
    engine at a time are of one `generate`, so they have them all or none.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._held: dict[str, tuple[list[int], list[float]]] = {}
        self._has_stop_strings = False
        groups = arguments["kv_cache_config"].kv_cache_groups
        if [type(group.kv_cache_spec).__name__ for group in groups] == ["FullAttentionSpec"]:
            pass_over_begun_blocks(self.kv_cache_manager, groups[0].kv_cache_spec.block_size)  # type: ignore[attr-defined]

    def add_request(self, request: Any) -> None:
        """Take a request; see vLLM's Scheduler."""
        self._has_stop_strings = bool(request.sampling_params.stop)
        super().add_request(request)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Return, by client, the outputs of the requests that this step finished; see vLLM's Scheduler."""
        if self._has_stop_strings:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc, no-any-return]
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        found = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        rows = model_runner_output.req_id_to_index
        values = [] if logprobs is None else logprobs.logprobs[:, 0].tolist()  # the sampled token's is the first
        for group in found.values():
            group.outputs = [output for output in group.outputs if self._is_whole(output, rows, values)]
        if not self.requests:  # type: ignore[attr-defined]
            self._held.clear()  # of requests that were aborted
        return {client: group for client, group in found.items() if group.outputs}

    def _is_whole(self, output: Any, rows: dict[str, int], values: list[float]) -> bool:
        """Hold what a request got in this step; where it ends, make its output that of the whole response."""
        tokens, logprobs = self._held.setdefault(output.request_id, ([], []))
        tokens += output.new_token_ids
        if values and output.new_token_ids:
            logprobs.append(values[rows[output.request_id]])
        if output.finish_reason is None:
            return False
        del self._held[output.request_id]
        output.new_token_ids = tokens
        output.kv_transfer_params = {LOGPROBS: logprobs}
        return True


def pass_over_begun_blocks(manager: Any, block_size: int) -> None:
    """Let vLLM's KV cache manager do nothing for a token whose block the token before it has already got.

    A block that is full is offered to other sequences when the next one begins, a step or two later than by vLLM.

    Args:
        block_size: tokens; every layer must keep all of them, unlike sliding windows, which give blocks back.
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


def whole_responses(**arguments: Any) -> Any:
    """Return a scheduler for vLLM's `scheduler_cls`, of the kind that it would have made itself but for the sending."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base = AsyncScheduler if arguments["vllm_config"].scheduler_config.async_scheduling else Scheduler
    return type("WholeResponses", (_Whole, base), {})(**arguments)
