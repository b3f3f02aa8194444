"""Names of routed experts: transformers keeps all experts of a layer in one tensor, most checkpoints each by itself."""

from torch import Tensor

_ONE_TENSOR = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
"""End of a name in transformers -> names of its parts in a checkpoint, in the order of their rows."""


def spellings(name: str, tensor: Tensor) -> list[list[tuple[str, Tensor]]]:
    """Return the ways in which an engine may know a tensor: as it is, and experts also each by itself, as views.

    Args:
        name: name of the tensor in transformers.
        tensor: of experts [E, rows, columns]; the gates and the projections up of an expert are rows of one matrix.
    """
    whole = [(name, tensor)]
    parts = next((parts for end, parts in _ONE_TENSOR.items() if name.endswith(f".{end}")), ())
    if not parts or tensor.ndim != 3:
        return [whole]
    owner = name.rpartition(".")[0]
    each = [
        (f"{owner}.{expert}.{part}.weight", rows)
        for expert, matrix in enumerate(tensor)
        for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
    ]
    return [whole, each]
