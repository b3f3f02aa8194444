"""Verification of a weight sync: checksums of the trainer's tensors are compared with the engine's."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybrid_rl.config import SyncConfig
from hybrid_rl.weights.bucket import plan_buckets
from hybrid_rl.weights.checksum import checksums
from hybrid_rl.weights.protocols import TensorSlice, WeightReceiver, WeightSource


class SyncError(RuntimeError):
    """The engine does not hold the trainer's weights."""


@dataclass(frozen=True, kw_only=True)
class _Held:
    """A slice of a tensor that an engine worker holds."""

    name: str
    worker: int
    tensor_slice: TensorSlice
    checksum: int


class Verifier:
    """Compares all tensors after the first weight sync, and a few in rotation after each later one."""

    def __init__(self, trainer: WeightSource, engine: WeightReceiver, config: SyncConfig) -> None:
        self._trainer = trainer
        self._engine = engine
        plan = plan_buckets(trainer.named_shapes(), config.bucket_bytes // 2)
        # Under ZeRO-3 the tensors of a group are gathered together, at most as many bytes as a copy gathers at once.
        self._groups = [[slot.name for slot in bucket] for bucket in plan]
        self._names = [name for group in self._groups for name in group]
        self._num_verified = config.num_verified
        self._next = 0

    def check(self, version: int) -> int:
        """Compare trainer and engine after a weight sync, and return the number of tensors compared.

        A collective under ZeRO-3.

        Args:
            version: weights_version of the engine before the weight sync; 0 compares all tensors.

        Raises:
            SyncError: a tensor differs between trainer and engine or is not finite, by name; or the engine's
                weights_version is not version + 1.
        """
        names = self._names if version == 0 else self._rotation()
        if names:
            workers = self._engine.checksums(names)
            for group in self._groups:
                self._compare([name for name in group if name in names], workers)
        if self._engine.weights_version != version + 1:
            raise SyncError(f"engine counts weight sync {self._engine.weights_version}, expected {version + 1}")
        return len(names)

    def _rotation(self) -> list[str]:
        """Return the next few names, so that every tensor is compared equally often."""
        count = min(self._num_verified, len(self._names))
        picked = [self._names[(self._next + i) % len(self._names)] for i in range(count)]
        self._next = (self._next + count) % len(self._names)
        return picked

    def _compare(self, names: Sequence[str], workers: Sequence[dict[str, list[tuple[TensorSlice, int]]]]) -> None:
        """Compare the named tensors, slice by slice as each engine worker holds them, in one transfer to the host."""
        if not names:
            return
        held = [
            _Held(name=name, worker=worker, tensor_slice=tensor_slice, checksum=checksum)
            for name in names
            for worker, slices in enumerate(workers)
            for tensor_slice, checksum in slices[name]
        ]
        is_finite, trainer_checksums = self._inspect(names, held)
        for name, finite in zip(names, is_finite, strict=True):
            if not finite:
                raise SyncError(f"trainer tensor {name} holds NaN or infinity")
        for part, checksum in zip(held, trainer_checksums, strict=True):
            if part.checksum != checksum:
                raise SyncError(
                    f"tensor {part.name} differs between trainer and engine worker {part.worker} after the weight sync"
                )

    def _inspect(self, names: Sequence[str], held: Sequence[_Held]) -> tuple[list[int], list[int]]:
        """Return whether each named tensor of the trainer is finite (1 or 0), and its checksum of each held slice."""
        with self._trainer.gathered(names) as tensors:
            flat = {name: tensor.contiguous().flatten() for name, tensor in tensors.items()}
            views = []
            for part in held:
                size, stride, offset = part.tensor_slice
                views.append(flat[part.name].as_strided(size, stride, flat[part.name].storage_offset() + offset))
            extremes = torch.stack([torch.stack(tensor.aminmax()) for tensor in flat.values()])  # [names, 2], no copies
            found = torch.cat([extremes.isfinite().all(1).long(), checksums(views)]).tolist()
        return found[: len(names)], found[len(names) :]


class FrozenVerifier(Verifier):
    """A Verifier of weights that nothing may write to: it also compares them with what they were at the first sync.

    Trainer and engine may hold them in the same memory, where a comparison of the two shows no write.
    """

    def __init__(self, trainer: WeightSource, engine: WeightReceiver, config: SyncConfig) -> None:
        super().__init__(trainer, engine, config)
        self._first: dict[str, int] = {}

    def _compare(self, names: Sequence[str], workers: Sequence[dict[str, list[tuple[TensorSlice, int]]]]) -> None:
        """Compare the named tensors with the engine's and with the first sync's.

        Raises:
            SyncError: see Verifier.check; or a tensor has changed, by name.
        """
        super()._compare(names, workers)
        if not names:
            return
        with self._trainer.gathered(names) as tensors:
            found = checksums([tensors[name] for name in names]).tolist()
        for name, total in zip(names, found, strict=True):
            if self._first.setdefault(name, total) != total:
                raise SyncError(f"trainer tensor {name} is frozen and has changed")
