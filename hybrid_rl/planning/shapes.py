"""Sizes of models, read from their folders without loading weights: parameters, KV cache, activations, operations.

Parameters are counted on the model's class, built on the meta device, so the count is exact for every architecture.
Activations and operations follow the decoder layer of Llama, Qwen, Mistral and similar models; of a mixture of experts
every expert counts as active, which is an overestimate.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hybrid_rl.config import Config, LoraConfig
from hybrid_rl.models.folders import empty_model
from hybrid_rl.models.tensor_parallel import shard_plan
from hybrid_rl.models.weight_match import check_weights


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
    num_heads: int
    key_size: int
    """Key heads x head size; values have the same size."""
    vocab_size: int
    """Outputs of the head; 1 for a value model."""
    is_gated: bool
    """Whether the feed-forward multiplies two projections."""
    sharded: frozenset[str] = frozenset()
    """Names of the parameters that tensor parallelism shards."""
    is_dense: bool = True
    """Whether every layer has softmax attention and a feed-forward whose weights all tokens use, so that forward_flops
    is exact; a mixture of experts and linear attention are not."""
    window: int | None = None
    """Tokens to which some layers' attention is limited; None if it is not."""

    def counts_flops(self, lengths: Sequence[int]) -> bool:
        """Return whether forward_flops is exact for sequences of these lengths."""
        return self.is_dense and (self.window is None or max(lengths, default=0) <= self.window)

    @property
    def num_params(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(torch.Size(shape).numel() for _, shape in self.tensors)

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter."""
        return max(torch.Size(shape).numel() for _, shape in self.tensors)

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.query_size // self.num_heads

    def shard(self, num_ranks: int) -> "ModelShape":
        """Return the shape with the tensors that one of `num_ranks` tensor-parallel ranks holds.

        The first dimension of every sharded tensor is divided; which dimension a rank divides does not change its size.
        """
        tensors = tuple((n, (s[0] // num_ranks, *s[1:]) if n in self.sharded else s) for n, s in self.tensors)
        return replace(self, tensors=tensors)

    @property
    def num_linear(self) -> int:
        """Elements of all linear layers' weights except the head's."""
        return sum(inputs * outputs for _, inputs, outputs in self.linears)

    def num_adapted(self, lora: LoraConfig) -> int:
        """Return the number of adapter parameters: rank (inputs + outputs) for each linear layer with an adapter."""
        targets = lora.target_modules
        return sum(lora.rank * (i + o) for name, i, o in self.linears if targets is None or name in targets)

    def kv_bytes_per_token(self, dtype_bytes: int, *, num_gpus: int = 1) -> int:
        """Return the bytes of one token's keys and values in all layers, on each GPU of an engine.

        Key heads are divided among the GPUs; with fewer heads than GPUs, each GPU holds one. A sliding window counts as
        full attention.
        """
        key_size = max(self.key_size // num_gpus, self.head_size)
        return 2 * self.num_layers * key_size * dtype_bytes

    def layer_activation_bytes(self, dtype_bytes: int, *, repeats_keys: bool, is_fused: bool) -> int:
        """Return the bytes per token that one layer saves for its backward; b is `dtype_bytes`.

            2 norms       2 (4 + b) H   float32 input and normalised value, before the weight (transformers' RMSNorm)
                          2 (b H + 4)   fused: input and 1 / its root mean square, in float32
            projections   2 b H         input of q, k, v; input of gate and up
            attention     2 b Q + 2 b K + 4 heads    q, output, k, v and the float32 log-sum-exp of flash attention
            feed-forward  4 b I         gate, its activation, up, their product; without a gate 2 b I
                          3 b I         fused: gate, up, their product

        H hidden, Q heads x size, K key heads x size (Q where attention repeats the keys), I intermediate. Rotary
        embeddings and residual sums save nothing.

        Args:
            dtype_bytes: bytes of an element of parameters and activations.
            repeats_keys: whether attention gets keys and values repeated for every query head (varlen, sdpa with a
                mask).
            is_fused: whether Liger's kernels compute norms and feed-forward, see fused_layers.

        Source:
            transformers' LlamaDecoderLayer and Liger's kernels; Korthikanti et al. 2022 (arXiv 2205.05198) derive the
            GPT layer in the same way.
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
        """Return the bytes that a forward over packed tokens saves for backward, without the head.

        They are the activations of all layers and of the last norm; with gradient checkpointing, each layer's input and
        the activations of the one layer that is being recomputed.
        """
        layer = self.layer_activation_bytes(dtype_bytes, repeats_keys=repeats_keys, is_fused=is_fused)
        last = self._norm_bytes(dtype_bytes, is_fused=is_fused)
        if checkpointing:
            return tokens * (self.num_layers * dtype_bytes * self.hidden_size + layer + last)
        return tokens * (self.num_layers * layer + last)

    def transient_bytes(self, tokens: int, dtype_bytes: int) -> int:
        """Return the bytes that a forward without gradient holds at its peak, 2 b H + max(3 b I, 8 H) per token.

        They are the residual and its norm, plus the feed-forward's activation, up projection and product, or a norm's
        two float32 copies.
        """
        widest = max(3 * self.intermediate_size * dtype_bytes, 8 * self.hidden_size)
        return tokens * (2 * self.hidden_size * dtype_bytes + widest)

    def forward_flops(self, tokens: int, length: int) -> float:
        """Return the floating-point operations of a forward without the head: 2 per weight and token, and attention.

        Args:
            tokens: number of tokens.
            length: tokens of a sequence; a token attends to half of them on average, with 4 operations per query
                element and position.
        """
        return tokens * (2.0 * self.num_linear + 2.0 * self.num_layers * self.query_size * length)

    def head_flops(self, tokens: int) -> float:
        """Return the floating-point operations of the head's matrix product."""
        return 2.0 * tokens * self.hidden_size * self.vocab_size


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
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    linears, shards = _linears(model, head), shard_plan(model)
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
        sharded=frozenset(name for name, _ in model.named_parameters() if shards.dimension(name) is not None),
        is_dense=_is_dense(config),
        window=getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None,
    )


def _is_dense(config: Any) -> bool:
    """Return whether a configuration has one feed-forward for all tokens and softmax attention in every layer."""
    experts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds <= {"full_attention", "sliding_attention"} and not any(getattr(config, n, None) for n in experts)


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
