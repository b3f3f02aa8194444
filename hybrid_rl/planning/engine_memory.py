"""Memory of the rollout engine on one GPU: weights, KV cache, context and activations."""

from collections.abc import Iterable

from hybrid_rl.config import Config, check
from hybrid_rl.memory.residency import ROLLOUT, Phase
from hybrid_rl.planning.adapter_memory import engine_adapter_bytes
from hybrid_rl.planning.plan import GIB, Allocation, Plan, peak_bytes
from hybrid_rl.planning.shapes import Shapes
from hybrid_rl.planning.workload import Workload

ENGINE_CONTEXT_BYTES, GRAPHS_LAYER_BYTES = int(0.9 * GIB), int(0.8 * GIB) // 28
"""Memory of a sleeping engine, and of the CUDA graphs of a layer: measured with vLLM 0.26 on an H200."""
ENGINE_BATCH_TOKENS = 8192
"""vLLM's default of max_num_batched_tokens on an 80 GB GPU."""
KV_BLOCK_TOKENS = 16
"""vLLM's default block size on a GPU."""


def engine_weight_bytes(work: Workload) -> int:
    """Return the bytes of the engine's own weights: a copy, unless they are views of the trainer's, and its adapter."""
    num_bytes = work.dtype_bytes * work.shapes.actor.num_params // work.config.rollout.tensor_parallel_size
    return (0 if work.aliases_weights else num_bytes) + engine_adapter_bytes(work)


def kv_token_bytes(work: Workload) -> int:
    """Return the bytes of one token's keys and values."""
    return work.shapes.actor.kv_bytes_per_token(work.dtype_bytes, num_gpus=work.config.rollout.tensor_parallel_size)


def kv_sequence_tokens(work: Workload) -> int:
    """Return the tokens of the KV blocks of one full sequence, in training or evaluation."""
    return -(-work.config.max_engine_tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def kv_cache_bytes(work: Workload, others: Iterable[Allocation], phases: Iterable[Phase]) -> int:
    """Return the size of the KV cache: as set, otherwise as needed and available.

    It holds all concurrent sequences if the phases leave room for them, and one sequence in any case.

    Args:
        work: size of a step.
        others: all other allocations.
        phases: phases in which the KV cache is resident.
    """
    if (wanted := work.config.rollout.kv_cache_memory_bytes) is not None:
        return wanted
    others, token_bytes = list(others), kv_token_bytes(work)
    used = max(peak_bytes(others, phase) for phase in phases)
    available = (work.machine.budget_bytes - used) // token_bytes
    needed = work.max_concurrent_sequences * kv_sequence_tokens(work) + KV_BLOCK_TOKENS  # one is vLLM's null block
    least = kv_sequence_tokens(work) + KV_BLOCK_TOKENS
    tokens = max(least, min(needed, available)) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    return tokens * token_bytes


def engine_allocations(work: Workload) -> list[Allocation]:
    """Return the allocations of a vLLM engine besides weights and KV cache; none for other engines."""
    rollout = work.config.rollout
    if rollout.engine != "vllm":
        return []
    graphs = 0 if rollout.enforce_eager else GRAPHS_LAYER_BYTES * work.shapes.actor.num_layers
    return [
        Allocation(name="engine context", num_bytes=ENGINE_CONTEXT_BYTES + graphs),
        Allocation(name="engine activations", num_bytes=_activation_bytes(work), phases=frozenset({ROLLOUT})),
    ]


def _activation_bytes(work: Workload) -> int:
    """Return an estimate: the peak of a layer over a prefill batch, and three copies of float32 logits of a batch."""
    shape = work.shapes.actor
    layer = shape.transient_bytes(ENGINE_BATCH_TOKENS, work.dtype_bytes)
    return layer + 3 * 4 * work.max_concurrent_sequences * shape.vocab_size


def check_engine_heads(config: Config, shapes: Shapes) -> None:
    """Check that the engine can divide the actor's attention heads over its GPUs.

    Raises:
        ConfigError: it cannot.
    """
    size, heads = config.rollout.tensor_parallel_size, shapes.actor.num_heads
    check(heads % size == 0, f"rollout.tensor_parallel_size = {size}: must divide the actor's {heads} attention heads")


def check_kv_cache(config: Config, plan: Plan) -> None:
    """Check that a KV cache whose size is set holds one sequence, without which vLLM does not start.

    Layers with a sliding window may need less; such a size is refused all the same.

    Raises:
        ConfigError: it does not.
    """
    size = config.rollout.kv_cache_memory_bytes
    check(
        size is None or config.rollout.engine != "vllm" or plan.kv_sequences > 0,
        f"rollout.kv_cache_memory_bytes = {size}: holds {plan.kv_tokens:,} tokens, and one sequence of prompt and "
        f"response has {config.max_engine_tokens:,}; set null, which takes what the plan leaves",
    )
