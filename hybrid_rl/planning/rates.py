"""Rates of a GPU, its links and the engine's host, from which the duration of a step is predicted."""

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Defaults are measurements on one H100 80GB with torch 2.11, vLLM 0.26 and DeepSpeed 0.19, unless stated."""

    matmul_flops: float = 790e12
    """Dense bf16 operations per second; best rate of cuBLAS."""
    forward_efficiency: float = 0.65
    """Fraction of matmul_flops in forwards; measured in SCORE with a 1.5B model on an H200."""
    update_efficiency: float = 0.87
    """Fraction of matmul_flops in forward and backward, without `launch_s`; measured with a 1.5B actor on an H200."""
    launch_s: float = 1.6e-3
    """Seconds per layer, pass and micro-batch besides the products, mostly kernel launches; measured as above."""
    memory_bytes_per_s: float = 3.01e12
    """Device memory, read and written."""
    decode_efficiency: float = 0.4
    """Fraction of memory_bytes_per_s in a decode step; an assumption."""
    host_s_per_step: float = 2.4e-3
    """Seconds of host work per decode step, regardless of the sequences; measured on an H200's host."""
    host_s_per_sequence: float = 13.2e-6
    """Seconds of host work per sequence and decode step; measured as above with 128 and 512 sequences."""
    bus_out_bytes_per_s: float = 55.1 * GB
    """Device to pinned host memory."""
    bus_in_bytes_per_s: float = 55.1 * GB
    """Pinned host memory to device."""
    deepspeed_out_bytes_per_s: float = 13 * GB
    """DeepSpeed's offload_states with ZeRO-2."""
    deepspeed_in_bytes_per_s: float = 43 * GB
    """DeepSpeed's reload_states with ZeRO-2."""
    node_bytes_per_s: float = 260 * GB
    """Per GPU and direction within a node; all-reduces of 200 MB between two H200 over NVLink."""
    network_bytes_per_s: float = 40 * GB
    """Per GPU between nodes; 80 % of one 400 Gbit/s port per GPU, not measured."""
    sync_s: float = 0.037
    """Host seconds of a weight sync through one bucket with a 1.5B model."""
