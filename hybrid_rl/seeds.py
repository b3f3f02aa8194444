"""Seeds of samples, which depend on neither the number of ranks nor the batching."""

import hashlib


def request_seed(*parts: int) -> int:
    """Return the seed that follows from some numbers, such as the run's seed, a step and a response, 32 bits."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
