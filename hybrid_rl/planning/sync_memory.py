"""Memory of the weight sync on one GPU."""

from hybrid_rl.memory.residency import SYNC
from hybrid_rl.planning.plan import Allocation
from hybrid_rl.planning.workload import Workload
from hybrid_rl.weights.bucket import bucket_bytes, plan_halves

CHECKSUM_BYTES = 72 << 20
"""Memory of one checksum: 8 rows of 2^20 int64 products and a row of factors, counted in weights.checksum."""


def sync_allocations(work: Workload) -> list[Allocation]:
    """Return the bucket, the checksums of both sides, and the weights that a bucket gathers from their shards."""
    buckets = plan_halves(work.actor_tensors, work.config.sync.bucket_bytes)
    staging = 0 if work.aliases_weights else bucket_bytes(buckets)
    found = [
        Allocation(name="staging bucket", num_bytes=staging),
        Allocation(name="checksums", num_bytes=2 * CHECKSUM_BYTES, phases=frozenset({SYNC})),
    ]
    update = work.config.update
    if update.tensor_parallel_size > 1 or (update.zero_stage == 3 and work.machine.num_ranks > 1):
        largest = max(sum(slot.nbytes for slot in bucket) for bucket in buckets)
        found.append(Allocation(name="gathered weights", num_bytes=largest, phases=frozenset({SYNC})))
    return found
