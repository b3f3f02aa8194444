"""Hand-over of the trainer's weights to the rollout engine, and the proof that it worked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hybrid_rl.config import SyncConfig
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.bucket import IpcBucket, bucket_bytes, copy_tensors, plan_buckets, plan_halves
from hybrid_rl.weights.checksum import checksums
from hybrid_rl.weights.protocols import WeightReceiver, WeightSource


class SyncError(RuntimeError):
    """The engine does not hold the trainer's weights."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one hand-over did."""

    version: int
    num_bytes: int
    """Bytes that were copied; 0 where the engine shares the weights."""
    num_verified: int
    """Tensors whose checksums were compared."""

    def metrics(self) -> dict[str, float]:
        """Return it as a step's metrics."""
        return {"sync/version": self.version, "sync/bytes": self.num_bytes, "sync/num_verified": self.num_verified}


class WeightSync(Protocol):
    """A way to make the engine run the trainer's current weights."""

    def sync(self) -> SyncReport:
        """Hand over, prove it, and say what was done."""
        ...


class Verifier:
    """Compares checksums of trainer and engine: of all tensors at first, then of a few, so that each has its turn."""

    def __init__(self, trainer: WeightSource, engine: WeightReceiver, config: SyncConfig) -> None:
        self._trainer = trainer
        self._engine = engine
        plan = plan_buckets(trainer.named_shapes(), config.bucket_bytes // 2)
        # Gathered together under ZeRO-3: as much at once as by a copy.
        self._groups = [[slot.name for slot in bucket] for bucket in plan]
        self._names = [name for group in self._groups for name in group]
        self._num_verified = config.num_verified
        self._next = 0

    def check(self, version: int) -> int:
        """Compare after the hand-over that follows the version-th, and return how many tensors were compared.

        A collective under ZeRO-3.

        Raises:
            SyncError: a tensor differs between trainer and engine, or is not finite, by name; the engine miscounts.
        """
        names = self._names if version == 0 else self._rotation()
        if names:
            workers = self._engine.checksums(names)
            for group in self._groups:
                self._compare([name for name in group if name in names], workers)
        if self._engine.weights_version != version + 1:
            raise SyncError(f"engine counts hand-over {self._engine.weights_version}, expected {version + 1}")
        return len(names)

    def _rotation(self) -> list[str]:
        """Return the next few names, so that every tensor is checked again and again."""
        count = min(self._num_verified, len(self._names))
        picked = [self._names[(self._next + i) % len(self._names)] for i in range(count)]
        self._next = (self._next + count) % len(self._names)
        return picked

    def _compare(self, names: Sequence[str], workers: Sequence[dict[str, list]]) -> None:
        """Compare both sides, region by region as each engine worker holds them; one transfer from the device."""
        if not names:
            return
        regions = [
            (name, worker, region, theirs)
            for name in names
            for worker, held in enumerate(workers)
            for region, theirs in held[name]
        ]
        with self._trainer.gathered(names) as tensors:
            whole = {name: tensor.contiguous().flatten() for name, tensor in tensors.items()}
            views = [
                whole[name].as_strided(size, stride, whole[name].storage_offset() + offset)
                for name, _, (size, stride, offset), _ in regions
            ]
            extremes = torch.stack(
                [torch.stack(flat.aminmax()) for flat in whole.values()]
            )  # [names, 2], without copies
            found = torch.cat([extremes.isfinite().all(1).long(), checksums(views)]).tolist()
        for name, finite in zip(names, found, strict=False):
            if not finite:
                raise SyncError(f"trainer tensor {name} holds NaN or infinity")
        for (name, worker, _, theirs), ours in zip(regions, found[len(names) :], strict=True):
            if ours != theirs:
                raise SyncError(f"tensor {name} differs between trainer and engine worker {worker} after the hand-over")


class CopySync:
    """Through one buffer that the engine opened once: one half is filled while the engine copies out of the other."""

    def __init__(
        self,
        trainer: WeightSource,
        engine: WeightReceiver,
        config: SyncConfig,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._device = device
        self._timeline = timeline
        self._verifier = Verifier(trainer, engine, config)
        self._plan = plan_halves(trainer.named_shapes(), config.bucket_bytes)
        self._num_bytes = sum(slot.nbytes for bucket in self._plan for slot in bucket)
        self._bucket = IpcBucket(bucket_bytes(self._plan), device)
        self._fills = [
            ([slot.name for slot in bucket], [slot.view(self._bucket.tensor) for slot in bucket])
            for bucket in self._plan
        ]
        engine.open_bucket(self._bucket.handle(), self._plan)
        self._bucket.unlink()

    def sync(self) -> SyncReport:
        """Copy every weight, let the engine forget what it cached with older ones, and prove a part of the weights.

        A collective under ZeRO-3: all ranks fill the same buckets in the same order.

        Raises:
            SyncError: see Verifier.check.
        """
        version = self._engine.weights_version
        with self._timeline.span("sync_weights", bytes=self._num_bytes):
            for index, (names, views) in enumerate(self._fills):
                with self._trainer.gathered(names) as tensors:
                    copy_tensors(views, [tensors[name] for name in names])
                _synchronize(self._device)
                self._engine.load_bucket(index)
            self._engine.finish_sync()
        with self._timeline.span("verify"):
            num_verified = self._verifier.check(version)
        return SyncReport(version=version + 1, num_bytes=self._num_bytes, num_verified=num_verified)


class AliasSync:
    """Nothing to hand over: the engine computes with the trainer's weights where they lie."""

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
        self._alias_buffer = alias_buffer
        alias_buffer.unlink()

    def sync(self) -> SyncReport:
        """Wait for the trainer's step, let the engine forget what it cached before it, and prove a part of the weights.

        Raises:
            SyncError: see Verifier.check; a weight of the trainer has left the buffer, by name.
        """
        version = self._engine.weights_version
        with self._timeline.span("sync_weights", bytes=0):
            moved = self._alias_buffer.moved()
            if moved:
                raise SyncError(f"trainer tensor {moved[0]} has left the buffer that the engine shares")
            _synchronize(self._device)
            self._engine.finish_sync()
        with self._timeline.span("verify"):
            num_verified = self._verifier.check(version)
        return SyncReport(version=version + 1, num_bytes=0, num_verified=num_verified)


def _synchronize(device: torch.device) -> None:
    """Wait until what the trainer has launched is in memory, where another process reads it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
