"""Requests that are added to vLLM while it decodes others, for conversations."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hybrid_rl.engines import Generation, Request, Sampling
from hybrid_rl.engines.vllm.sampling import sampling_params, to_generation
from hybrid_rl.engines.vllm.watch import EngineWatch

_names = itertools.count()


class VllmStream:
    """The requests of some conversations; see RequestStream.

    vLLM's client runs in the caller's thread. Its methods do not wait: a step is taken only where the engine's answer
    has arrived.
    """

    def __init__(self, engine: Any, watch: EngineWatch, sampling: Sampling, doing: str, *, adapter: Any) -> None:
        """Take vLLM's LLMEngine, which has no requests.

        Args:
            engine: vLLM's LLMEngine.
            watch: of the engine's processes.
            sampling: of every request, except max_tokens.
            doing: see EngineWatch.
            adapter: vLLM's LoRARequest of every request; None for no adapter.
        """
        self._engine = engine
        self._watch = watch
        self._sampling = sampling
        self._doing = doing
        self._adapter = adapter
        self._look = watch.looking(doing)
        self._numbers: dict[str, int] = {}  # vLLM's name of a request -> its number

    @property
    def num_running(self) -> int:
        """Number of requests that are not finished."""
        return len(self._numbers)

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests, which the engine starts together; see RequestStream."""
        from vllm.sampling_params import RequestOutputKind

        with self._watch.explaining(self._doing):
            for request in requests:
                sampling = replace(self._sampling, max_tokens=request.max_tokens)
                parameters = sampling_params(sampling, request.seed, num_requests=len(requests))
                parameters.output_kind = RequestOutputKind.FINAL_ONLY
                name = str(next(_names))
                prompt = {"prompt_token_ids": request.token_ids}
                self._engine.add_request(name, prompt, parameters, lora_request=self._adapter)
                self._numbers[name] = request.number

    def receive(self) -> list[tuple[int, Generation]]:
        """Return the responses that have arrived; see RequestStream.

        Raises:
            EngineLostError: a process of the engine has ended, or it makes no progress while there are requests.
        """
        if not self._numbers:  # the conversations wait for their environments
            self._watch.sign_of_progress()
        self._look()
        found = []
        with self._watch.explaining(self._doing):
            while self._engine.engine_core.outputs_queue.qsize():
                for output in self._engine.step():
                    if output.finished:
                        found.append((self._numbers.pop(output.request_id), to_generation(output, self._sampling)))
        return found


@contextmanager
def open_stream(
    engine: Any, watch: EngineWatch, sampling: Sampling, doing: str, *, adapter: Any
) -> Iterator[VllmStream]:
    """Yield a stream; an engine that may still have requests at the end takes no further call.

    Args:
        engine, watch, sampling, doing, adapter: see VllmStream.
    """
    stream = VllmStream(engine, watch, sampling, doing, adapter=adapter)
    try:
        yield stream
    finally:
        watch.is_broken |= stream.num_running > 0
