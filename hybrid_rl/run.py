"""Everything that a run consists of, on one rank."""

import gc
from dataclasses import dataclass
from typing import Any, Protocol

from hybrid_rl.algorithms.advantage import KlController
from hybrid_rl.checkpoints import saver as checkpoint
from hybrid_rl.checkpoints.phase_log import PhaseLog
from hybrid_rl.config import Config
from hybrid_rl.data.loading import Data
from hybrid_rl.distributed import World
from hybrid_rl.engines import RolloutEngine, TrainEngine
from hybrid_rl.memory.phases import MemoryManager
from hybrid_rl.monitoring.recorder import Recorder
from hybrid_rl.rewards import RunningNormalizer
from hybrid_rl.rewards.scoring import RewardSources
from hybrid_rl.steps.ema import MovingAverage, MovingReference
from hybrid_rl.steps.logprobs import Forward
from hybrid_rl.steps.ptx import PtxLoss
from hybrid_rl.weights.sync import WeightSync


class Counter(Protocol):
    """What a checkpoint keeps as plain values, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what state_dict returned."""
        ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a run is made of, on this rank."""

    config: Config
    world: World
    data_parallel: World
    """This rank among those whose sequences differ from SCORE to the updates: one of each group that works together."""
    data: Data
    recorder: Recorder
    memory: MemoryManager
    engine: RolloutEngine
    actor: TrainEngine
    critic: TrainEngine | None
    reference: Forward | None
    """A frozen model, or the actor without its adapter."""
    sources: RewardSources
    normalizer: RunningNormalizer | None
    kl: KlController
    ema: MovingAverage | None
    ptx: PtxLoss | None
    weight_sync: WeightSync
    saver: checkpoint.Saver
    phase_log: PhaseLog | None
    steps_done: int
    """Steps that a checkpoint brought; 0 for a new run."""

    @property
    def counters(self) -> dict[str, Counter]:
        """What a checkpoint keeps as plain values."""
        found: dict[str, Counter | None] = {
            "loader": self.data.loader,
            "kl": self.kl,
            "normalizer": self.normalizer,
            "ptx": self.ptx,
        }
        return {name: part for name, part in found.items() if part is not None}

    @property
    def saved_parts(self) -> dict[str, checkpoint.Saved]:
        """What a checkpoint keeps in files beside the models that learn."""
        moving = self.reference if isinstance(self.reference, MovingReference) else None
        found: dict[str, checkpoint.Saved | None] = {"ema": self.ema, "reference": moving}
        return {name: part for name, part in found.items() if part is not None}

    def close(self) -> None:
        """End the processes that belong to the run."""
        gc.unfreeze()
        self.saver.close()
        self.engine.close()
        for scorer in (self.data.scorer, self.data.eval_scorer):
            if scorer:
                scorer.close()
