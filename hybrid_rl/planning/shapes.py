"""What a model's folder says of its sizes before a weight is loaded: parameters, KV cache, activations, operations.

Parameters are counted on the model's own class, built on the meta device, so they are exact for every architecture.
Activations and operations follow the decoder layer of Llama, Qwen, Mistral and most others; a mixture of experts counts
as if every expert computed, which is too high.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hybrid_rl.config import LoraConfig
from hybrid_rl.models.loading import empty_model
from hybrid_rl.models.tensor_parallel import shard_plan


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of one model. Numbers of elements, unless a name says otherwise."""

    architecture: str
    """Name of the model's class."""
    model_type: str
    """Name of its family, see fused_layers.FAMILIES."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of every parameter, tied ones once."""
    linears: tuple[tuple[str, int, int], ...]
    """Last part of the name, inputs and outputs of every linear layer that is no head."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    query_size: int
    """Heads x their size."""
    num_heads: int
    key_size: int
    """Key heads x their size; values are as large."""
    vocab_size: int
    """Outputs of the head: 1 of a value model."""
    is_gated: bool
    """Whether the feed-forward multiplies two projections."""
    cut: frozenset[str] = frozenset()
    """Names of the parameters that tensor parallel ranks hold between them."""

    @property
    def num_params(self) -> int:
        """All parameters, tied ones once."""
        return sum(torch.Size(shape).numel() for _, shape in self.tensors)

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter."""
        return max(torch.Size(shape).numel() for _, shape in self.tensors)

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.query_size // self.num_heads

    def of_rank(self, size: int) -> "ModelShape":
        """Return it with the tensors that one of `size` tensor parallel ranks holds; all are cut by their rows."""
        tensors = tuple((n, (s[0] // size, *s[1:]) if n in self.cut else s) for n, s in self.tensors)
        return replace(self, tensors=tensors)

    @property
    def num_linear(self) -> int:
        """Weights that every token is multiplied with, the head's left out."""
        return sum(inputs * outputs for _, inputs, outputs in self.linears)

    def num_adapted(self, lora: LoraConfig) -> int:
        """Return the parameters of the adapters: rank (inputs + outputs) for each linear layer that gets one."""
        targets = lora.target_modules
        return sum(lora.rank * (i + o) for name, i, o in self.linears if targets is None or name in targets)

    def kv_bytes_per_token(self, dtype_bytes: int, *, num_gpus: int = 1) -> int:
        """Return what one token's keys and values take in all layers on each GPU of an engine.

        The GPUs share the key heads out; with fewer heads than GPUs each holds one. A sliding window counts as full.
        """
        key_size = max(self.key_size // num_gpus, self.head_size)
        return 2 * self.num_layers * key_size * dtype_bytes

    def layer_activation_bytes(self, dtype_bytes: int, *, repeats_keys: bool, is_fused: bool) -> int:
        """Return the bytes that one layer saves for backward, per token; b are the bytes of an element.

            2 norms       2 (4 + b) H   float32 input and normalised value, before the weight (transformers' RMSNorm)
                          2 (b H + 4)   fused: input and 1 / its root mean square, in float32
            projections   2 b H         input of q, k, v; input of gate and up
            attention     2 b Q + 2 b K + 4 heads    q, output, k, v and the float32 log-sum-exp of flash attention
            feed-forward  4 b I         gate, its activation, up, their product; without a gate 2 b I
                          3 b I         fused: gate, up, their product

        H hidden, Q heads x size, K key heads x size (Q where attention repeats the keys), I intermediate. Rotary
        embeddings and residual sums save nothing. Derived from transformers' LlamaDecoderLayer and Liger's kernels, and
        checked against torch's saved tensors; Korthikanti et al. 2022 (arXiv 2205.05198) derive the GPT layer likewise.

        Args:
            repeats_keys: attention gets keys and values repeated for every query head (varlen, sdpa with a mask).
            is_fused: norms and feed-forward are computed by Liger's kernels, see fused_layers.
        """
        b, h = dtype_bytes, self.hidden_size
        keys = self.query_size if repeats_keys else self.key_size
        attention = 2 * b * (self.query_size + keys) + 4 * self.num_heads
        widths = (3 if is_fused else 4) if self.is_gated else 2
        norm = self._norm_bytes(b, is_fused=is_fused)
        return 2 * norm + 2 * b * h + attention + widths * b * self.intermediate_size

    def _norm_bytes(self, dtype_bytes: int, *, is_fused: bool) -> int:
        return dtype_bytes * self.hidden_size + (4 if is_fused else 4 * self.hidden_size)

    def activation_bytes(
        self, tokens: int, dtype_bytes: int, *, checkpointing: bool, repeats_keys: bool, is_fused: bool
    ) -> int:
        """Return what a forward over packed tokens saves for backward, up to the head.

        All layers' activations and the last norm's; with gradient checkpointing each layer's input, and one layer's
        activations while it is computed again.
        """
        layer = self.layer_activation_bytes(dtype_bytes, repeats_keys=repeats_keys, is_fused=is_fused)
        last = self._norm_bytes(dtype_bytes, is_fused=is_fused)
        if checkpointing:
            return tokens * (self.num_layers * dtype_bytes * self.hidden_size + layer + last)
        return tokens * (self.num_layers * layer + last)

    def transient_bytes(self, tokens: int, dtype_bytes: int) -> int:
        """Return what a forward without gradient holds at its peak, 2 b H + max(3 b I, 8 H) per token.

        Residual and its norm, and in the feed-forward activation, up and product, or in a norm two float32 copies.
        """
        widest = max(3 * self.intermediate_size * dtype_bytes, 8 * self.hidden_size)
        return tokens * (2 * self.hidden_size * dtype_bytes + widest)

    def forward_flops(self, tokens: int, length: int) -> float:
        """Return the operations of a forward without the head: 2 per weight and token, and causal attention.

        Args:
            length: of a sequence; a token attends to half of it on average, 4 operations per query element and place.
        """
        return tokens * (2.0 * self.num_linear + 2.0 * self.num_layers * self.query_size * length)

    def head_flops(self, tokens: int) -> float:
        """Return the operations of the head's product."""
        return 2.0 * tokens * self.hidden_size * self.vocab_size


def read_shape(path: str, *, field: str, is_policy: bool) -> ModelShape:
    """Return the sizes of the model in a folder, of a causal language model or of a value model with one output.

    Raises:
        ConfigError: names the field when the folder holds no such model.
    """
    model, head = empty_model(path, field=field, is_policy=is_policy)
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    linears, cuts = _linears(model, head), shard_plan(model)
    return ModelShape(
        architecture=type(model).__name__,
        model_type=model.config.model_type,
        tensors=tuple((name, tuple(p.shape)) for name, p in model.named_parameters()),
        linears=linears,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(linears, config.hidden_size, getattr(config, "intermediate_size", None)),
        query_size=heads * head_size,
        num_heads=heads,
        key_size=(getattr(config, "num_key_value_heads", None) or heads) * head_size,
        vocab_size=head.out_features,
        is_gated=any("gate" in name for name, _, _ in linears),
        cut=frozenset(name for name, _ in model.named_parameters() if cuts.dimension(name) is not None),
    )


def _linears(model: nn.Module, head: nn.Module) -> tuple[tuple[str, int, int], ...]:
    found = []
    for name, module in model.named_modules():
        if module is not head and isinstance(module, nn.Linear | Conv1D):
            outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
            found.append((name.rsplit(".", 1)[-1], int(inputs), int(outputs)))
    return tuple(found)


def _intermediate_size(linears: Sequence[tuple[str, int, int]], hidden_size: int, stated: int | None) -> int:
    """Return the width of the feed-forward: as stated, else the widest input of a layer that returns to hidden."""
    return stated or max(inputs for _, inputs, outputs in linears if outputs == hidden_size)
