"""GPU kernels that repeat their results bit for bit."""

import os

import torch


def use_deterministic_kernels() -> None:
    """Select deterministic GPU kernels in this process and in the processes that it starts.

    cuBLAS gets a workspace of its own per stream, attention's backward adds in a fixed order, and PyTorch raises an
    error for an operation that has no deterministic kernel. Call it before the first matrix product on a GPU.

    Source: PyTorch's notes on reproducibility.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # read by transformers
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # every kernel here writes its whole output
