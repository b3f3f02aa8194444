"""Chooses the tenant of each part of the trainer, by memory.swap, the device and the optimizer."""

from typing import Any

import torch

from hybrid_rl.config import Config
from hybrid_rl.engines import RolloutEngine, TrainEngine
from hybrid_rl.memory.residency import Phase
from hybrid_rl.memory.tenants import FrozenModule, PooledModule, PooledTenant, Resident, Tenant, choose_pool
from hybrid_rl.models.packed import PackedModel
from hybrid_rl.models.sharding import held_weights


class Tenants:
    """Makes the tenants of training engines and of models that are not trained."""

    def __init__(self, config: Config, device: torch.device, *, always_resident: frozenset[str] = frozenset()) -> None:
        """Create the memory pool if memory.swap asks for one.

        Args:
            always_resident: names of the tenants that no phase releases.

        Raises:
            ConfigError: memory.swap = vmm, and the pool is not available on the GPU.
        """
        self._update = config.update
        self._always_resident = always_resident
        self._pool = choose_pool(config.memory.swap, device)
        self._is_swapping = self._pool is not None or (config.memory.swap != "off" and device.type == "cuda")

    def reserve_host(self, num_bytes: int) -> bool:
        """Start to pin the host memory of all tenants of the pool, while the engine starts and models load.

        Returns:
            whether memory is pinned; later runs of this process use the memory that the first run has reserved.
        """
        if not self._pool or not num_bytes or self._pool.reserve.num_bytes:
            return False
        self._pool.reserve_host(num_bytes)
        return True

    def pinning_seconds(self) -> float:
        """Return how long pinning took; 0 while it goes on, or where nothing is pinned."""
        return self._pool.reserve.pinning_s if self._pool else 0.0

    def is_offloaded(self, name: str) -> bool:
        """Return whether DeepSpeed's offload moves the optimizer of `actor` or `critic`."""
        return self._pool is None and self._is_optimizer_moved(name)

    def _is_optimizer_moved(self, name: str) -> bool:
        is_on_device = getattr(self._update, name).kind == "adamw"  # other optimizers work on the host
        return self._is_swapping and is_on_device and f"{name}_optimizer" not in self._always_resident

    def optimizer(self, name: str, trainer: TrainEngine) -> Tenant:
        """Return the tenant of the optimizer and gradients of `actor` or `critic`."""
        if not self._is_optimizer_moved(name):
            return Resident()
        if self._pool is None:
            return OptimizerTenant(trainer)
        kept, gradients = trainer.optimizer_tensors(), trainer.gradient_buffers()
        return PooledTenant(self._pool, f"{name}_optimizer", kept, scratch=gradients)

    def parameters(self, name: str, trainer: TrainEngine, *, is_aliased: bool) -> Tenant:
        """Return the tenant of the weights of `actor` or `critic`; weights that an engine aliases are resident."""
        if self._pool is None or is_aliased or f"{name}_parameters" in self._always_resident:
            return Resident()  # without a pool: DeepSpeed cannot reload weights without the optimizer
        weights = trainer.weight_tensors()
        return PooledTenant(self._pool, f"{name}_parameters", weights, before_release=trainer.drop_gathered)

    def frozen(self, name: str, module: PackedModel) -> FrozenModule | PooledModule | None:
        """Return the tenant of a model that is not trained, or of this rank's shards; None if it is always resident."""
        if name in self._always_resident:
            return None
        gathering = module.layer_gathering
        free = gathering.free_gathered if gathering else None
        options: dict[str, Any] = {"weights": held_weights(module), "before_release": free}
        if self._pool is not None:
            return PooledModule(self._pool, name, module, **options)
        return FrozenModule(module, **options) if self._is_swapping else None


class EngineTenant:
    """The `weights` or the `kv_cache` of a rollout engine, whose contents a release drops."""

    def __init__(self, engine: RolloutEngine, tag: str, *, filled_in: Phase | None) -> None:
        """Take a mapped tag of an engine; filled_in: see Tenant."""
        self.is_resident = True
        self.filled_in = filled_in
        self._engine = engine
        self._tag = tag

    def release(self) -> int:
        """Unmap the memory of the tag; see Tenant."""
        self._engine.unmap(self._tag)
        self.is_resident = False
        return 0

    def restore(self) -> int:
        """Map the memory of the tag again; see Tenant."""
        self._engine.map(self._tag)
        self.is_resident = True
        return 0


class OptimizerTenant:
    """The optimizer and gradients of a training engine, which DeepSpeed's offload moves to the host."""

    filled_in = None

    def __init__(self, engine: TrainEngine) -> None:
        self.is_resident = True
        self._engine = engine

    def release(self) -> int:
        """Move the tensors to the host; see Tenant."""
        self._engine.offload()
        self.is_resident = False
        return self._engine.optimizer_bytes()

    def restore(self) -> int:
        """Move the tensors to the device; see Tenant."""
        self._engine.reload()
        self.is_resident = True
        return self._engine.optimizer_bytes()
