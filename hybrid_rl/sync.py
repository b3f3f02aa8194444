"""Hand-over of the trainer's weights to the rollout engine, and the proof that it worked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hybrid_rl.bucket import SharedBucket, bucket_bytes, checksum, plan_buckets
from hybrid_rl.config import SyncConfig
from hybrid_rl.engines import RolloutEngine
from hybrid_rl.engines.deepspeed import TrainEngine
from hybrid_rl.metrics import Timeline


class SyncError(RuntimeError):
    """The engine does not hold the trainer's weights."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one hand-over did."""

    version: int
    num_bytes: int
    num_verified: int
    """Tensors whose checksums were compared."""

    def metrics(self) -> dict[str, float]:
        """Return it as a step's metrics."""
        return {"sync/version": self.version, "sync/bytes": self.num_bytes, "sync/num_verified": self.num_verified}


class WeightSync(Protocol):
    """A way to make the engine run the trainer's current weights."""

    def push(self) -> SyncReport:
        """Hand over, prove it, and say what was done."""
        ...


class CopySync:
    """Through one bucket that the engine opened once: fill, signal, copy inside the engine, acknowledge."""

    def __init__(
        self,
        trainer: TrainEngine,
        engine: RolloutEngine,
        config: SyncConfig,
        device: torch.device,
        timeline: Timeline,
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._config = config
        self._device = device
        self._timeline = timeline
        self._plan = plan_buckets(trainer.named_shapes(), config.bucket_bytes)
        self._names = [slot.name for bucket in self._plan for slot in bucket]
        self._num_bytes = sum(slot.nbytes for bucket in self._plan for slot in bucket)
        self._next_verified = 0
        self._bucket = SharedBucket(bucket_bytes(self._plan), device)
        engine.open_bucket(self._bucket.handle(), self._plan)
        self._bucket.unlink()

    def push(self) -> SyncReport:
        """Copy every weight, prove a part of them, and let the engine forget what it cached with older ones.

        A collective under ZeRO-3: all ranks fill the same buckets in the same order.

        Raises:
            SyncError: a tensor differs between trainer and engine, or is not finite; by name.
        """
        version = self._engine.weights_version
        verified = self._names if version == 0 else self._rotation()
        with self._timeline.span("push", bytes=self._num_bytes):
            for index, bucket in enumerate(self._plan):
                with self._trainer.gathered([slot.name for slot in bucket]) as tensors:
                    for slot in bucket:
                        slot.view(self._bucket.tensor).copy_(tensors[slot.name])
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self._engine.receive(index)
            self._engine.finish_push()
        with self._timeline.span("verify"):
            self._verify(verified)
        if self._engine.weights_version != version + 1:
            raise SyncError(f"engine counts hand-over {self._engine.weights_version}, expected {version + 1}")
        return SyncReport(version=version + 1, num_bytes=self._num_bytes, num_verified=len(verified))

    def _rotation(self) -> list[str]:
        """Return the next few names, so that every tensor is checked again and again."""
        count = min(self._config.num_verified, len(self._names))
        picked = [self._names[(self._next_verified + i) % len(self._names)] for i in range(count)]
        self._next_verified = (self._next_verified + count) % len(self._names)
        return picked

    def _verify(self, names: Sequence[str]) -> None:
        """Compare both sides' checksums, region by region as each engine worker holds them."""
        if not names:
            return
        workers = self._engine.checksums(names)
        with self._trainer.gathered(names) as tensors:
            for name, tensor in tensors.items():
                if not torch.isfinite(tensor).all():
                    raise SyncError(f"trainer tensor {name} holds NaN or infinity")
                flat = tensor.contiguous().flatten()
                for worker, held in enumerate(workers):
                    for (size, stride, offset), theirs in held[name]:
                        if checksum(flat.as_strided(size, stride, flat.storage_offset() + offset)) != theirs:
                            raise SyncError(
                                f"tensor {name} differs between trainer and engine worker {worker} after the hand-over"
                            )
