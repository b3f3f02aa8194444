"""Memory of low-rank adapters in the rollout engine, and of the bucket through which a weight sync sends them."""

import torch

from hybrid_rl.planning.workload import Workload
from hybrid_rl.weights.adapter_sync import plan_adapters
from hybrid_rl.weights.bucket import bucket_bytes
from hybrid_rl.weights.choice import adapter_rank
from hybrid_rl.weights.layout import FUSED
from hybrid_rl.weights.protocols import NamedShape

COLUMN_SHARDED = frozenset({"o_proj", "down_proj", "out_proj", "c_proj", "dense"})
"""Linear layers of which a tensor-parallel engine shards the inputs; of the others it shards the outputs."""


def adapted_linears(work: Workload) -> list[tuple[str, int, int]]:
    """Return name, inputs and outputs of the actor's linear layers that have an adapter."""
    lora = work.config.models.lora
    if not lora.rank:
        return []
    targets = lora.target_modules
    return [linear for linear in work.shapes.actor.linears if targets is None or linear[0] in targets]


def engine_adapter_bytes(work: Workload) -> int:
    """Return the bytes of the adapter on each GPU of the engine; 0 where it gets merged weights.

    vLLM pads the rank, and allocates all parts of a layer that it fuses if one part has an adapter. For a layer whose
    outputs are divided among N GPUs, each GPU holds the matrix A and an N-th of B; for one whose inputs are, an N-th of
    A and B.
    """
    if not work.sync.sends_adapters:
        return 0
    config, num_elements = work.config, 0
    num_gpus, rank = config.rollout.tensor_parallel_size, adapter_rank(config.models.lora.rank)
    adapted = {name for name, _, _ in adapted_linears(work)}
    adapted.update(name for group in FUSED if adapted & set(group) for name in group)
    for name, inputs, outputs in work.shapes.actor.linears:
        if name in adapted:
            is_column_sharded = name in COLUMN_SHARDED
            a, b = (inputs // num_gpus, outputs) if is_column_sharded else (inputs, outputs // num_gpus)
            num_elements += rank * (a + b)
    return work.dtype_bytes * num_elements


def adapter_bucket_bytes(work: Workload) -> int:
    """Return the bytes of the bucket of a weight sync that sends adapters, and the base where the engine copies it."""
    rank = work.config.models.lora.rank
    dtype = torch.float32 if work.dtype_bytes == 4 else torch.bfloat16
    matrices: list[NamedShape] = []
    for index, (_, inputs, outputs) in enumerate(adapted_linears(work)):
        matrices += [(f"{index}.A", (rank, inputs), dtype), (f"{index}.B", (outputs, rank), dtype)]
    base = () if work.aliases_weights else work.actor_tensors
    buckets, slots = plan_adapters(base, matrices, work.config.sync)
    return bucket_bytes([*buckets, slots])
