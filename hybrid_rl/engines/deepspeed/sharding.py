"""Models whose weights are ZeRO-3 shards from the first byte on: loading, and forwards that gather layer by layer.

transformers builds a model on the meta device and assigns one tensor after the other, each a view of the mapped file.
Here every rank copies its shard of such a view to its device at once, so that it reads 1 / W of the files and holds no
other rank's weights. transformers' own support of ZeRO-3 reads all files of a model on every rank first.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload, ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.modeling_layers import GradientCheckpointingLayer

from hybrid_rl.config import Config, OptimizerConfig
from hybrid_rl.distributed import World
from hybrid_rl.engines.deepspeed.settings import deepspeed_settings
from hybrid_rl.models.loading import choose_dtype
from hybrid_rl.models.lora import has_adapters
from hybrid_rl.models.packed import PackedModel

SEQUENTIAL_LOADING = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable with which transformers converts no tensor before the one that precedes it is assigned."""


class ZeroSharder:
    """Shards a model as DeepSpeed's ZeRO-3 does; see WeightSharder for the methods.

    A forward of a model that `finish` has taken is a collective: all ranks must run equally many.
    """

    def __init__(self, world: World, settings: Mapping[str, Any], *, gathers_layers: bool) -> None:
        """Take the settings of DeepSpeed.

        Args:
            world: all ranks.
            settings: `config` of deepspeed.initialize.
            gathers_layers: forwards gather a whole layer at once instead of module by module, for a model that stays
                frozen; a training engine decides that itself.
        """
        deepspeed.init_distributed()
        self._world = world
        self._gathers_layers = gathers_layers
        # With a module, DeepSpeed also replaces torch's linear by one that keeps no gathered weight for backward.
        self._zero = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=dict(settings))
        self._read: dict[tuple[int, str], nn.Parameter] = {}  # by module and name, of the files' weights

    @contextmanager
    def shard_as_read(self) -> Iterator[None]:
        """Shard each weight that transformers reads in the body; see WeightSharder."""

        def shard(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
            # transformers marks what it has read; weights that the files lack are initialized whole, after the others
            if getattr(parameter, "_is_hf_initialized", False) and not parameter.is_meta:
                self._read.setdefault((id(module), name), parameter)
                self._shard(parameter)

        hook = register_module_parameter_registration_hook(shard)
        try:
            with mock.patch.dict(os.environ, {SEQUENTIAL_LOADING: "1"}):
                yield
        finally:
            hook.remove()

    def are_equal(self, model: Any, first: str, second: str) -> bool:
        """Return whether two weights of the files have the same values; see WeightSharder."""
        found = []
        for name in (first, second):
            owner, _, leaf = name.rpartition(".")
            found.append(self._read.get((id(model.get_submodule(owner)), leaf)))
        one, other = found
        is_same = one is None or other is None or one is other or torch.equal(_shard_of(one), _shard_of(other))
        return all(self._world.all_gather(is_same))

    @contextmanager
    def whole(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Gather parameters in the body, which may write to them; see WeightSharder."""
        with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0):
            yield

    def finish(self, module: PackedModel) -> None:
        """Shard what is whole and install the hooks that gather the weights of each layer; see WeightSharder."""
        self._read.clear()
        for parameter in module.parameters():
            self._shard(parameter)
        if self._gathers_layers:
            gather_whole_layers(module)
        module.layer_gathering = LayerGathering(module)

    @torch.no_grad()
    def _shard(self, parameter: nn.Parameter) -> None:
        """Keep this rank's shard of a parameter on the device, and nothing of the others'."""
        if not is_zero_param(parameter):
            self._zero._convert_to_deepspeed_param(parameter)
            parameter.partition()  # type: ignore[attr-defined]
            parameter.data = parameter.data.to(self._world.device)


def trained_sharder(config: Config, world: World, name: str) -> ZeroSharder | None:
    """Return what shards `actor` or `critic` while it loads; None below ZeRO-3, where ranks hold whole weights."""
    if config.update.zero_stage < 3:
        return None
    settings = zero3_settings(config, world, getattr(config.update, name), further=config.update.deepspeed)
    return ZeroSharder(world, settings, gathers_layers=False)


def frozen_sharder(config: Config, world: World, *, is_sharded: bool) -> ZeroSharder | None:
    """Return what shards a model that is not trained while it loads; None for a whole model on every rank."""
    if not is_sharded:
        return None
    return ZeroSharder(world, zero3_settings(config, world, OptimizerConfig()), gathers_layers=True)


def zero3_settings(
    config: Config, world: World, optimizer: OptimizerConfig, *, further: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return DeepSpeed's settings of a model whose weights are shards; further: update.deepspeed."""
    dtype = choose_dtype(config.models.dtype, world.device)
    return deepspeed_settings(optimizer, zero_stage=3, dtype=dtype, device=world.device, further=further)


class LayerGathering:
    """Hooks of DeepSpeed that gather the weights of each layer of a model before it runs, and free them afterwards."""

    def __init__(self, module: PackedModel) -> None:
        """Install the hooks."""
        self._module: Any = module
        self._parameters: list[Any] = list(module.parameters())
        # Without a reuse distance, no gathered weight outlives the layer that needs it.
        self._offload = DeepSpeedZeRoOffload(
            module, timers=None, ds_config=None, max_reuse_distance=0, param_persistence_threshold=0
        )
        self._hooks = []
        for model in {module.model, module.model.base_model}:
            self._hooks.append(model.register_forward_pre_hook(lambda *_: self._gather_on_access(is_on=True)))
            self._hooks.append(
                model.register_forward_hook(lambda *_: self._gather_on_access(is_on=False), always_call=True)
            )

    def _gather_on_access(self, *, is_on: bool) -> None:
        """Let a layer that reads the weight of another one gather it, as DeepSpeed's engine does in a forward."""
        for module in self._module.modules():
            if isinstance(module._parameters, ZeROOrderedDict):  # adapters that came later are whole
                module._parameters._in_forward = is_on

    def free_gathered(self) -> None:
        """Free the weights that are gathered, also those of a forward that ended early."""
        in_flight = self._module.ds_inflight_param_registry
        for parameter in self._parameters:
            if parameter in in_flight:
                in_flight.pop(parameter).wait()
            parameter.ds_active_sub_modules.clear()
            if parameter.ds_status is ZeroParamStatus.AVAILABLE:
                parameter.partition()

    def remove(self) -> None:
        """Remove the hooks, so that a training engine installs its own; the weights stay sharded."""
        self.free_gathered()
        self._offload.destroy()
        for hook in self._hooks:
            hook.remove()
        own = set(self._module.modules())
        parameter_offload.FWD_MODULE_STACK[:] = [m for m in parameter_offload.FWD_MODULE_STACK if m not in own]
        self._module.layer_gathering = None


def gather_whole_layers(module: PackedModel) -> None:
    """Make ZeRO-3 gather a layer's weights at once instead of module by module, which halves the host's work.

    It fails with adapters, because the input of the first layer has no gradient.
    """
    if not has_adapters(module.model):
        set_z3_leaf_modules(module, [GradientCheckpointingLayer], raise_if_not_found=False)


def _shard_of(parameter: Any) -> Tensor:
    return parameter.ds_tensor
