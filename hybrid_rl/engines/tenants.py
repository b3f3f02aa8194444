"""Which kind of tenant each part of the trainer is: `memory.swap`, the device and the optimizer decide."""

import torch
from torch import nn

from hybrid_rl.config import Config
from hybrid_rl.engines import RolloutEngine, TrainEngine
from hybrid_rl.memory.residency import Phase
from hybrid_rl.memory.tenants import FrozenModule, PooledModule, PooledTenant, Resident, Tenant, choose_pool


class Tenants:
    """Makes the tenants of the training engines and of the frozen models."""

    def __init__(self, config: Config, device: torch.device, *, stays: frozenset[str] = frozenset()) -> None:
        """Start the pool, if there is to be one; `stays` are the tenants that no phase sends away.

        Raises:
            ConfigError: memory.swap = vmm on a GPU without the native library.
        """
        self._update = config.update
        self._stays = stays
        self._moves = config.memory.swap != "off" and device.type == "cuda"
        self._pool = choose_pool(config.memory.swap, device)

    def reserve_host(self, num_bytes: int) -> None:
        """Begin to pin the host's side of all tenants of the pool, if there is one.

        PyTorch takes 2.0 s for 4 GiB beside an H100; done while the engine starts and models load, it is hidden. A
        further run of this process takes what the first has reserved.
        """
        if self._pool and num_bytes and not self._pool.reserve.num_bytes:
            self._pool.reserve_host(num_bytes)

    def is_offloaded(self, name: str) -> bool:
        """Return whether DeepSpeed's own offload moves the optimizer states of `actor` or `critic`."""
        return self._pool is None and self._are_moved(name)

    def _are_moved(self, name: str) -> bool:
        is_here = getattr(self._update, name).kind == "adamw"  # the others are on the host already
        return self._moves and is_here and f"{name}_optimizer" not in self._stays

    def optimizer(self, name: str, trainer: TrainEngine) -> Tenant:
        """Return the tenant of an engine's optimizer states and gradients; `name` is actor or critic."""
        if not self._are_moved(name):
            return Resident()
        if self._pool is None:
            return OptimizerTenant(trainer)
        states, gradients = trainer.optimizer_tensors(), trainer.gradient_buffers()
        return PooledTenant(self._pool, f"{name}_optimizer", states, scratch=gradients)

    def parameters(self, name: str, trainer: TrainEngine, *, is_aliased: bool) -> Tenant:
        """Return the tenant of the weights that an engine computes with; those that another process sees stay."""
        if self._pool is None or is_aliased or f"{name}_parameters" in self._stays:
            return Resident()  # DeepSpeed cannot bring weights back without the optimizer's states
        weights = trainer.weight_tensors()
        return PooledTenant(self._pool, f"{name}_parameters", weights, before_release=trainer.drop_gathered)

    def frozen(self, name: str, module: nn.Module) -> FrozenModule | PooledModule | None:
        """Return the tenant of a model that is never trained; None if it stays."""
        if name in self._stays:
            return None
        if self._pool is not None:
            return PooledModule(self._pool, name, module)
        return FrozenModule(module) if self._moves else None


class EngineTenant:
    """The `weights` or the `kv_cache` of a rollout engine; dropped on release, and empty after a restore."""

    def __init__(self, engine: RolloutEngine, tag: str, *, filled_in: Phase | None) -> None:
        self.is_resident = True
        self.filled_in = filled_in
        self._engine = engine
        self._tag = tag

    def release(self) -> int:
        """Let the engine unmap it."""
        self._engine.unmap(self._tag)
        self.is_resident = False
        return 0

    def restore(self) -> int:
        """Let the engine map it again."""
        self._engine.map(self._tag)
        self.is_resident = True
        return 0


class OptimizerTenant:
    """The optimizer states and gradients of one engine, as a tenant of the GPU."""

    filled_in = None

    def __init__(self, engine: TrainEngine) -> None:
        self.is_resident = True
        self._engine = engine

    def release(self) -> int:
        """Move to the host."""
        self._engine.offload()
        self.is_resident = False
        return self._engine.optimizer_bytes()

    def restore(self) -> int:
        """Move to the device."""
        self._engine.reload()
        self.is_resident = True
        return self._engine.optimizer_bytes()
