"""Weight sync with low-rank adapters: the engine keeps the frozen base, and each sync sends the adapters alone."""

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from hybrid_rl.config import SyncConfig
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.bucket import IpcBucket, Slot, aligned, bucket_bytes, plan_buckets, plan_halves
from hybrid_rl.weights.protocols import NamedShape, WeightReceiver, WeightSource
from hybrid_rl.weights.sync import Filling, SyncReport, check_in_buffer, synchronize
from hybrid_rl.weights.verify import FrozenVerifier, Verifier


def plan_adapters(
    base: Sequence[NamedShape], adapters: Sequence[NamedShape], config: SyncConfig
) -> tuple[list[list[Slot]], list[Slot]]:
    """Return the buckets of the base, and one bucket that holds all adapters, beside them in one buffer.

    Args:
        base: name, shape and dtype of the weights to copy; none where the engine aliases them.
        adapters: those of the adapters.
        config: its bucket_bytes is the size of the buckets of the base.
    """
    buckets = plan_halves(base, config.bucket_bytes) if base else []
    start = aligned(bucket_bytes(buckets)) if buckets else 0
    (slots,) = plan_buckets(adapters, sys.maxsize)
    return buckets, [replace(slot, offset=slot.offset + start) for slot in slots]


class AdapterSync:
    """Sends the adapters in every sync, and the base only where the engine has copies and does not hold them.

    The engine computes with base and adapters side by side, so that no merged weight exists anywhere.
    """

    def __init__(
        self,
        base: WeightSource,
        adapters: WeightSource,
        engine: WeightReceiver,
        config: SyncConfig,
        device: torch.device,
        timeline: Timeline,
        *,
        alias_buffer: AliasBuffer | None,
        keeps_base: bool,
    ) -> None:
        """Allocate the bucket of the adapters, and of the base if it is copied, and let the engine open it.

        Args:
            base: the trainer's weights without adapters, which nothing writes to.
            adapters: the matrices of the adapters.
            engine: was started for adapters, and on alias_buffer.export() if there is a buffer.
            config: sizes, and how much is verified.
            device: of the trainer.
            timeline: records the spans of a sync.
            alias_buffer: holds the base; None for an engine that gets copies of it.
            keeps_base: whether the engine holds its copies from one sync to the next, and no phase drops them.
        """
        self.alias_buffer = alias_buffer
        self._engine = engine
        self._device = device
        self._timeline = timeline
        self._keeps_base = keeps_base
        self._verifiers = (FrozenVerifier(base, engine, config), Verifier(adapters, engine, config))
        copied = [] if alias_buffer else base.named_shapes()
        buckets, slots = plan_adapters(copied, adapters.named_shapes(), config)
        self._plan = [*buckets, slots]
        self._bucket = IpcBucket(bucket_bytes(self._plan), device)
        self._base = [Filling(base, bucket, self._bucket) for bucket in buckets]
        self._adapters = Filling(adapters, slots, self._bucket)
        self.connect()

    def connect(self) -> None:
        """Let an engine that has just started open the bucket; the next sync sends everything."""
        self._has_base = False
        self._engine.open_bucket(self._bucket.handle(), self._plan)

    def sync(self) -> SyncReport:
        """Send the adapters, drop what the engine computed with older ones, and verify base and adapters.

        A collective under ZeRO-3: all ranks fill the same buckets in the same order.

        Raises:
            SyncError: see Verifier.check; or a weight of the base has left the buffer or has changed, by name.
        """
        version = self._engine.weights_version
        fillings = [*([] if self._has_base else self._base), self._adapters]
        first, num_bytes = len(self._plan) - len(fillings), sum(each.num_bytes for each in fillings)
        with self._timeline.span("sync_weights", bytes=num_bytes):
            if self.alias_buffer:
                check_in_buffer(self.alias_buffer)
            for index, filling in enumerate(fillings, start=first):
                filling.fill()
                synchronize(self._device)
                self._engine.load_bucket(index)
            self._engine.finish_sync()
        self._has_base = self._keeps_base
        with self._timeline.span("verify"):
            num_verified = sum(verifier.check(version) for verifier in self._verifiers)
        return SyncReport(version=version + 1, num_bytes=num_bytes, num_verified=num_verified)
