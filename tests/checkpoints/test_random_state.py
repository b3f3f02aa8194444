"""The seed of a run reaches every generator whose state a checkpoint keeps."""

import random

import numpy as np
import pytest
import torch

from hybrid_rl.checkpoints.random_state import seed_generators, unchanged_generators

DRAWS = [random.random, np.random.random, lambda: float(torch.rand(1))]


@pytest.mark.parametrize("draw", DRAWS, ids=["python", "numpy", "torch"])
def test_generators_are_as_before_after_work_that_draws_numbers(draw):
    draw()
    with unchanged_generators():
        numbers = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] == numbers


@pytest.mark.parametrize("draw", DRAWS, ids=["python", "numpy", "torch"])
def test_one_seed_gives_one_sequence_of_numbers(draw):
    with torch.random.fork_rng(devices=[]):
        states = random.getstate(), np.random.get_state()
        sequences = []
        for seed in (7, 7, 2**32 - 1):
            seed_generators(seed)
            sequences.append([draw() for _ in range(3)])
        random.setstate(states[0])
        np.random.set_state(states[1])
    assert sequences[0] == sequences[1] != sequences[2]
