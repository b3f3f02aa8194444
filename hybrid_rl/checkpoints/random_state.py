"""The random generators of a rank: their seed, and their state as tensors of a checkpoint."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_rl.checkpoints.snapshot import SavedTensors, Snapshot


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, the GPU's included.

    Args:
        seed: from 0 to 2**32 - 1.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Give the generators of Python, NumPy, torch and the GPU the state back that they have before the body."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)


def take_random_state(rank: int) -> Snapshot:
    """Return the state of the generators of Python, NumPy, torch and, if there is one, the GPU.

    Args:
        rank: of this process, which the tensors' names start with.
    """
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    _, keys, position, has_gauss, cached = numpy_state
    tensors = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return Snapshot(tensors={f"rank_{rank}/{name}": tensor for name, tensor in tensors.items()})


def restore_random_state(saved: SavedTensors, rank: int) -> None:
    """Set the generators of this process to the state that a rank saved."""

    def state(name: str) -> Tensor:
        return saved[f"rank_{rank}/{name}"]

    version, *words = state("python").tolist()
    gauss = state("python_gauss").tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = state("numpy").tolist()
    cached = float(state("numpy_gauss"))
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state("torch"))
    if torch.cuda.is_available() and f"rank_{rank}/cuda" in saved.names:
        torch.cuda.set_rng_state(state("cuda"))
