"""Responses to prompts, sampled for training or greedy for baselines and evaluation."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Prompt, Rollout
from hybrid_rl.config import RolloutConfig
from hybrid_rl.engines import Generation, RolloutEngine, Sampling
from hybrid_rl.models.tokenizer import decode_response
from hybrid_rl.seeds import request_seed


def collect_rollouts(
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    *,
    stop_token_ids: Sequence[int],
    run_seed: int,
    step: int,
    top_p: float = 1.0,
) -> list[Rollout]:
    """Return rollout.group_size sampled responses per prompt, with log-probs; a group's responses are consecutive.

    Args:
        prompts:        this rank's prompts.
        stop_token_ids: end a response, which keeps the token.
        run_seed, step: determine the samples; the same for any number of ranks if rollout.seed_per_request.
        top_p:          see Sampling; below 1 the log-probs are not the policy's.
    """
    sampling = Sampling.of(config, stop_token_ids, top_p=top_p)
    repeated = [prompt for prompt in prompts for _ in range(config.group_size)]
    sequence_ids = [p.prompt_id * config.group_size + k for p in prompts for k in range(config.group_size)]
    seeds = [request_seed(run_seed, step, i) for i in sequence_ids] if config.seed_per_request else None
    if seeds is None and repeated:
        engine.seed(request_seed(run_seed, step, sequence_ids[0]))
    generations = engine.generate([p.token_ids for p in repeated], sampling, seeds)
    return _rollouts(repeated, sequence_ids, generations, tokenizer, stop_token_ids)


def generate_greedy(
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutConfig,
    *,
    stop_token_ids: Sequence[int],
) -> list[Rollout]:
    """Return the greedy response to each prompt, without log-probs; see `collect_rollouts` for the arguments."""
    sampling = Sampling.of(replace(config, temperature=0.0), stop_token_ids)
    generations = engine.generate([p.token_ids for p in prompts], sampling, None)
    return _rollouts(prompts, [p.prompt_id for p in prompts], generations, tokenizer, stop_token_ids)


def _rollouts(
    prompts: Sequence[Prompt],
    sequence_ids: Sequence[int],
    generations: Sequence[Generation],
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
) -> list[Rollout]:
    return [
        Rollout(
            prompt=prompt,
            sequence_id=sequence_id,
            response_ids=generation.token_ids,
            rollout_logprobs=generation.logprobs,
            is_truncated=generation.is_truncated,
            text=judged_text(prompt, generation, tokenizer, stop_token_ids),
            routed_experts=generation.routed_experts,
        )
        for prompt, sequence_id, generation in zip(prompts, sequence_ids, generations, strict=True)
    ]


def judged_text(
    prompt: Prompt, generation: Generation, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]
) -> str:
    """Return the text of a response for reward functions, services and files.

    It is the prompt's prefill and every sampled token, special tokens included, except the stop token that ended the
    response; a stop string stays. Prompt and text together are the text of the whole sequence.
    """
    return prompt.prefill + decode_response(
        tokenizer,
        prompt.token_ids,
        generation.token_ids,
        stop_token_ids=() if generation.is_truncated else stop_token_ids,
    )
