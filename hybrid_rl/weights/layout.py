"""Where each weight of the trainer lies in one buffer, so that an engine's fused weights are parts of it as they are.

Two sides decide. DeepSpeed wants each group of its optimizer in one piece, with zeros for alignment only behind it; the
engine wants the rows of q, k and v, and of gate and up, one behind the other. Both hold when each group is laid down in
the order of the model, and what the engine fuses is drawn together.
"""

from collections.abc import Iterable, Sequence

from hybrid_rl.config import Config
from hybrid_rl.weights.bucket import Slot
from hybrid_rl.weights.protocols import NamedShape

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM computes as one, in the order of their rows; weights, and biases where there are some."""
KNOWN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures tried with vLLM: all that it does with a checkpoint's tensor is to copy it into its rows."""
_VECTOR_BYTES = 16  # what the engine's kernels load at once
_BUFFER_ALIGNMENT = 256
_VOCABULARY_ROWS = 64  # vLLM rounds the rows of embedding and head up to a multiple of it


def engine_order(names: Iterable[str]) -> list[str]:
    """Return the names with what the engine fuses drawn together, at the place of the first of them."""
    present = dict.fromkeys(names)
    ordered: dict[str, None] = {}
    for name in present:
        ordered |= dict.fromkeys(sibling for sibling in _fused_with(name) if sibling in present)
    return list(ordered)


def _fused_with(name: str) -> list[str]:
    """Return the names that the engine fuses with it, itself included; `a.k_proj.bias` gives three."""
    owner, _, leaf = name.rpartition(".")
    owner, _, layer = owner.rpartition(".")
    for layers in FUSED:
        if layer in layers:
            return [".".join(part for part in (owner, sibling, leaf) if part) for sibling in layers]
    return [name]


def alias_slots(tensors: Sequence[NamedShape], *, num_ranks: int) -> list[Slot]:
    """Return where each tensor lies: first those that weight decay shrinks (two dimensions and more), then the others.

    Inside a group one begins where the one before ends. Behind a group there is room for what DeepSpeed aligns it to,
    two elements a rank.
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
    """Return the size of the buffer: all groups with their room, and every matrix with its rows rounded up to 64.

    The engine's embedding has such rows. They lie over whatever comes next, for nobody reads them: no id is that high,
    and the logits of the head's are cut off.
    """
    end = max(slot.offset + slot.nbytes for slot in slots) + 2 * num_ranks * slots[0].dtype.itemsize
    for slot in slots:
        if len(slot.shape) == 2:
            rows = _round_up(slot.shape[0], _VOCABULARY_ROWS)
            end = max(end, slot.offset + rows * slot.shape[1] * slot.dtype.itemsize)
    return _round_up(end, _BUFFER_ALIGNMENT)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def why_not_alias(config: Config, *, architecture: str, tensors: Sequence[NamedShape]) -> str | None:
    """Return the rule that forbids the engine to use the trainer's weights where they lie, or None.

    Args:
        architecture: name of the actor's class.
        tensors: of the actor, as the trainer names them.
    """
    size = config.rollout.tensor_parallel_size
    if size > 1:
        return f"rollout.tensor_parallel_size = {size} cuts the engine's weights up, and the trainer's are whole; use 1"
    size = config.update.tensor_parallel_size
    if size > 1:
        return f"update.tensor_parallel_size = {size} cuts the trainer's weights up, and the engine's are whole; use 1"
    if config.update.zero_stage == 3:
        return "update.zero_stage = 3 cuts the trainer's weights up; use 0 to 2"
    if config.models.lora.rank:
        return f"models.lora.rank = {config.models.lora.rank}: the engine gets merged weights, which nobody else has"
    if architecture not in KNOWN:
        return f"{architecture} is not one of {', '.join(sorted(KNOWN))}: its layout in the engine is not known"
    odd = [slot for slot in alias_slots(tensors, num_ranks=1) if slot.offset % _VECTOR_BYTES]
    if odd:
        return f"{odd[0].name} would begin at byte {odd[0].offset}, no multiple of {_VECTOR_BYTES}"
    return None
