"""Shard plans for tensor parallelism, taken from the plan that transformers ships with a model's class.

A matrix sharded by rows gives each rank a slice of the output; one sharded by columns takes such a slice, and its
outputs are summed over the ranks. Between the two a rank works without communication, on its attention heads and its
slice of the MLP. All other parameters, embeddings and head included, are replicated.

Source: Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053), section 3.
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from hybrid_rl.config import check

ROWS, COLUMNS = "colwise", "rowwise"  # transformers names the dimensions of the transposed matrix
SUMMED = "replicated_with_grad_allreduce"
REPLICATED = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise")
"""Styles of layers that take and return whole activations, so that they can be replicated instead of sharded."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The layers of a model that tensor parallelism shards, by their names in the model."""

    rows: tuple[str, ...] = ()
    """Linear layers whose weight and bias are sharded along dimension 0."""
    columns: tuple[str, ...] = ()
    """Linear layers whose weight is sharded along dimension 1."""
    summed: tuple[str, ...] = ()
    """Replicated modules whose input is sharded, so that their gradients are summed over the ranks."""

    def dimension(self, name: str) -> int | None:
        """Return the dimension along which the parameter `name` of the model is sharded; None if it is replicated."""
        owner, _, leaf = name.rpartition(".")
        if owner in self.columns:
            return 1 if leaf == "weight" else None
        return 0 if owner in self.rows else None


def shard_plan(model: Any) -> ShardPlan:
    """Return the shard plan of a Hugging Face model, which may be on the meta device; empty if its class has none."""
    styles = _styles(model)
    names: dict[str, list[str]] = {ROWS: [], COLUMNS: [], SUMMED: []}
    for name, _ in model.base_model.named_modules():
        style = styles.get(re.sub(r"\b\d+\b", "*", name))
        if style in names:
            names[style].append(f"{model.base_model_prefix}.{name}")
    return ShardPlan(rows=tuple(names[ROWS]), columns=tuple(names[COLUMNS]), summed=tuple(names[SUMMED]))


def check_shard_plan(model: Any, size: int) -> ShardPlan:
    """Return the shard plan of a model after checking it against the number of ranks.

    Args:
        model: a Hugging Face model, which may be on the meta device.
        size: update.tensor_parallel_size.
    Raises:
        ConfigError: the plan shards nothing, or in a style that is not supported; heads or matrices do not divide.
    """
    field, name = f"update.tensor_parallel_size = {size}", type(model).__name__
    plan, config = shard_plan(model), model.config.get_text_config()
    unknown = sorted(set(_styles(model).values()) - {ROWS, COLUMNS, SUMMED, *REPLICATED})
    check(not unknown, f"{field}: transformers' plan of {name} shards by {', '.join(unknown)}, not supported; use 1")
    check(bool(plan.rows), f"{field}: transformers has no plan that shards a layer of {name}; use 1")
    for heads in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(config, heads, None) or size
        check(number % size == 0, f"{field}: must divide the {number} {heads} of {name}")
    for layer_name in (*plan.rows, *plan.columns):
        layer = model.get_submodule(layer_name)
        check(type(layer) is nn.Linear, f"{field}: {layer_name} of {name} is no linear layer; use 1")
        width = layer.out_features if layer_name in plan.rows else layer.in_features
        check(width % size == 0, f"{field}: must divide the width {width} of {layer_name} of {name}")
    return plan


def _styles(model: Any) -> dict[str, str]:
    """Return the style of each layer that transformers' plan names, numbers of layers written as *."""
    return getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
