"""The comparison of a phase's measured peak with its plan, which memory.enforce asks for."""

import logging
from collections.abc import Mapping

from hybrid_rl.config import MemoryConfig
from hybrid_rl.errors import RunError

logger = logging.getLogger(__name__)

GIB = 1 << 30
NUM_NAMED = 3
"""Allocations of the plan that a message names."""


class Enforcement:
    """Warns or ends the run where a phase takes more of the GPU than its plan and the margin; once per phase."""

    def __init__(self, config: MemoryConfig, *, rank: int) -> None:
        """Take the settings.

        Args:
            rank: this rank, for messages.
        """
        self._config = config
        self._rank = rank
        self._reported: set[str] = set()

    def compare(self, phase: str, planned: Mapping[str, int], peak_bytes: int) -> None:
        """Compare the peak of a phase with its plan.

        Args:
            planned: allocation -> planned bytes at the phase's peak.
            peak_bytes: measured, without what other programs held at the start of the run.
        Raises:
            RunError: memory.enforce = stop, and the peak exceeds plan and margin.
        """
        planned_bytes = sum(planned.values())
        is_within = peak_bytes <= (1 + self._config.enforce_margin) * planned_bytes
        if is_within or self._config.enforce == "off" or phase in self._reported:
            return
        self._reported.add(phase)
        message = self._describe(phase, planned, peak_bytes)
        if self._config.enforce == "stop":
            raise RunError(message)
        logger.warning("%s", message)

    def _describe(self, phase: str, planned: Mapping[str, int], peak_bytes: int) -> str:
        largest = sorted(planned.items(), key=lambda item: -item[1])[:NUM_NAMED]
        names = ", ".join(f"{name} with {num_bytes / GIB:.1f} GiB" for name, num_bytes in largest)
        return (
            f"phase {phase} took {_show(peak_bytes)} of the GPU of rank {self._rank}, more than its plan of "
            f"{_show(sum(planned.values()))} and memory.enforce_margin = {self._config.enforce_margin:g} "
            f"(memory.enforce = {self._config.enforce}); the largest parts of the plan are {names}; lower "
            "update.micro_batch_tokens or rollout.kv_cache_memory_bytes, or end what else uses the GPU"
        )


def _show(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes ({num_bytes / GIB:.1f} GiB)"
