"""Dynamic filtering: groups whose scores carry no gradient are replaced by groups of further prompts."""

import logging
import math
import random
from collections import defaultdict

import torch

from hybrid_rl.config import ConfigError
from hybrid_rl.distributed import World
from hybrid_rl.rewards.scoring import Scored

logger = logging.getLogger(__name__)


def informative_rows(scored: Scored, bounds: tuple[float, float]) -> list[int]:
    """Return the rows of the groups whose mean score lies strictly between the bounds, all rounded to float32.

    A function may give scores of its own for the filter. In float64 a weighted sum such as 0.7 + 0.2 + 0.1 lies below
    the bound 1.

    Source: Yu et al. 2025 (DAPO), section 3.2: a group of equal scores has no gradient, and with scores of 0 and 1 the
    bounds 0 and 1 exclude these groups.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for row, rollout in enumerate(scored.rollouts):
        groups[rollout.prompt.prompt_id].append(row)
    scores = scored.filtered_scores.float().tolist()
    means = torch.tensor([math.fsum(scores[row] for row in rows) / len(rows) for rows in groups.values()])
    low, high = torch.tensor(bounds)
    is_kept = ((low < means) & (means < high)).tolist()
    return sorted(row for rows, keep in zip(groups.values(), is_kept, strict=True) if keep for row in rows)


class DynamicFilter:
    """Collects the groups that a step keeps, over several batches of prompts and all ranks."""

    def __init__(self, bounds: tuple[float, float], world: World) -> None:
        """Start without groups; bounds are rollout.dynamic_filtering_reward_range."""
        self._bounds = bounds
        self._world = world
        self._kept: Scored | None = None
        self._groups: set[int] = set()  # prompt ids of the groups kept so far, over all ranks
        self.seen: set[int] = set()
        """Prompt ids sampled so far, over all ranks."""
        # Number of responses, sum of their scores, failures of functions, batches of prompts.
        self._sampled = torch.zeros(4, dtype=torch.float64)

    @property
    def num_groups(self) -> int:
        """Groups kept so far, over all ranks."""
        return len(self._groups)

    def add(self, scored: Scored) -> None:
        """Keep this rank's groups whose mean score lies between the bounds; a collective."""
        part = scored.select(informative_rows(scored, self._bounds))
        self._kept = part if self._kept is None else self._kept + part
        sums = [len(scored.scores), float(scored.filtered_scores.sum()), len(scored.failed), 0]
        self._sampled += self._world.sum(torch.tensor(sums, dtype=torch.float64)) + torch.tensor([0, 0, 0, 1])
        for seen, kept in self._world.all_gather((_prompt_ids(scored), _prompt_ids(part))):
            self.seen |= seen
            self._groups |= kept

    def take(self, num_groups: int, *, seed: int) -> tuple[Scored, dict[str, float]]:
        """Return this rank's responses of at most num_groups groups, drawn by the seed, and the metrics of filtering.

        Raises:
            ConfigError: all ranks together have kept no group.
        """
        assert self._kept is not None
        groups = sorted(self._groups)
        num_responses, total_score, num_failed, num_batches = self._sampled.tolist()
        mean_score = total_score / max(num_responses, 1)
        kept = f"{len(groups)} of {num_groups} groups after {num_batches:.0f} batches of prompts"
        reason = f"mean score {mean_score:.3f}, rollout.dynamic_filtering_reward_range = {list(self._bounds)}"
        if not groups:
            raise ConfigError(f"dynamic filtering kept {kept} ({reason}): change the prompts or the range")
        if len(groups) < num_groups:
            logger.warning("dynamic filtering gave up with %s (%s); the step continues with them", kept, reason)
        random.Random(seed).shuffle(groups)
        taken = set(groups[:num_groups])
        rows = [row for row, rollout in enumerate(self._kept.rollouts) if rollout.prompt.prompt_id in taken]
        metrics = {
            "filter/score": mean_score,
            "filter/num_failed": num_failed / max(num_responses, 1),
            "filter/batches": num_batches,
            "filter/groups": float(len(taken)),
        }
        return self._kept.select(rows), metrics


def _prompt_ids(scored: Scored) -> set[int]:
    return {rollout.prompt.prompt_id for rollout in scored.rollouts}
