"""Memory while a checkpoint or an export is written: on each GPU, and on the host of a node."""

from collections.abc import Sequence

from hybrid_rl.memory.residency import ALL_PHASES, RESIDENCY, UPDATE_ACTOR
from hybrid_rl.planning.footprint import GATHERED_BYTES
from hybrid_rl.planning.plan import Allocation, Moment
from hybrid_rl.planning.training_memory import frozen_bytes, num_trained
from hybrid_rl.planning.workload import Workload

FILE_BYTES = 4 << 30
"""Largest file of an export that holds more than one tensor, restated from models/exporting.py."""


def ema_bytes(work: Workload) -> int:
    """Return the bytes of a node's memory for the moving average of the actor, of which each rank has a share."""
    config, machine = work.config, work.machine
    if config.models.ema_decay is None:
        return 0
    return 4 * work.shapes.actor.num_params // machine.num_ranks * machine.num_gpus


def saving_moments(work: Workload, allocations: Sequence[Allocation]) -> tuple[Moment, ...]:
    """Return the moments after an update at which a checkpoint is copied to the host, and the actor is exported.

    Args:
        work: settings and size of a step.
        allocations: all allocations of the plan, with the tenants that stay resident in every phase.
    """
    config = work.config.checkpoint
    moments = [_checkpoint(work, allocations)] if config.every_steps else []
    if config.export or config.export_every_steps or config.keep_best:
        moments.append(_export(work, allocations))
    return tuple(moments)


def _checkpoint(work: Workload, allocations: Sequence[Allocation]) -> Moment:
    """Return the moment of a checkpoint.

    The GPU gathers one float32 tensor at a time and copies it; each rank copies 12 bytes of each trained parameter of
    its share to the host, and its share of the moving average and of a reference that moves. The main rank alone
    copies a reference that is whole on every rank.
    """
    shapes, machine = work.shapes, work.machine
    trained = [shape for shape in (shapes.actor, shapes.critic) if shape]
    largest = max(min(shape.largest_tensor, num_trained(work, shape)) for shape in trained)
    copies = sum(12 * num_trained(work, shape) for shape in trained)
    reference = 0
    if work.config.models.reference_sync_steps and shapes.reference:
        reference = frozen_bytes(work, shapes.reference) * (machine.num_gpus if work.shards_frozen else 1)
    host = copies // machine.num_ranks * machine.num_gpus + ema_bytes(work) + reference
    return _moment(work, allocations, "checkpoint", gpu_bytes=2 * 4 * largest, host_bytes=host)


def _export(work: Workload, allocations: Sequence[Allocation]) -> Moment:
    """Return the moment of an export, of which the main rank writes one file after the other.

    With ZeRO-3 the GPU gathers a bucket of weights at a time.
    """
    actor, dtype_bytes = work.shapes.actor, work.dtype_bytes
    whole, largest = dtype_bytes * actor.num_params, dtype_bytes * actor.largest_tensor
    bucket = min(whole, max(GATHERED_BYTES, largest))
    file = min(whole, max(FILE_BYTES, largest))
    is_gathering = work.config.update.zero_stage == 3 and work.machine.num_ranks > 1
    return _moment(work, allocations, "export", gpu_bytes=bucket * is_gathering, host_bytes=file + bucket)


def _moment(work: Workload, allocations: Sequence[Allocation], name: str, *, gpu_bytes: int, host_bytes: int) -> Moment:
    """Return a moment of UPDATE_ACTOR, at which no activations are left, with further bytes on each GPU and node."""
    held = [a for a in allocations if a.phases == ALL_PHASES or (UPDATE_ACTOR in a.phases and a.name in RESIDENCY)]
    pinned = work.machine.num_gpus * sum(allocation.host_bytes for allocation in allocations)
    return Moment(
        name=name,
        gpu_bytes=gpu_bytes + sum(allocation.num_bytes for allocation in held),
        host_bytes=pinned + ema_bytes(work) + host_bytes,
    )
