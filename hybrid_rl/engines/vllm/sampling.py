"""Translation between hybrid_rl's Sampling and Generation and vLLM's parameters and outputs."""

import functools
import inspect
from typing import Any

import numpy as np
import torch

from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.engines.vllm.scheduler import LOGPROBS, NUM_REQUESTS


@functools.cache
def _has_flat_logprobs() -> bool:
    """Return whether this version of vLLM can return log-probs as one list instead of one dictionary per token."""
    from vllm import SamplingParams

    return "flat_logprobs" in inspect.signature(SamplingParams).parameters


def sampling_params(sampling: Sampling, seed: int | None, *, num_requests: int) -> Any:
    """Return vLLM's SamplingParams of one request, every field set so that no default of vLLM has an effect.

    Args:
        num_requests: number of the requests of this generation; the scheduler waits for all of them.
    """
    from vllm import SamplingParams

    greedy = sampling.temperature == 0
    is_flat = _has_flat_logprobs() and bool(sampling.stop_strings) and not greedy
    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        max_tokens=sampling.max_tokens,
        min_tokens=0,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids names every token that ends a response
        logprobs=None if greedy else 0,  # 0: of the sampled token only
        seed=None if greedy else seed,
        extra_args={NUM_REQUESTS: num_requests},
        **_text_params(sampling),
        **({"flat_logprobs": True} if is_flat else {}),
    )


def _text_params(sampling: Sampling) -> dict[str, Any]:
    """Return the parameters of vLLM's own decoding to text, which only stop strings need."""
    if not sampling.stop_strings:
        return {"detokenize": False}
    return {
        "detokenize": True,
        "skip_special_tokens": False,
        "stop": list(sampling.stop_strings),
        "include_stop_str_in_output": True,
    }


def to_generation(answer: Any, sampling: Sampling) -> Generation:
    """Return a Generation of vLLM's RequestOutput.

    Raises:
        RuntimeError: the numbers of tokens and log-probs differ.
    """
    output = answer.outputs[0]
    token_ids = list(output.token_ids)
    if sampling.temperature == 0:
        logprobs: list[float] = []
    elif not sampling.stop_strings:
        logprobs = answer.kv_transfer_params[LOGPROBS]
    elif _has_flat_logprobs():
        logprobs = list(output.logprobs.logprobs)
    else:
        logprobs = [entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True)]
    experts = getattr(output, "routed_experts", None)
    if logprobs and len(logprobs) != len(token_ids):
        raise RuntimeError(f"vLLM returned {len(logprobs)} log-probs for {len(token_ids)} tokens")
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        is_truncated=output.finish_reason == "length",
        routed_experts=None if experts is None else torch.from_numpy(experts.astype(np.int16)),
    )
