"""Everything that a run consists of, on one rank."""

import gc
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybrid_rl.algorithms.kl import KlController
from hybrid_rl.checkpoints.phase_log import PhaseLog
from hybrid_rl.checkpoints.random_state import take_random_state
from hybrid_rl.checkpoints.run_folder import RunFolder
from hybrid_rl.checkpoints.saver import CheckpointPart, Saver
from hybrid_rl.checkpoints.snapshot import Snapshot
from hybrid_rl.config import Config
from hybrid_rl.conversations.setup import Environments
from hybrid_rl.data.loading import Data
from hybrid_rl.distributed import World, begin_to_end
from hybrid_rl.engines import RolloutEngine, TrainEngine
from hybrid_rl.errors import close_each
from hybrid_rl.memory.micro_batches import TokenLimits
from hybrid_rl.memory.phases import MemoryManager
from hybrid_rl.monitoring.preemption import Preemption
from hybrid_rl.monitoring.recorder import Recorder
from hybrid_rl.monitoring.throughput import Throughput
from hybrid_rl.planning.flops import Flops
from hybrid_rl.rewards import RunningNormalizer
from hybrid_rl.rewards.scoring import RewardSources
from hybrid_rl.steps.ema import EmaWeights, MovingReference
from hybrid_rl.steps.logprobs import ActorForward
from hybrid_rl.steps.ptx import PtxLoss
from hybrid_rl.weights.sync import WeightSync

Metrics = dict[str, float]
"""Name of a metric -> its value, the same on every rank."""


class Stateful(Protocol):
    """A part whose state a checkpoint keeps as JSON values, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what state_dict returned."""
        ...


class Evaluations:
    """The first and the last evaluation of a run; {} before there is one."""

    def __init__(self) -> None:
        self.first: Metrics = {}
        self.last: Metrics = {}

    def add(self, evaluation: Metrics) -> None:
        """Record an evaluation."""
        self.first = self.first or evaluation
        self.last = evaluation


@dataclass(kw_only=True)
class FinishedStep:
    """The state after the last finished step, of the parts that change in the first phases of the next one.

    Weights, optimizers, EMA and moving reference change after its responses are scored.
    """

    step: int = 0
    """0 before this process has finished a step."""
    counters: dict[str, Any] = field(default_factory=dict)
    """What `Run.counters` returned, as JSON values."""
    random_state: Snapshot | None = None

    def keep(self, step: int, counters: Mapping[str, Stateful], *, rank: int) -> None:
        """Copy the state after a step."""
        self.step = step
        self.counters = json.loads(json.dumps({name: part.state_dict() for name, part in counters.items()}))
        self.random_state = take_random_state(rank)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run on this rank; what the settings do not ask for is None."""

    config: Config
    folder: RunFolder
    world: World
    """All ranks."""
    data_parallel: World
    """The ranks that hold different sequences from SCORE to the updates: one of each model-parallel group."""
    data: Data
    environments: Environments | None
    """None for a run without conversations."""
    recorder: Recorder
    memory: MemoryManager
    limits: TokenLimits
    engine: RolloutEngine
    actor: TrainEngine
    critic: TrainEngine | None
    reference: ActorForward | None
    """A frozen model, or the actor without its adapters."""
    shards_frozen: bool
    """Whether the ranks gather the weights of a frozen model together in its forwards."""
    sources: RewardSources
    normalizer: RunningNormalizer | None
    kl: KlController
    ema: EmaWeights | None
    ptx: PtxLoss | None
    weight_sync: WeightSync
    throughput: Throughput
    flops: Flops
    saver: Saver
    phase_log: PhaseLog | None
    preemption: Preemption
    steps_done: int
    """Steps of the checkpoint that the run continues from; 0 for a new run."""
    evaluations: Evaluations = field(default_factory=Evaluations)
    finished: FinishedStep = field(default_factory=FinishedStep)

    @property
    def counters(self) -> dict[str, Stateful]:
        """The parts that a checkpoint keeps as JSON values."""
        parts: dict[str, Stateful | None] = {
            "loader": self.data.loader,
            "kl": self.kl,
            "normalizer": self.normalizer,
            "ptx": self.ptx,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def saved_parts(self) -> dict[str, CheckpointPart]:
        """The parts that a checkpoint keeps as tensors, besides actor and critic."""
        reference = self.reference if isinstance(self.reference, MovingReference) else None
        parts: dict[str, CheckpointPart | None] = {"ema": self.ema, "reference": reference}
        return {name: part for name, part in parts.items() if part is not None}

    def close(self) -> None:
        """Wait for the checkpoint in progress, end the engine and the scorers, and unlock the folder.

        Every part is closed, also after another one has failed. An error that ends the run already is not hidden.
        """
        gc.unfreeze()
        if sys.exception():
            begin_to_end()
        environments = [self.environments.close] if self.environments else []
        parts = (self.saver.close, self.engine.close, *environments, self.data.close, self.folder.close)
        close_each(*parts, error=sys.exception())
