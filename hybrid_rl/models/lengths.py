"""The longest sequence that a model takes, from its config, by the rules of vLLM's rotary embeddings."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

_LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Names under which families keep the number of positions; vLLM takes the smallest of them."""


def max_tokens(config: PretrainedConfig) -> int | None:
    """Return the most tokens of a sequence for which engine and trainer compute the same; None without a limit.

        linear    positions x factor, except in Gemma 3, whose config names the product
        yarn      original positions x factor
        longrope  original positions: beyond them vLLM takes the long factors for every sequence, and transformers for
                  the sequences of a micro-batch that holds a long one
        dynamic   positions: beyond them transformers changes the frequencies with the longest sequence of a micro-batch
        others    positions

    Source:
        vLLM's _get_and_verify_max_len and rotary_embedding; transformers' modeling_rope_utils.
    """
    text = config.get_text_config()
    found = [limit for name in _LIMITS if (limit := getattr(text, name, None)) is not None]
    positions = getattr(text, "model_max_length", None) or (min(found) if found else None)
    if positions is None:
        return None
    return min([_scaled(positions, rope, text.model_type) for rope in _rope_parameters(text)], default=positions)


def _scaled(positions: int, rope: Mapping[str, Any], model_type: str) -> int:
    """Return the limit that a rotary embedding sets in a model of `positions` positions."""
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1.0
    original = rope.get("original_max_position_embeddings") or positions
    if kind == "linear" and not model_type.startswith("gemma3"):
        return int(positions * factor)
    if kind == "yarn":
        return int(original * factor)
    return min(positions, original) if kind == "longrope" else positions


def _rope_parameters(text: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of every rotary embedding: one of the whole model, or one for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (rope for rope in parameters.values() if isinstance(rope, Mapping))
