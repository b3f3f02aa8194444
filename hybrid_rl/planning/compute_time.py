"""Seconds that one rank computes in a step: prefill, decode, forwards of SCORE, and updates."""

from dataclasses import dataclass

from hybrid_rl.planning.model_shape import ModelShape
from hybrid_rl.planning.plan import Plan
from hybrid_rl.planning.rates import Rates
from hybrid_rl.planning.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ScoreForward:
    """A forward of SCORE over all sequences."""

    name: str
    """Shape of the model: actor (also for the reference), critic or reward."""
    is_sharded: bool
    """Whether tensor parallelism shards the model."""


def score_forwards(work: Workload) -> list[ScoreForward]:
    """Return the forwards of SCORE."""
    config, found = work.config, []
    if config.update.old_logprobs == "trainer":
        found.append(ScoreForward(name="actor", is_sharded=True))
    if config.has_reference:
        found.append(ScoreForward(name="actor", is_sharded=False))
    if work.shapes.critic:
        found.append(ScoreForward(name="critic", is_sharded=True))
    if work.shapes.reward:
        found.append(ScoreForward(name="reward", is_sharded=False))
    return found


def shape_of(work: Workload, name: str) -> ModelShape | None:
    """Return the shape of `actor`, `critic` or `reward`."""
    return {"actor": work.shapes.actor, "critic": work.shapes.critic, "reward": work.shapes.reward}[name]


def prefill_seconds(work: Workload, rates: Rates) -> float:
    """Return the seconds of reading all prompts; with prefix caching, a group's prompt is read once."""
    rollout, shape = work.config.rollout, work.shapes.actor
    readings = rollout.group_size if rollout.prefix_caching else 1
    tokens = -(-work.num_sequences // readings) * work.prompt_tokens
    flops = shape.forward_flops(tokens, work.prompt_tokens) + shape.head_flops(work.num_sequences)
    return flops / (rates.matmul_flops * rates.forward_efficiency)


def decode_seconds(work: Workload, plan: Plan, rates: Rates) -> tuple[float, str]:
    """Return the seconds of all decode steps, and whether `host` or `bandwidth` limits them.

    A step takes the maximum of two times: the host's work for the step and its sequences, and reading the weights and
    the keys and values of the sequences, with half a response on average. Of routed experts a step reads those that
    any of its sequences chooses. A tensor-parallel engine decodes the
    sequences of all its GPUs and reads a shard on each; communication between them is not counted.
    """
    shape, num_gpus = work.shapes.actor, work.config.rollout.tensor_parallel_size
    num_sequences = num_gpus * work.num_sequences
    concurrent = max(1, min(num_sequences, plan.max_concurrent_sequences, plan.kv_sequences))
    batches = -(-num_sequences // concurrent)
    token_bytes = shape.kv_bytes_per_token(work.dtype_bytes, num_gpus=num_gpus)
    cache = concurrent * (work.prompt_tokens + work.response_tokens / 2) * token_bytes
    read = shape.num_read_params(concurrent) * work.dtype_bytes / num_gpus + cache
    by_memory = read / (rates.memory_bytes_per_s * rates.decode_efficiency)
    by_host = rates.host_s_per_step + concurrent * rates.host_s_per_sequence
    seconds = batches * work.response_tokens * max(by_memory, by_host)
    return seconds, "host" if by_host > by_memory else "bandwidth"


def score_seconds(work: Workload, rates: Rates) -> float:
    """Return the seconds of all forwards of SCORE: log-probs of actor and reference, values and rewards.

    A rank computes a model that is not sharded for the tokens of its whole tensor-parallel group.
    """
    num_ranks, flops = work.config.update.tensor_parallel_size, 0.0
    responses = num_ranks * work.num_sequences * work.response_tokens
    for forward in score_forwards(work):
        shape = shape_of(work, forward.name)
        assert shape is not None
        tokens = work.num_tokens if forward.is_sharded else num_ranks * work.num_tokens
        head_tokens = responses if forward.name == "actor" else 0
        flops += shape.forward_flops(tokens, work.sequence_tokens) + shape.head_flops(head_tokens)
    return flops / (rates.matmul_flops * rates.forward_efficiency)


def update_seconds(work: Workload, rates: Rates, name: str) -> float:
    """Return the seconds of all epochs of the update of `actor` or `critic`; 0 if the run has no critic.

    Forward and backward take the operations of 3 forwards, a 4th with gradient checkpointing. With adapters the weights
    have no gradients, which leaves 2. The backward of the head computes its logits again, and every rank of a
    tensor-parallel group computes the head for all tokens of the group.
    """
    shape = work.shapes.trained(name)
    if shape is None:
        return 0.0
    models, update = work.config.models, work.config.update
    body = shape.forward_flops(work.num_tokens, work.sequence_tokens)
    head = shape.head_flops(update.tensor_parallel_size * work.num_sequences * work.response_tokens)
    factor = (2 if models.lora.rank else 3) + models.gradient_checkpointing
    launching = factor * shape.num_layers * num_micro_batches(work) * rates.launch_s
    flops_per_s = rates.matmul_flops * rates.update_efficiency
    return launching + update.num_epochs * (factor * body + 4 * head) / flops_per_s


def num_micro_batches(work: Workload) -> int:
    """Return the micro-batches of a rank in all epochs; sequence-parallel ranks compute all of their group's."""
    update = work.config.update
    tokens = update.num_epochs * update.sequence_parallel_size * work.num_tokens
    return max(num_optimizer_steps(work), -(-tokens // update.micro_batch_tokens))


def num_optimizer_steps(work: Workload) -> int:
    """Return the optimizer steps of all epochs."""
    update = work.config.update
    return update.num_epochs * (work.config.responses_per_step // update.mini_batch_size)
