"""Parts of decoder layers that not every family has: routed experts, and attention with compressed keys and values.

transformers keeps each projection of all experts of a layer in one parameter with the experts as first dimension.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which configurations state the routed experts of a layer."""
PER_TOKEN_COUNTS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
"""Names under which configurations state the routed experts of a token."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The feed-forward of the layers that have routed experts."""

    num_layers: int
    """Layers with experts; the others have one feed-forward for all tokens."""
    num_experts: int
    """Routed experts of a layer."""
    experts_per_token: int
    """Routed experts that compute a token."""
    expert_elements: int
    """Elements of all routed experts' weights, over all layers."""
    router_elements: int
    """Elements of all routers' weights, over all layers."""
    expert_size: int
    """Width of a routed expert."""
    shared_size: int
    """Width of the experts that compute every token; 0 without any."""

    @property
    def active_elements(self) -> int:
        """Elements of the routed experts' weights that a token is multiplied with, over all layers."""
        return self.expert_elements * self.experts_per_token // self.num_experts

    def read_elements(self, num_tokens: float) -> float:
        """Return the expected elements of the experts that at least one of several tokens is routed to.

        A token chooses each expert with probability k / E, independently of the other tokens; an expert is left out by
        n tokens with probability (1 - k / E)^n.
        """
        return self.expert_elements * (1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens)


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention, which computes queries, keys and values of all heads from compressed ones.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    query_rank: int
    """Elements of a token's compressed query; 0 where queries are not compressed."""
    key_rank: int
    """Elements of a token's compressed keys and values."""
    rotary_size: int
    """Elements of the rotary part of the key, which all heads share."""


def read_latent(config: Any) -> Latent | None:
    """Return the latent attention of a text configuration; None for ordinary attention."""
    if not getattr(config, "kv_lora_rank", None):
        return None
    return Latent(query_rank=config.q_lora_rank or 0, key_rank=config.kv_lora_rank, rotary_size=config.qk_rope_head_dim)


def states_experts(config: Any) -> bool:
    """Return whether a text configuration has routed experts."""
    return any(_first(config, (name,)) > 1 for name in EXPERT_COUNTS)


def read_mixture(model: nn.Module, config: Any) -> Mixture | None:
    """Return the mixture of experts of a model, which may be on the meta device.

    None for a model without routed experts, or with experts in another form than transformers' parameters of three
    dimensions.

    Args:
        model: a Hugging Face model.
        config: its text configuration.
    """
    num_experts = max(_first(config, (name,)) for name in EXPERT_COUNTS)
    weights = {
        name: tuple(p.shape)
        for name, p in model.named_parameters()
        if "experts" in name.split(".") and p.ndim == 3 and p.shape[0] == num_experts
    }
    per_token = _first(config, PER_TOKEN_COUNTS)
    if not weights or not per_token:
        return None
    layers = {layer_of(name) for name in weights}
    downs = [shape for name, shape in weights.items() if "down" in name.rsplit(".", 1)[-1]]
    hidden_size = config.hidden_size
    return Mixture(
        num_layers=len(layers),
        num_experts=num_experts,
        experts_per_token=per_token,
        expert_elements=sum(num * rows * columns for num, rows, columns in weights.values()),
        router_elements=len(layers) * num_experts * hidden_size,
        expert_size=max((rows * columns // hidden_size for _, rows, columns in downs), default=0),
        shared_size=_shared_size(model, layers),
    )


def _first(config: Any, names: Iterable[str]) -> int:
    """Return the first number that a configuration states under one of the names; 0 if there is none."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), 0)


def layer_of(name: str) -> str:
    """Return the part of a parameter's name up to the number of its layer."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match.group() if match else ""


def _shared_size(model: nn.Module, layers: set[str]) -> int:
    """Return the inputs of the last projection of the shared experts in a layer."""
    sizes = [
        module.in_features
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and layer_of(name) in layers and "shared_expert" in name and "down" in name
    ]
    return max(sizes, default=0)


def norm_elements(model: nn.Module, *, hidden_size: int, head_size: int, num_heads: int) -> int:
    """Return the elements of a token that the norms of a decoder layer read, of the layer that has most.

    A norm of queries or keys whose weight has the size of one head reads all query heads or all key heads.

    Args:
        model: a Hugging Face model, which may be on the meta device.
        hidden_size, head_size, num_heads: sizes of the model.
    """
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        layer, weight = layer_of(name), getattr(module, "weight", None)
        if not layer or "Norm" not in type(module).__name__ or weight is None:
            continue
        leaf = name.rsplit(".", 1)[-1]
        size = weight.numel()
        if size == head_size and leaf.startswith(("q_", "query_")):
            size *= num_heads
        elif size == head_size and leaf.startswith(("k_", "key_")):
            projection = getattr(model.get_submodule(name.rpartition(".")[0]), "k_proj", None)
            size = projection.out_features if isinstance(projection, nn.Linear) else size
        counts[layer] = counts.get(layer, 0) + size
    return max(counts.values(), default=2 * hidden_size)
