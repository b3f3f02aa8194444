"""Which matrices of a model a few ranks may hold between them, by the plan that transformers carries for its class.

A matrix cut by rows gives each rank its part of the output, one cut by columns takes such a part and is summed over
the ranks; between the two a rank works alone, on its heads of attention and its share of the MLP. Everything else, head
and embeddings too, is whole on every rank, and sees what the whole model sees.

Source: Shoeybi et al. 2019 (Megatron-LM, arXiv 1909.08053), section 3.
"""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from hybrid_rl.config import check

ROWS, COLUMNS = "colwise", "rowwise"  # transformers speaks of the transposed matrix
SUMMED = "replicated_with_grad_allreduce"
WHOLE = ("colwise_gather_output", "rowwise_split_input", "embedding_rowwise")
"""Styles of layers that take and give whole activations: they may as well stay whole."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The layers that matter, by their names in the model."""

    rows: tuple[str, ...] = ()
    """Linear layers whose weight, and bias, are cut along dimension 0."""
    columns: tuple[str, ...] = ()
    """Linear layers whose weight is cut along dimension 1."""
    summed: tuple[str, ...] = ()
    """Whole modules that work on a rank's own part, so that their gradients are summed over the ranks."""

    def dimension(self, name: str) -> int | None:
        """Return along which dimension a parameter is cut, by its name in the model; None if it is whole."""
        owner, _, leaf = name.rpartition(".")
        if owner in self.columns:
            return 1 if leaf == "weight" else None
        return 0 if owner in self.rows else None


def shard_plan(model: Any) -> ShardPlan:
    """Return what the plan of a Hugging Face model, which may be on the meta device, says; nothing without a plan."""
    plan = _plan(model)
    names: dict[str, list[str]] = {ROWS: [], COLUMNS: [], SUMMED: []}
    for name, _ in model.base_model.named_modules():
        style = plan.get(re.sub(r"\b\d+\b", "*", name))
        if style in names:
            names[style].append(f"{model.base_model_prefix}.{name}")
    return ShardPlan(rows=tuple(names[ROWS]), columns=tuple(names[COLUMNS]), summed=tuple(names[SUMMED]))


def check_shard_plan(model: Any, size: int) -> ShardPlan:
    """Return how a model is cut over `size` ranks, see shard_plan.

    Raises:
        ConfigError: its plan cuts nothing, or in a way that is not known here; heads or matrices do not divide.
    """
    field, name = f"update.tensor_parallel_size = {size}", type(model).__name__
    plan, cuts, config = _plan(model), shard_plan(model), model.config.get_text_config()
    unknown = sorted(set(plan.values()) - {ROWS, COLUMNS, SUMMED, *WHOLE})
    check(not unknown, f"{field}: transformers' plan of {name} cuts by {', '.join(unknown)}, not known here; use 1")
    check(bool(cuts.rows), f"{field}: transformers has no plan that cuts a layer of {name}; use 1")
    for heads in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(config, heads, None) or size
        check(number % size == 0, f"{field}: must divide the {number} {heads} of {name}")
    for layer_name in (*cuts.rows, *cuts.columns):
        layer = model.get_submodule(layer_name)
        check(type(layer) is nn.Linear, f"{field}: {layer_name} of {name} is no linear layer; use 1")
        width = layer.out_features if layer_name in cuts.rows else layer.in_features
        check(width % size == 0, f"{field}: must divide the width {width} of {layer_name} of {name}")
    return cuts


def _plan(model: Any) -> dict[str, str]:
    return getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
