"""Colocated RLHF/RLVR training: DeepSpeed trains and vLLM generates on the same GPUs, in turns."""

__version__ = "0.1.0"
