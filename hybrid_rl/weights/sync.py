"""Weight sync: the rollout engine gets the trainer's current weights, by copy or by alias, and they are verified."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hybrid_rl.config import SyncConfig
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.bucket import IpcBucket, Slot, bucket_bytes, copy_tensors, plan_halves
from hybrid_rl.weights.protocols import WeightReceiver, WeightSource
from hybrid_rl.weights.verify import SyncError, Verifier


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one weight sync did."""

    version: int
    """weights_version of the engine after it."""
    num_bytes: int
    """Bytes that were copied; 0 where the engine aliases the weights."""
    num_verified: int
    """Number of tensors whose checksums were compared."""

    def metrics(self) -> dict[str, float]:
        """Return the report as metrics of a step."""
        return {"sync/version": self.version, "sync/bytes": self.num_bytes, "sync/num_verified": self.num_verified}


class WeightSync(Protocol):
    """A way to make the engine compute with the trainer's current weights."""

    def connect(self) -> None:
        """Let an engine that has just started open what the weights pass through."""
        ...

    def sync(self) -> SyncReport:
        """Synchronize the weights, verify them and report."""
        ...


class Filling:
    """One fill of a bucket: some tensors of the trainer and their places."""

    def __init__(self, trainer: WeightSource, slots: Sequence[Slot], bucket: IpcBucket) -> None:
        """Take the places of the tensors in the bucket."""
        self._trainer = trainer
        self.names = [slot.name for slot in slots]
        self.views = [slot.view(bucket.tensor) for slot in slots]
        self.num_bytes = sum(slot.nbytes for slot in slots)

    def fill(self) -> None:
        """Copy the tensors into the bucket; a collective under ZeRO-3."""
        with self._trainer.gathered(self.names) as tensors:
            copy_tensors(self.views, [tensors[name] for name in self.names])


class CopySync:
    """Copies all weights through one buffer that the engine opens once.

    The trainer fills one half of the buffer while the engine copies from the other.
    """

    def __init__(
        self,
        trainer: WeightSource,
        engine: WeightReceiver,
        config: SyncConfig,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        """Allocate the buffer on the trainer's device and let the engine open it."""
        self._engine = engine
        self._device = device
        self._timeline = timeline
        self._verifier = Verifier(trainer, engine, config)
        self._plan = plan_halves(trainer.named_shapes(), config.bucket_bytes)
        self._bucket = IpcBucket(bucket_bytes(self._plan), device)
        self.fills = [Filling(trainer, bucket, self._bucket) for bucket in self._plan]
        self._num_bytes = sum(filling.num_bytes for filling in self.fills)
        self.connect()

    def connect(self) -> None:
        """Let an engine that has just started open the buffer."""
        self._engine.open_bucket(self._bucket.handle(), self._plan)

    def sync(self) -> SyncReport:
        """Copy all weights, drop what the engine computed with older ones, and verify some or all of them.

        A collective under ZeRO-3: all ranks fill the same buckets in the same order.

        Raises:
            SyncError: see Verifier.check.
        """
        version = self._engine.weights_version
        with self._timeline.span("sync_weights", bytes=self._num_bytes):
            for index, filling in enumerate(self.fills):
                filling.fill()
                synchronize(self._device)
                self._engine.load_bucket(index)
            self._engine.finish_sync()
        with self._timeline.span("verify"):
            num_verified = self._verifier.check(version)
        return SyncReport(version=version + 1, num_bytes=self._num_bytes, num_verified=num_verified)


class AliasSync:
    """Copies nothing: the engine's parameters are aliases of the trainer's."""

    def __init__(
        self,
        trainer: WeightSource,
        engine: WeightReceiver,
        config: SyncConfig,
        device: torch.device,
        timeline: Timeline,
        *,
        alias_buffer: AliasBuffer,
    ) -> None:
        """Take an engine that was started on alias_buffer.export()."""
        self._engine = engine
        self._device = device
        self._timeline = timeline
        self._verifier = Verifier(trainer, engine, config)
        self.alias_buffer = alias_buffer

    def connect(self) -> None:
        """Do nothing: the engine has started on the aliases."""

    def sync(self) -> SyncReport:
        """Wait for the optimizer step, drop what the engine computed with older weights, and verify weights.

        Raises:
            SyncError: see Verifier.check; or a weight of the trainer is no longer in the buffer, by name.
        """
        version = self._engine.weights_version
        with self._timeline.span("sync_weights", bytes=0):
            check_in_buffer(self.alias_buffer)
            synchronize(self._device)
            self._engine.finish_sync()
        with self._timeline.span("verify"):
            num_verified = self._verifier.check(version)
        return SyncReport(version=version + 1, num_bytes=0, num_verified=num_verified)


def check_in_buffer(alias_buffer: AliasBuffer) -> None:
    """Check that the engine's aliases follow the trainer.

    Raises:
        SyncError: a weight of the trainer is no longer in the buffer, by name.
    """
    moved = alias_buffer.moved()
    if moved:
        raise SyncError(f"trainer tensor {moved[0]} has left the buffer that the engine aliases")


def synchronize(device: torch.device) -> None:
    """Wait until all that the trainer has launched is in memory, where the engine's process reads it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
