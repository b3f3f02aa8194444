"""Seconds that one rank communicates in a step: collectives over all ranks, exchanges in model-parallel groups, bus."""

from hybrid_rl.planning.compute_time import num_micro_batches, num_optimizer_steps, score_forwards, shape_of
from hybrid_rl.planning.plan import Plan
from hybrid_rl.planning.rates import Rates
from hybrid_rl.planning.training_memory import TRAINED
from hybrid_rl.planning.workload import Workload


def bus_seconds(plan: Plan, swap: str, rates: Rates) -> float:
    """Return the seconds of a step that a GPU copies to and from the host, one direction after the other.

    DeepSpeed moves the optimizer with memory.swap = deepspeed; all other tenants move at the speed of the bus.
    """
    if swap == "off":
        return 0.0
    seconds = 0.0
    for allocation in plan.allocations:
        spec = plan.residency.get(allocation.name)
        by_deepspeed = swap == "deepspeed" and spec is not None and spec.content == "optimizer"
        out = rates.deepspeed_out_bytes_per_s if by_deepspeed else rates.bus_out_bytes_per_s
        back = rates.deepspeed_in_bytes_per_s if by_deepspeed else rates.bus_in_bytes_per_s
        seconds += allocation.out_bytes / out + allocation.in_bytes / back
    return seconds


def collective_seconds(work: Workload, rates: Rates) -> float:
    """Return the seconds of the collectives over all ranks in SCORE and both updates; none overlaps with computing.

    DeepSpeed reduces gradients in the dtype of the weights: per optimizer step with ZeRO 0 and 1, per micro-batch with
    2 and 3. Up to ZeRO-2 it uses an all-reduce, which transfers twice the bytes of a reduce-scatter. ZeRO-1 and 2
    gather weights once per optimizer step, ZeRO-3 in every forward and backward.
    """
    update, lora, num_ranks = work.config.update, work.config.models.lora, work.machine.num_ranks
    sent = (num_ranks - 1) / num_ranks  # fraction of a tensor that a ring sends per GPU
    steps, micros = num_optimizer_steps(work), num_micro_batches(work)
    reductions = {0: 2 * steps, 1: 2 * steps, 2: 2 * micros, 3: micros}[update.zero_stage]
    seconds = 0.0
    for name in TRAINED:
        shape = work.shapes.trained(name)
        if shape is None:
            continue
        num_trained = shape.num_adapted(lora) if lora.rank else shape.num_params
        seconds += reductions * work.dtype_bytes * num_trained * sent / _ring_bytes_per_s(work, rates)
        if update.zero_stage in (1, 2):
            seconds += steps * work.dtype_bytes * num_trained * sent / _ring_bytes_per_s(work, rates)
        seconds += gather_seconds(work, rates, name, times=2 * micros + micros // max(1, update.num_epochs))
    return seconds


def gather_seconds(work: Workload, rates: Rates, name: str, *, times: int) -> float:
    """Return the seconds of gathering all weights of `actor` or `critic` from the shards of ZeRO-3; 0 without it."""
    num_ranks, shape = work.machine.num_ranks, work.shapes.trained(name)
    if work.config.update.zero_stage < 3 or shape is None:
        return 0.0
    gathered = times * work.dtype_bytes * shape.num_params
    return gathered * (num_ranks - 1) / num_ranks / _ring_bytes_per_s(work, rates)


def _ring_bytes_per_s(work: Workload, rates: Rates) -> float:
    """Return the bytes per second and GPU of a ring over all ranks, which its slowest link limits."""
    return rates.node_bytes_per_s if work.machine.num_nodes == 1 else rates.network_bytes_per_s


def exchange_seconds(work: Workload, rates: Rates) -> float:
    """Return the seconds of exchanging activations in the model-parallel groups of a node.

    Sequence-parallel ranks exchange queries, keys, values and attention's output, and as much in the backward; keys are
    repeated if there are fewer heads than ranks. Tensor-parallel ranks have all tokens of their group and all-reduce
    hidden states, twice per layer in the forward and five times in the backward.
    """
    update, recomputes = work.config.update, work.config.models.gradient_checkpointing
    sequence_size, tensor_size = update.sequence_parallel_size, update.tensor_parallel_size
    forwards, elements = score_forwards(work), 0.0
    for name in ("actor", "critic", "reward"):
        shape = shape_of(work, name)
        if shape is None:
            continue
        epochs = 0 if name == "reward" else update.num_epochs
        num_forwards = sum(forward.name == name for forward in forwards)
        num_sharded = sum(forward.name == name and forward.is_sharded for forward in forwards)
        key_size = max(shape.key_size, sequence_size * shape.head_size)
        passes = num_forwards + (2 + recomputes) * epochs
        exchanged = passes * shape.num_layers * 2 * (shape.query_size + key_size)
        elements += exchanged * (sequence_size - 1) / sequence_size
        sums = 2 * num_sharded + (7 + 2 * recomputes) * epochs
        elements += sums * shape.num_layers * 2 * shape.hidden_size * (tensor_size - 1)
    return elements * work.num_tokens * work.dtype_bytes / rates.node_bytes_per_s
