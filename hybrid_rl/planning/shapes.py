"""Sizes of the models of a run, read from their folders without loading weights.

Parameters are counted on the model's class, built on the meta device, so the count is exact for every architecture.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hybrid_rl.config import Config
from hybrid_rl.models.folders import empty_model
from hybrid_rl.models.tensor_parallel import shard_plan
from hybrid_rl.models.weight_match import check_weights
from hybrid_rl.planning.layer_parts import norm_elements, read_latent, read_mixture, states_experts
from hybrid_rl.planning.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of the models of a run; None for a model that the run does not have."""

    actor: ModelShape
    critic: ModelShape | None
    reference: ModelShape | None
    reward: ModelShape | None

    def trained(self, name: str) -> ModelShape | None:
        """Return the shape of `actor` or `critic`."""
        return self.actor if name == "actor" else self.critic


def read_shapes(config: Config) -> Shapes:
    """Return the sizes of all models of a run.

    Raises:
        ConfigError: a folder holds no model, or weights that are not its model's.
    """
    paths = config.models
    critic, reference = paths.critic or paths.reward or paths.actor, paths.reference or paths.actor
    needs_reference = config.has_reference and not config.reference_is_actor
    read = functools.partial(_read_checked, trust_remote_code=paths.trust_remote_code)
    return Shapes(
        actor=read(paths.actor, "models.actor", is_policy=True),
        reward=read(paths.reward, "models.reward", is_policy=False) if paths.reward else None,
        critic=read(critic, "models.critic", is_policy=False) if config.has_critic else None,
        reference=read(reference, "models.reference", is_policy=True) if needs_reference else None,
    )


def _read_checked(path: str, field: str, *, is_policy: bool, trust_remote_code: bool) -> ModelShape:
    """Return the sizes of the model in a folder, which may hold no weights, but none of another model."""
    check_weights(
        path,
        field=field,
        is_policy=is_policy,
        new_head=field == "models.critic",
        must_exist=False,
        trust_remote_code=trust_remote_code,
    )
    return read_shape(path, field=field, is_policy=is_policy, trust_remote_code=trust_remote_code)


def read_shape(path: str, *, field: str, is_policy: bool, trust_remote_code: bool = False) -> ModelShape:
    """Return the sizes of the model in a folder: a causal language model, or a value model with one output.

    Args:
        path: folder of the model.
        field: setting that names the folder, for messages.
        is_policy: whether to read a causal language model.
        trust_remote_code: see load_config.

    Raises:
        ConfigError: the folder holds no such model.
    """
    model, head = empty_model(path, field=field, is_policy=is_policy, trust_remote_code=trust_remote_code)
    config = model.config.get_text_config()
    heads, hidden_size = config.num_attention_heads, config.hidden_size
    head_size, value_size = _head_sizes(config)
    linears, shards = _linears(model, head), shard_plan(model)
    mixture = read_mixture(model, config)
    names = [*(name for name, _, _ in linears), *(name.rsplit(".", 1)[-1] for name, _ in model.named_parameters())]
    return ModelShape(
        architecture=type(model).__name__,
        model_type=model.config.model_type,
        tensors=tuple((name, tuple(p.shape)) for name, p in model.named_parameters()),
        linears=linears,
        num_layers=config.num_hidden_layers,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(linears, hidden_size, getattr(config, "intermediate_size", None)),
        query_size=heads * head_size,
        output_size=heads * value_size,
        num_heads=heads,
        key_size=(getattr(config, "num_key_value_heads", None) or heads) * head_size,
        vocab_size=head.out_features,
        is_gated=any("gate" in name for name in names),
        norm_size=norm_elements(model, hidden_size=hidden_size, head_size=head_size, num_heads=heads),
        sharded=frozenset(name for name, _ in model.named_parameters() if shards.dimension(name) is not None),
        is_counted=_has_softmax_attention(config) and (mixture is not None or not states_experts(config)),
        window=getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None,
        mixture=mixture,
        latent=read_latent(config),
    )


def _head_sizes(config: Any) -> tuple[int, int]:
    """Return the elements of one head's query and key, and of its value."""
    if read_latent(config):
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size, size


def _has_softmax_attention(config: Any) -> bool:
    """Return whether every layer of a configuration has softmax attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds <= {"full_attention", "sliding_attention"}


def _linears(model: nn.Module, head: nn.Module) -> tuple[tuple[str, int, int], ...]:
    found = []
    for name, module in model.named_modules():
        if module is not head and isinstance(module, nn.Linear | Conv1D):
            outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
            found.append((name.rsplit(".", 1)[-1], int(inputs), int(outputs)))
    return tuple(found)


def _intermediate_size(linears: Sequence[tuple[str, int, int]], hidden_size: int, stated: int | None) -> int:
    """Return the width of the feed-forward: as stated, else the largest input of a layer whose output is hidden."""
    return stated or max(inputs for _, inputs, outputs in linears if outputs == hidden_size)
