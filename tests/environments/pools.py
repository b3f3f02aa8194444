"""Answers of a pool of environments for tests."""

import time

from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.environments.process import Answer


def next_answer(pool: EnvironmentPool) -> Answer:
    """Return the next answer, which is the only one, in the time of a slow machine."""
    end = time.monotonic() + 60
    while not (found := pool.receive(1.0)):
        assert time.monotonic() < end
    assert len(found) == 1
    return found[0]
