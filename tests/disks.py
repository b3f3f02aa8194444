"""A disk that is full for this process, without a file system of its own."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def a_full_disk(num_bytes: int = 0) -> Iterator[None]:
    """Let no file of this process grow beyond some bytes in the body: a write ends in the middle, with an OSError.

    The kernel applies the limit to every file that is written, whatever code or library writes it. The error is EFBIG
    instead of ENOSPC; Python ignores the signal that precedes it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
