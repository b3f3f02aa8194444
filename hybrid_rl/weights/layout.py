"""Layout of the alias buffer, in which each parameter of the engine, fused ones included, is one contiguous part.

DeepSpeed requires that each parameter group of the optimizer is contiguous, with zero padding only at its end. The
engine requires that the rows of q, k and v follow each other, and the rows of gate and up. The layout meets both: each
group has the order of the model, except that the weights which the engine fuses are adjacent.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from hybrid_rl.config import Config
from hybrid_rl.weights.bucket import Slot
from hybrid_rl.weights.protocols import NamedShape

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers whose weights and biases vLLM fuses into one parameter, in the order of their rows."""
KNOWN = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "GlmForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Olmo2ForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)
"""Architectures tested with vLLM, which only copies each checkpoint tensor into its rows of a parameter."""
_VECTOR_BYTES = 16  # size of a vector load of the engine's kernels
_BUFFER_ALIGNMENT = 256
_VOCABULARY_ROWS = 64  # vLLM rounds the number of rows of embedding and head up to a multiple


def engine_order(names: Iterable[str]) -> list[str]:
    """Return the names in order, except that fused ones follow the first of them."""
    present = dict.fromkeys(names)
    ordered: dict[str, None] = {}
    for name in present:
        ordered |= dict.fromkeys(sibling for sibling in _fused_with(name) if sibling in present)
    return list(ordered)


def _fused_with(name: str) -> list[str]:
    """Return the names that the engine fuses with a name, including it; three for `a.k_proj.bias`."""
    owner, _, leaf = name.rpartition(".")
    owner, _, layer = owner.rpartition(".")
    for layers in FUSED:
        if layer in layers:
            return [".".join(part for part in (owner, sibling, leaf) if part) for sibling in layers]
    return [name]


def alias_slots(tensors: Sequence[NamedShape], *, num_ranks: int) -> list[Slot]:
    """Return the slots of the buffer: first the tensors with weight decay (two or more dimensions), then the others.

    Within a group each tensor begins where the previous one ends. After a group there is room for DeepSpeed's
    alignment padding, at most two elements per rank.
    """
    shapes = {name: (shape, dtype) for name, shape, dtype in tensors}
    matrices = [name for name, shape, _ in tensors if len(shape) >= 2]
    vectors = [name for name, shape, _ in tensors if len(shape) < 2]
    slots, end = [], 0
    for group in (matrices, vectors):
        for name in engine_order(group):
            slots.append(Slot(name=name, shape=shapes[name][0], dtype=shapes[name][1], offset=end))
            end += slots[-1].nbytes
        end = _round_up(end + 2 * num_ranks * tensors[0][2].itemsize, _BUFFER_ALIGNMENT)
    return slots


def alias_bytes(slots: Sequence[Slot], *, num_ranks: int) -> int:
    """Return the size of the buffer: all groups with their padding, and every matrix with its rows rounded up to 64.

    The engine's embedding and head have such additional rows, which overlap the next tensors. No token id refers to
    them, and the engine cuts their logits off.
    """
    end = max(slot.offset + slot.nbytes for slot in slots) + 2 * num_ranks * slots[0].dtype.itemsize
    for slot in slots:
        if len(slot.shape) == 2:
            rows = _round_up(slot.shape[0], _VOCABULARY_ROWS)
            end = max(end, slot.offset + rows * slot.shape[1] * slot.dtype.itemsize)
    return _round_up(end, _BUFFER_ALIGNMENT)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _zero(config: Config) -> dict[str, Any]:
    given = config.update.deepspeed.get("zero_optimization")
    return given if isinstance(given, dict) else {}


def why_not_alias(config: Config, *, architecture: str, tensors: Sequence[NamedShape]) -> str | None:
    """Return the reason why the engine cannot alias the trainer's weights, with its remedy; None if it can.

    Args:
        architecture: class name of the actor's Hugging Face model.
        tensors: name, shape and dtype of the actor's parameters.
    """
    size = config.rollout.tensor_parallel_size
    if size > 1:
        return f"rollout.tensor_parallel_size = {size} shards the engine's weights, the trainer's are unsharded; use 1"
    size = config.update.tensor_parallel_size
    if size > 1:
        return f"update.tensor_parallel_size = {size} shards the trainer's weights, the engine's are unsharded; use 1"
    if config.update.zero_stage == 3:
        return "update.zero_stage = 3 shards the trainer's weights, the engine's are unsharded; use 0 to 2"
    for field, given, key in (
        ("rollout.vllm", config.rollout.vllm, "model_impl"),
        ("update.deepspeed.zero_optimization", _zero(config), "round_robin_gradients"),
    ):
        if key in given:
            return f"{field}.{key} = {given[key]} may change the order of the weights; remove it"
    if architecture not in KNOWN:
        return f"{architecture} is not one of {', '.join(sorted(KNOWN))}: its layout in the engine is unknown; use copy"
    odd = [slot for slot in alias_slots(tensors, num_ranks=1) if slot.offset % _VECTOR_BYTES]
    if odd:
        return f"{odd[0].name} would begin at byte {odd[0].offset}, not a multiple of {_VECTOR_BYTES}; use copy"
    return None
