"""Memory of the weight sync on one GPU."""

import functools

from hybrid_rl.memory.residency import SYNC
from hybrid_rl.planning.adapter_memory import adapter_bucket_bytes
from hybrid_rl.planning.plan import Allocation
from hybrid_rl.planning.workload import Workload
from hybrid_rl.weights.bucket import bucket_bytes, plan_halves
from hybrid_rl.weights.protocols import NamedShape

CHECKSUM_BYTES = 72 << 20
"""Memory of one checksum: 8 rows of 2^20 int64 products and a row of factors, counted in weights.checksum."""


@functools.lru_cache(maxsize=8)
def bucket_sizes(tensors: tuple[NamedShape, ...], num_bytes: int) -> tuple[int, int]:
    """Return the bytes of the buffer of a weight sync by copies, and of the largest bucket in it.

    Args:
        tensors: name, shape and dtype of each weight.
        num_bytes: sync.bucket_bytes.
    """
    buckets = plan_halves(tensors, num_bytes)
    return bucket_bytes(buckets), max(sum(slot.nbytes for slot in bucket) for bucket in buckets)


def sync_allocations(work: Workload) -> list[Allocation]:
    """Return the bucket, the checksums of both sides, and the weights that a bucket gathers from their shards."""
    copied, largest = bucket_sizes(work.actor_tensors, work.config.sync.bucket_bytes)
    staging = 0 if work.aliases_weights else copied
    found = [
        Allocation(
            name="staging bucket", num_bytes=adapter_bucket_bytes(work) if work.sync.sends_adapters else staging
        ),
        Allocation(name="checksums", num_bytes=2 * CHECKSUM_BYTES, phases=frozenset({SYNC})),
    ]
    update = work.config.update
    if update.tensor_parallel_size > 1 or (update.zero_stage == 3 and work.machine.num_ranks > 1):
        found.append(Allocation(name="gathered weights", num_bytes=largest, phases=frozenset({SYNC})))
    return found
