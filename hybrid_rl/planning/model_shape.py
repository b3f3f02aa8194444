"""Sizes of one model: parameters, KV cache, activations and operations.

Activations and operations follow the decoder layer of Llama, Qwen, Mistral and similar models, with norms, latent
attention and routed experts where a family has them.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybrid_rl.config import LoraConfig
from hybrid_rl.planning.layer_parts import Latent, Mixture, layer_of

PREFETCH_ELEMENTS = 50_000_000
"""DeepSpeed's default of stage3_prefetch_bucket_size."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one model; numbers of elements, unless a name says otherwise."""

    architecture: str
    """Name of the model's class."""
    model_type: str
    """Name of the model family, see fused_layers.FAMILIES."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of every parameter, tied ones once."""
    linears: tuple[tuple[str, int, int], ...]
    """Last part of the name, inputs and outputs of every linear layer except the head."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    query_size: int
    """Query heads x head size."""
    output_size: int
    """Query heads x size of a head's value, which differs from query_size with latent attention alone."""
    num_heads: int
    key_size: int
    """Key heads x head size; values have the same size, without latent attention."""
    vocab_size: int
    """Outputs of the head; 1 for a value model."""
    is_gated: bool
    """Whether the feed-forward multiplies two projections."""
    norm_size: int
    """Elements of a token that the norms of one layer read."""
    sharded: frozenset[str] = frozenset()
    """Names of the parameters that tensor parallelism shards."""
    is_counted: bool = True
    """Whether every layer has softmax attention and experts, if any, that are known, so that forward_flops is exact;
    linear attention is not counted."""
    window: int | None = None
    """Tokens to which some layers' attention is limited; None if it is not."""
    mixture: Mixture | None = None
    """Layers with routed experts; None for a model without any."""
    latent: Latent | None = None
    """Latent attention of every layer; None for ordinary attention."""

    def counts_flops(self, lengths: Sequence[int]) -> bool:
        """Return whether forward_flops is exact for sequences of these lengths."""
        return self.is_counted and (self.window is None or max(lengths, default=0) <= self.window)

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(math.prod(shape) for _, shape in self.tensors)

    @functools.cached_property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter."""
        return max(math.prod(shape) for _, shape in self.tensors)

    @functools.cached_property
    def largest_layer(self) -> int:
        """Elements of the decoder layer with most parameters."""
        sizes: dict[str, int] = {}
        for name, shape in self.tensors:
            if layer := layer_of(name):
                sizes[layer] = sizes.get(layer, 0) + math.prod(shape)
        return max(sizes.values(), default=0)

    @property
    def largest_unit(self) -> int:
        """Elements of what is gathered at once where ranks divide the parameters: a layer, or a larger tensor."""
        return max(self.largest_layer, self.largest_tensor)

    @property
    def gathered_elements(self) -> int:
        """Elements of the weights that a rank gathers for a forward over shards: a unit, and the next one ahead."""
        return min(self.num_params, self.largest_unit + max(self.largest_unit, PREFETCH_ELEMENTS))

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.query_size // self.num_heads

    def shard(self, num_ranks: int) -> "ModelShape":
        """Return the shape with the tensors that one of `num_ranks` tensor-parallel ranks holds.

        The first dimension of every sharded tensor is divided; which dimension a rank divides does not change its size.
        """
        if num_ranks == 1:
            return self
        tensors = tuple((n, (s[0] // num_ranks, *s[1:]) if n in self.sharded else s) for n, s in self.tensors)
        return replace(self, tensors=tensors)

    @property
    def num_linear(self) -> int:
        """Elements of all weights that tokens are multiplied with, experts and routers included, except the head's."""
        experts = self.mixture.expert_elements + self.mixture.router_elements if self.mixture else 0
        return self._num_shared_linear + experts

    @property
    def num_active_linear(self) -> int:
        """Elements of the weights that one token is multiplied with, except the head's: of the experts its own."""
        experts = self.mixture.active_elements + self.mixture.router_elements if self.mixture else 0
        return self._num_shared_linear + experts

    @property
    def num_active_params(self) -> int:
        """Number of parameters without the experts that a token is not routed to."""
        return self.num_params - (self.num_linear - self.num_active_linear)

    def num_read_params(self, num_tokens: int) -> float:
        """Return the expected number of parameters that a forward of a few tokens reads: of experts those chosen."""
        if not self.mixture:
            return self.num_params
        return self.num_params - self.mixture.expert_elements + self.mixture.read_elements(num_tokens)

    @property
    def _num_shared_linear(self) -> int:
        return sum(inputs * outputs for _, inputs, outputs in self.linears)

    def num_adapted(self, lora: LoraConfig) -> int:
        """Return the number of adapter parameters: rank (inputs + outputs) for each linear layer with an adapter."""
        targets = lora.target_modules
        return sum(lora.rank * (i + o) for name, i, o in self.linears if targets is None or name in targets)

    def kv_bytes_per_token(self, dtype_bytes: int, *, num_gpus: int = 1) -> int:
        """Return the bytes of one token's keys and values in all layers, on each GPU of an engine.

        Key heads are divided among the GPUs; with fewer heads than GPUs, each GPU holds one. A sliding window counts as
        full attention. With latent attention the engine caches keys and values of all heads, not compressed ones, to
        which a weight sync could not write, and pads values to the size of keys.
        """
        key_size = max(self.key_size // num_gpus, self.head_size)
        return 2 * self.num_layers * key_size * dtype_bytes

    def layer_activation_bytes(
        self, dtype_bytes: int, *, repeats_keys: bool, is_fused: bool, has_experts: bool = False
    ) -> int:
        """Return the bytes per token that one layer saves for its backward; b is `dtype_bytes`.

            norms         (4 + b) N     float32 input and normalised value, before the weight (transformers' RMSNorm);
                                        N elements, usually two times H
                          b N + 8       fused: input and 1 / its root mean square, in float32
            projections   2 b H         input of q, k, v; input of gate and up
                          b (Rq + Rk)   latent attention: compressed queries, and keys with values
            attention     b (Q + K + V + O) + 4 heads    q, k, v, output and the float32 log-sum-exp of flash attention
            feed-forward  4 b I         gate, its activation, up, their product; without a gate 2 b I
                          3 b I         fused: gate, up, their product
            experts       k (4 b Ie + 2 b H) + 4 E     of each of k experts also its input and its output, which the
                                                       router's weight multiplies; the router's softmax in float32
                          4 H           float32 input of the router, in 16 bits in families with shared experts

        H hidden, Q and O heads x size of a key and of a value, K and V the same of key heads (of all heads where
        attention repeats them), I intermediate, of experts Ie. With latent attention, K has all heads, and V is part of
        a tensor with the keys before their rotary part. Rotary embeddings and residual sums save nothing.

        Args:
            dtype_bytes: bytes of an element of parameters and activations.
            repeats_keys: whether attention gets keys and values repeated for every query head (varlen, sdpa with a
                mask).
            is_fused: whether Liger's kernels compute norms and feed-forward, see fused_layers.
            has_experts: whether the layer is one with routed experts.

        Source:
            transformers' LlamaDecoderLayer and grouped_mm_experts_forward, and Liger's kernels; Korthikanti et al. 2022
            (arXiv 2205.05198) derive the GPT layer in the same way.
        """
        b, h = dtype_bytes, self.hidden_size
        keys = self.query_size if repeats_keys else self.key_size
        values, ranks = keys * self.output_size // self.query_size, 0
        if self.latent:
            keys, ranks = self.query_size, self.latent.query_rank + self.latent.key_rank
            values = self.query_size - self.num_heads * self.latent.rotary_size + self.output_size
        attention = b * (self.query_size + keys + values + self.output_size + ranks) + 4 * self.num_heads
        norms = b * self.norm_size + 8 if is_fused else (4 + b) * self.norm_size
        widths = (3 if is_fused else 4) if self.is_gated else 2
        if not (has_experts and self.mixture):
            return norms + 2 * b * h + attention + widths * b * self.intermediate_size
        mixture = self.mixture
        expert = (4 if self.is_gated else 2) * mixture.expert_size + 2 * h
        router = 4 * mixture.num_experts + 4 * h * (b < 4 and mixture.shared_size > 0)
        experts = b * mixture.experts_per_token * expert + router
        return norms + 2 * b * h + attention + widths * b * mixture.shared_size + experts

    def _last_norm_bytes(self, dtype_bytes: int, *, is_fused: bool) -> int:
        return dtype_bytes * self.hidden_size + (4 if is_fused else 4 * self.hidden_size)

    def activation_bytes(
        self, tokens: int, dtype_bytes: int, *, checkpointing: bool, repeats_keys: bool, is_fused: bool
    ) -> int:
        """Return the bytes that a forward over packed tokens saves for backward, without the head.

        They are the activations of all layers and of the last norm; with gradient checkpointing, each layer's input and
        the activations of the one layer that is being recomputed, the largest.
        """
        num_sparse = self.mixture.num_layers if self.mixture else 0
        counts = {False: self.num_layers - num_sparse, True: num_sparse}  # whether a layer has experts -> layers
        layers = {
            has_experts: self.layer_activation_bytes(
                dtype_bytes, repeats_keys=repeats_keys, is_fused=is_fused, has_experts=has_experts
            )
            for has_experts, number in counts.items()
            if number
        }
        last = self._last_norm_bytes(dtype_bytes, is_fused=is_fused)
        if checkpointing:
            return tokens * (self.num_layers * dtype_bytes * self.hidden_size + max(layers.values()) + last)
        return tokens * (sum(counts[kind] * size for kind, size in layers.items()) + last)

    def transient_bytes(self, tokens: int, dtype_bytes: int) -> int:
        """Return the bytes that a forward without gradient holds at its peak, 2 b H + max(3 b I, 8 H) per token.

        They are the residual and its norm, plus the feed-forward's activation, up projection and product, or a norm's
        two float32 copies. k experts of a token hold k b max(H + 4 Ie, 4 H) instead: their inputs and what the gate
        reads and writes, or their outputs three times, as computed, weighted and in the order of the tokens.
        """
        h, mixture = self.hidden_size, self.mixture
        num_sparse = mixture.num_layers if mixture else 0
        widest = max(3 * self.intermediate_size * dtype_bytes * (num_sparse < self.num_layers), 8 * h)
        if mixture:
            experts = mixture.experts_per_token * max(h + 4 * mixture.expert_size, 4 * h)
            widest = max(widest, experts * dtype_bytes, 3 * mixture.shared_size * dtype_bytes)
        return tokens * (2 * h * dtype_bytes + widest)

    def forward_flops(self, tokens: int, length: int) -> float:
        """Return the floating-point operations of a forward without the head: 2 per weight and token, and attention.

        Of routed experts only those of a token count.

        Args:
            tokens: number of tokens.
            length: tokens of a sequence; a token attends to half of them on average, with 2 operations per position for
                each element of the query and of the output.
        """
        attention = self.num_layers * (self.query_size + self.output_size) * length
        return tokens * (2.0 * self.num_active_linear + attention)

    def head_flops(self, tokens: int) -> float:
        """Return the floating-point operations of the head's matrix product."""
        return 2.0 * tokens * self.hidden_size * self.vocab_size
