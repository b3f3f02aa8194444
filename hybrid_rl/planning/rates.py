"""Rates of a GPU, its links and the engine's host, from which the duration of a step is predicted."""

from dataclasses import dataclass, replace

from hybrid_rl.planning.cards import CARDS, Card

GB = 1e9
MEASURED_ON = CARDS["h200"]
"""The card of the measured rates."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Defaults are measurements on one H200 with torch 2.11, vLLM 0.26 and DeepSpeed 0.19, unless stated."""

    matmul_flops: float = 790e12
    """Dense bf16 operations per second; best rate of cuBLAS."""
    forward_efficiency: float = 0.65
    """Fraction of matmul_flops in forwards; measured in SCORE with a 1.5B model."""
    update_efficiency: float = 0.87
    """Fraction of matmul_flops in forward and backward, without `launch_s`; measured with a 1.5B actor."""
    launch_s: float = 1.6e-3
    """Seconds per layer, pass and micro-batch besides the products, mostly kernel launches; measured as above."""
    memory_bytes_per_s: float = 4.21e12
    """Device memory, read and written; a copy of 2.9 GiB on the device."""
    decode_efficiency: float = 0.4
    """Fraction of memory_bytes_per_s in a decode step; an assumption."""
    host_s_per_step: float = 2.4e-3
    """Seconds of host work per decode step, regardless of the sequences."""
    host_s_per_sequence: float = 13.2e-6
    """Seconds of host work per sequence and decode step; measured with 128 and 512 sequences."""
    bus_out_bytes_per_s: float = 55.1 * GB
    """Device to pinned host memory."""
    bus_in_bytes_per_s: float = 55.1 * GB
    """Pinned host memory to device."""
    deepspeed_out_bytes_per_s: float = 21 * GB
    """DeepSpeed's offload_states with ZeRO-2."""
    deepspeed_in_bytes_per_s: float = 48 * GB
    """DeepSpeed's reload_states with ZeRO-2."""
    node_bytes_per_s: float = 260 * GB
    """Per GPU and direction within a node; all-reduces of 200 MB between two H200 over NVLink."""
    network_bytes_per_s: float = 40 * GB
    """Per GPU between nodes; 80 % of one 400 Gbit/s port per GPU, not measured."""
    sync_s: float = 0.037
    """Host seconds of a weight sync through one bucket with a 1.5B model."""


def rates_of(card: Card) -> Rates:
    """Return the rates of a card: the measured ones, scaled by the ratio of the peaks that limit them.

    Products scale with the operations per second, decode steps with the memory, swaps with the bus, collectives with
    NVLink. Without NVLink collectives take the bus. The host and the network between nodes count as the same.
    """
    measured, peak = Rates(), MEASURED_ON
    memory = card.memory_bytes_per_s / peak.memory_bytes_per_s
    bus = card.bus_bytes_per_s / peak.bus_bytes_per_s
    assert peak.nvlink_bytes_per_s is not None
    links = card.nvlink_bytes_per_s
    node = measured.node_bytes_per_s * links / peak.nvlink_bytes_per_s if links else measured.bus_out_bytes_per_s * bus
    return replace(
        measured,
        matmul_flops=measured.matmul_flops * card.bf16_flops / peak.bf16_flops,
        memory_bytes_per_s=measured.memory_bytes_per_s * memory,
        bus_out_bytes_per_s=measured.bus_out_bytes_per_s * bus,
        bus_in_bytes_per_s=measured.bus_in_bytes_per_s * bus,
        deepspeed_out_bytes_per_s=measured.deepspeed_out_bytes_per_s * bus,
        deepspeed_in_bytes_per_s=measured.deepspeed_in_bytes_per_s * bus,
        node_bytes_per_s=node,
    )
