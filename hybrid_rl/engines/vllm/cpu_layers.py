"""Layers of vLLM on a CPU that compute with the parameters themselves, which weight syncs write.

By default vLLM packs weights into layouts of its CPU kernels after loading, and drops or replaces the parameters.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def keep_cpu_weights_plain() -> None:
    """Make linear layers and routed experts multiply with their parameters."""
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = F.linear  # type: ignore[assignment]

    layer_utils.dispatch_cpu_unquantized_gemm = plain_linear
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = _apply_experts


def rotate_heads_in_pytorch() -> None:
    """Make rotary embeddings of a part of each head run in PyTorch, as DeepSeek's models need them.

    vLLM's kernel for CPUs reads heads that are a dimension of their own at wrong places.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    by_kernel = RotaryEmbedding.forward_cpu

    def rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        rotation = self.forward_native if query.dim() == 3 else functools.partial(by_kernel, self)
        return rotation(positions, query, key)

    RotaryEmbedding.forward_cpu = rotate


def _apply_experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write the weighted sum of each token's experts, gated by SiLU, into `output`.

    Args:
        self: vLLM's experts.
        output: [N, H].
        hidden_states: [N, H].
        w1: [E, 2 * I, H], of each expert the rows of the gate, then those of the projection up.
        w2: [E, H, I].
        topk_weights: [N, K], factor of each chosen expert.
        topk_ids: [N, K], the chosen experts.
        args, kwargs: settings of kernels for other devices.
    """
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        rows, places = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        found = F.linear(F.silu(gate) * up, w2[expert])
        total.index_add_(0, rows, found.float() * topk_weights[rows, places, None].float())
    output.copy_(total)
