"""Hugging Face models on packed sequences: loading, attention, adapters, fused kernels, parallelism."""
